"""Read routing from NeMo-RL's batches (`BatchedDataDict`), as `policy.router_replay` fills them. NeMo-RL is not needed.

    routed_experts      [sequences, tokens, layers, k], int8, int16 or int32 by the number of experts
    input_lengths       [sequences] tokens of each, without the padding on the right
                        (`unpadded_sequence_lengths` in the output of a generation)
    generation_lengths  [sequences] tokens of the answer, in the output of a generation

A row of -1 has no routing. The rows of the last token and of padding hold fillers and are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from equilibra.core.errors import InputError
from equilibra.integrations.routing_formats import RoutedModel, RoutedSequence, align, as_rows, located

__all__ = ["sequences_of_batch"]

LENGTHS = ("input_lengths", "unpadded_sequence_lengths")


def sequences_of_batch(batch: Mapping[str, Any], model: RoutedModel) -> Iterator[RoutedSequence]:
    """The sequences of a batch, one at a time."""
    routed = batch.get("routed_experts")
    lengths = next((batch[name] for name in LENGTHS if batch.get(name) is not None), None)
    if routed is None or lengths is None:
        raise InputError(
            f"the batch must have routed_experts and {' or '.join(LENGTHS)}; it has {sorted(batch)!r:.200}"
        )
    if len(lengths) != len(routed):
        raise InputError(f"{len(routed)} sequences need as many lengths, not {len(lengths)}")
    answers = batch.get("generation_lengths")
    for number in range(len(routed)):
        with located(f"sequence {number}"):
            length, width = int(lengths[number]), int(np.shape(routed)[1])
            if not 1 <= length <= width:
                raise InputError(f"it has {length} tokens; the batch has rows for 1 to {width}")
            prompt = None if answers is None else length - int(answers[number])
            yield align(as_rows(routed[number])[: length - 1], model, num_tokens=length, prompt_length=prompt)
