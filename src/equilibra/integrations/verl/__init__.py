"""Read routing from verl's batches (`DataProto`), as its agent loop fills them for router replay R3.

    batch.batch["routed_experts"]   [sequences, prompt + response, layers, k], zeros where nothing was written
    batch.batch["attention_mask"]   [sequences, prompt + response], 1 for tokens; prompts padded left, responses right
    batch.batch["prompts"]          [sequences, prompt]: responses begin at its width
    batch.non_tensor_batch["uid"]   shared by all answers to one prompt

Unpadded batches have jagged tensors `routed_experts` and `input_ids`. A row of zeros is a filler (with more than one
expert per token), and the last token of a sequence has no routing. verl is not needed to read them; `plugin` is the
module that verl imports to train under plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from equilibra.core.errors import InputError
from equilibra.integrations.routing_formats import RoutedModel, RoutedSequence, align, as_rows, located

__all__ = ["sequences_of_batch"]

ENGINE = "verl.workers.engine.megatron.transformer_impl"
"""verl's module that the hooks change"""


def sequences_of_batch(batch: Any, model: RoutedModel) -> Iterator[RoutedSequence]:  # noqa: ANN401 - verl has the type
    """The sequences of a `DataProto`, or of a mapping with the same tensors, one at a time."""
    tensors = getattr(batch, "batch", batch)
    routed = _tensor(tensors, "routed_experts")
    groups = _groups(getattr(batch, "non_tensor_batch", {}), len(routed))
    if bool(getattr(routed, "is_nested", False)):
        yield from _jagged(tensors, routed, model, groups)
        return
    mask = _tensor(tensors, "attention_mask")
    mask = np.asarray(mask.detach().cpu().numpy() if hasattr(mask, "detach") else mask)
    if mask.dtype.kind not in "iub" or mask.ndim != 2:
        raise InputError(f"attention_mask must be integers in 2 dimensions, not {mask.dtype} {mask.shape}")
    if tuple(routed.shape[:2]) != mask.shape:
        raise InputError(f"routed_experts have shape {tuple(routed.shape)}, but the attention mask {mask.shape}")
    prompts = _optional(tensors, "prompts")
    for number, (of_sequence, group) in enumerate(zip(mask, groups, strict=True)):
        with located(f"sequence {number}"):
            tokens = np.flatnonzero(of_sequence)
            if tokens.size == 0:
                raise InputError("it has no tokens: its attention mask is zero throughout")
            if tokens[-1] - tokens[0] + 1 != tokens.size:
                raise InputError("its attention mask has a gap: padding must be at the ends")
            prompt = None if prompts is None else int(np.count_nonzero(of_sequence[: prompts.shape[1]]))
            rows = as_rows(routed[number])[tokens[0] : tokens[-1]]
            yield align(rows, model, prompt_length=prompt, group=group, zeros_are_fillers=True)


def _jagged(
    tensors: Any, routed: Any, model: RoutedModel, groups: Sequence[int | None]  # noqa: ANN401
) -> Iterator[RoutedSequence]:  # fmt: skip
    """Unpadded sequences: a row for each token, the last one a filler."""
    inputs = _optional(tensors, "input_ids")
    lengths = [len(part) for part in inputs.unbind()] if inputs is not None else None
    for number, (part, group) in enumerate(zip(routed.unbind(), groups, strict=True)):
        with located(f"sequence {number}"):
            if lengths is not None and lengths[number] != len(part):
                raise InputError(f"it has {lengths[number]} tokens but routing of {len(part)}")
            yield align(as_rows(part)[:-1], model, group=group, zeros_are_fillers=True)


def _optional(tensors: Any, name: str) -> Any:  # noqa: ANN401 - a dict or a TensorDict
    return tensors[name] if name in tensors.keys() else None  # noqa: SIM118 - a TensorDict has no other test


def _tensor(tensors: Any, name: str) -> Any:  # noqa: ANN401
    found = _optional(tensors, name)
    if found is None:
        raise InputError(f"the batch has no {name}: R3's rollout must fill routed_experts and attention_mask")
    return found


def _groups(others: Mapping[str, Any], num_sequences: int) -> Sequence[int | None]:
    """The group of each sequence: uids numbered in order of appearance, None without uids."""
    uids = others.get("uid")
    if uids is None:
        return [None] * num_sequences
    if len(uids) != num_sequences:
        raise InputError(f"{num_sequences} sequences need as many uids, not {len(uids)}")
    seen: dict[str, int] = {}
    return [seen.setdefault(str(uid), len(seen)) for uid in uids]
