"""Order: which pass of which micro-batch every pipeline stage runs next.

Log-prob runs all micro-batches forward. The update runs one forward, one backward (1F1B): a stage with n stages behind
it starts n + 1 forward passes before its first backward pass. Micro-batches of different optimizer steps do not mix.

A visit is one pass of one micro-batch through one layer. Under activation recompute a backward pass visits each layer
twice, forward again and then backward.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from equilibra.core.visit import Stage
from equilibra.events.schema import Direction
from equilibra.simulate.setting import RunSetting

__all__ = ["Pass", "Visits", "chunks", "passes_of_stage", "visits_of"]


class Pass(NamedTuple):
    """One micro-batch through all layers of a pipeline stage, forward or backward."""

    stage: Stage
    direction: Direction
    micro_batch: int
    chunk: int
    """optimizer step, counted from 0; the log-prob stage is -1"""


class Visits(NamedTuple):
    """Visits of one pipeline stage in order."""

    stage: NDArray[np.int64]
    direction: NDArray[np.int64]
    layer: NDArray[np.int64]
    micro_batch: NDArray[np.int64]
    last_of_chunk: NDArray[np.int64]
    """the last visit before weights change: no copy is fetched beyond it"""


def chunks(num_micro_batches: int, optimizer_steps: int) -> list[range]:
    """Micro-batches of each optimizer step, as even as they go."""
    bounds = [num_micro_batches * i // optimizer_steps for i in range(optimizer_steps + 1)]
    return [range(a, b) for a, b in pairwise(bounds) if b > a]


def passes_of_stage(number: int, num_micro_batches: int, setting: RunSetting) -> list[Pass]:
    """What pipeline stage `number` runs, in order."""
    found: list[Pass] = []
    if setting.logprob_stage:
        found += [Pass(Stage.LOGPROB, Direction.FORWARD, m, -1) for m in range(num_micro_batches)]
    for chunk, part in enumerate(chunks(num_micro_batches, setting.optimizer_steps)):
        ahead = min(setting.pipeline_stages - number, len(part))
        forward = [Pass(Stage.UPDATE, Direction.FORWARD, m, chunk) for m in part]
        backward = [Pass(Stage.UPDATE, Direction.BACKWARD, m, chunk) for m in part]
        found += forward[:ahead]
        for i, one in enumerate(backward):
            found.append(one)
            found += forward[ahead + i : ahead + i + 1]
    return found


def visits_of(passes: list[Pass], layers: range, *, activation_recompute: bool) -> Visits:
    """The visits of these passes."""
    rows: list[tuple[int, int, int, int, int]] = []
    for one in passes:
        if one.direction is Direction.FORWARD:
            rows += [(one.stage.number, Direction.FORWARD, layer, one.micro_batch, one.chunk) for layer in layers]
            continue
        for layer in reversed(layers):
            if activation_recompute:
                rows.append((one.stage.number, Direction.FORWARD_AGAIN, layer, one.micro_batch, one.chunk))
            rows.append((one.stage.number, Direction.BACKWARD, layer, one.micro_batch, one.chunk))
    table = np.array(rows, np.int64).reshape(-1, 5)
    chunk = np.maximum(table[:, 4], 0)  # weights are the same in the log-prob stage and in the first optimizer step
    last = np.searchsorted(chunk, chunk, side="right") - 1
    stage, direction, layer, micro_batch, _ = np.ascontiguousarray(table.T)
    return Visits(stage, direction, layer, micro_batch, last)
