"""What must hold while the runtime bench measures: right results, and exactly the rows that were simulated."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from equilibra.bench.runtime.contenders import Contender
from equilibra.bench.runtime.layers import RankLayers
from equilibra.core.errors import ExecuteError
from equilibra.core.plan import Stage
from equilibra.events.schema import Direction, Events, Kind

__all__ = ["check_results", "check_rows"]

TOLERANCE = 1e-4
"""largest difference of outputs and gradients, relative to the largest value: float32 sums in another order"""
ROUNDING = 1e-2
"""of the largest gradient: what is smaller altogether may be rounding alone, as that of a router whose weights are 1"""


def check_results(layers: RankLayers, contender: Contender) -> float:
    """The largest relative difference between outputs and gradients of the runtime and of the plain layers."""
    outputs: list[Tensor] = []
    layers.prepare()
    layers.balanced_step(contender, outputs)
    found = [*outputs, *(gradient.clone() for gradient in layers.gradients())]
    outputs = []
    layers.prepare()
    layers.plain_step(contender.experts_MR, outputs)
    gradients = layers.gradients()
    least = ROUNDING * max((float(part.abs().max()) for part in gradients if part.numel()), default=0.0)
    floors = [0.0] * len(outputs) + [least] * len(gradients)
    pairs = zip(found, [*outputs, *gradients], floors, strict=True)
    difference = layers.largest(max(_difference(*pair) for pair in pairs))
    if not difference <= TOLERANCE:
        raise ExecuteError(
            f"{contender.name}: outputs or gradients differ from the plain layer's by {difference:.1e} of the largest "
            f"value, {TOLERANCE:.0e} is allowed; nothing was timed"
        )
    return difference


def _difference(found: Tensor, wanted: Tensor, least: float) -> float:
    if not wanted.numel():
        return 0.0
    difference = (found - wanted).abs().max() / wanted.abs().max().clamp(min=max(least, 1e-30))
    return float(torch.nan_to_num(difference, nan=torch.inf))


def check_rows(contender: Contender, rank: int, events: Events) -> int:
    """Rows that this rank's experts executed must be those simulated; returns how many counts were compared."""
    compared = 0
    for stage in Stage:
        simulated_LM = contender.plan.rank_load(contender.load, stage)[:, :, rank]
        for direction in (Direction.FORWARD, Direction.BACKWARD)[: 1 + (stage is Stage.UPDATE)]:
            rows = events.where(kind=Kind.EXPERTS, stage=stage.number, direction=direction)
            executed_LM = np.zeros_like(simulated_LM)
            np.add.at(executed_LM, (rows["layer"], rows["micro_batch"]), rows["tokens"])
            if not np.array_equal(executed_LM, simulated_LM):
                raise ExecuteError(
                    f"{contender.name}, {stage}, {direction.name.lower()}: rank {rank} executed the rows "
                    f"{executed_LM.tolist()} of its layers and micro-batches, simulated were {simulated_LM.tolist()}"
                )
            compared += executed_LM.size
    return compared
