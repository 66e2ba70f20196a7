"""verl: the routing of its batches as sequences, which needs no verl; and `plugin`, which verl imports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.integrations.routing_formats.decode import as_rows, located
from equilibra.integrations.routing_formats.model import RoutedModel
from equilibra.integrations.routing_formats.sequence import RoutedSequence, Rows, align

__all__ = ["sequences_of_batch"]

# Routing in verl's batches (`DataProto`), as its agent loop fills them for router replay R3.
#
#     batch.batch["routed_experts"]   [sequences, prompt + response, layers, k], zeros where nothing was written
#     batch.batch["attention_mask"]   [sequences, prompt + response], 1 for tokens; prompts padded left, responses
#     right
#     batch.batch["prompts"]          [sequences, prompt]: its width is where responses begin
#     batch.non_tensor_batch["uid"]   answers to one prompt share it
#
# or, without padding, jagged tensors: `routed_experts` and `input_ids`, a part per sequence. Padding is no token.
# Zeros
# throughout a token's row are fillers (with more than one expert per token); the last token of a sequence has no
# routing.


def sequences_of_batch(batch: Any, model: RoutedModel) -> Iterator[RoutedSequence]:  # noqa: ANN401 - verl has the type
    """The sequences of a `DataProto`, or of a table with the same tensors, one at a time."""
    tensors = getattr(batch, "batch", batch)
    routed = _tensor(tensors, "routed_experts")
    groups = _groups(getattr(batch, "non_tensor_batch", {}), len(routed))
    if bool(getattr(routed, "is_nested", False)):
        yield from _jagged(tensors, routed, model, groups)
        return
    mask = _whole_numbers(_tensor(tensors, "attention_mask"), "attention_mask", 2) != 0
    if tuple(routed.shape[:2]) != mask.shape:
        raise InputError(f"routed_experts are of shape {tuple(routed.shape)}, the attention mask of {mask.shape}")
    response = _keys(tensors, "prompts")
    width = response.shape[1] if response is not None else None
    for number, of_sequence in enumerate(mask):
        with located(f"sequence {number}"):
            tokens = np.flatnonzero(of_sequence)
            if tokens.size == 0:
                raise InputError("it has no tokens: its attention mask is zero throughout")
            if tokens[-1] - tokens[0] + 1 != tokens.size:
                raise InputError("its attention mask has a gap: padding must be at the ends")
            prompt = None if width is None else int(np.count_nonzero(of_sequence[:width]))
            yield _sequence(as_rows(routed[number])[tokens[0] : tokens[-1]], model, prompt, groups[number])


def _jagged(
    tensors: Any, routed: Any, model: RoutedModel, groups: Sequence[int | None]  # noqa: ANN401
) -> Iterator[RoutedSequence]:  # fmt: skip
    """Without padding: every part has a row for each token, the last one a filler."""
    inputs = _keys(tensors, "input_ids")
    lengths = [len(part) for part in inputs.unbind()] if inputs is not None else None
    for number, part in enumerate(routed.unbind()):
        with located(f"sequence {number}"):
            if lengths is not None and lengths[number] != len(part):
                raise InputError(f"it has {lengths[number]} tokens and routing of {len(part)}")
            yield _sequence(as_rows(part)[:-1], model, None, groups[number])


def _sequence(
    values: NDArray[np.integer[Any]], model: RoutedModel, prompt: int | None, group: int | None
) -> RoutedSequence:  # fmt: skip
    return align(Rows(values=values, prompt_length=prompt, group=group, zeros_are_fillers=True), model)


def _keys(tensors: Any, name: str) -> Any:  # noqa: ANN401 - a dict or a TensorDict
    return tensors[name] if name in tensors.keys() else None  # noqa: SIM118 - a TensorDict has no other test


def _tensor(tensors: Any, name: str) -> Any:  # noqa: ANN401
    found = _keys(tensors, name)
    if found is None:
        raise InputError(f"the batch has no {name}: it needs routed_experts and attention_mask, from R3's rollout")
    return found


def _whole_numbers(values: Any, name: str, dimensions: int) -> NDArray[Any]:  # noqa: ANN401
    array = np.asarray(values.detach().cpu().numpy() if hasattr(values, "detach") else values)
    if array.dtype.kind not in "iub" or array.ndim != dimensions:
        raise InputError(f"{name} must be whole numbers in {dimensions} dimensions, not {array.dtype} {array.shape}")
    return array


def _groups(others: Mapping[str, Any], number: int) -> Sequence[int | None]:
    """A number per uid, in the order of their first sequences."""
    uids = others.get("uid")
    if uids is None:
        return [None] * number
    if len(uids) != number:
        raise InputError(f"{number} sequences need as many uids, not {len(uids)}")
    seen: dict[str, int] = {}
    return [seen.setdefault(str(uid), len(seen)) for uid in uids]
