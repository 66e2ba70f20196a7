"""One rank of the runtime bench: prices, plans, checks, then timed steps.

Contenders and the plain layer run one after another in every repeat, each time in another order, so that disturbances
hit all of them (see `clock`). The checks run all of them once before, so nothing is timed on its first run. While
measuring, results must be right, and executed rows must be exactly the simulated ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from time import process_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.runtime.case import Case, Shape
from benchmarks.runtime.clock import Clock, Timed
from benchmarks.runtime.contenders import PLAIN, Contender, contenders
from benchmarks.runtime.layers import RankLayers
from equilibra.core.errors import ExecuteError
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.events.schema import Direction, Events, Kind
from equilibra.execute.experts import expert_math
from equilibra.execute.group import Channel, ExpertGroup
from equilibra.execute.kernels import ExpertParts, RowWeights

TOLERANCE = 1e-4
"""largest difference of outputs and gradients, relative to the largest value: float32 sums in another order"""
ROUNDING = 1e-2
"""share of the largest gradient below which a whole gradient may be rounding, as a router's whose weights are 1"""


def measure(case: Case, shape: Shape, group: ExpertGroup, tell: Callable[[str], None]) -> dict[str, Any]:
    """Check all contenders, then time all of them; the same on every rank."""
    layers = RankLayers(case, shape, group)
    rates = measured_rates(layers, case)
    every = {found.name: found for found in contenders(case, rates=rates, spare_slots=shape.spare_slots)}
    for contender in every.values():
        group.agree(contender.plan.digest, what=f"the plan of {contender.name}")
    difference = max(check_results(layers, contender) for contender in every.values())
    tell(f"outputs and gradients of all contenders equal the plain layer's to {difference:.0e}")
    clock = Clock(prepare=layers.prepare, largest=layers.largest, patience_s=shape.patience_s)
    times = _Times(clock, layers, case, every)
    for repeat, names in enumerate(_orders([*every, PLAIN], shape.repeats)):
        for name in names:
            times.add(name)
        last = ", ".join(f"{name} {steps[-1].seconds:.2f} s" for name, steps in times.steps.items())
        tell(f"repeat {repeat + 1} of {shape.repeats}: {last}")
    return {
        **times.about(),
        "rates": _about(rates),
        "largest_difference": difference,
        "contenders": [_plan_about(contender) for contender in every.values()],
    }


class _Times:
    """Timed steps by contender; rows are compared after every step of the runtime."""

    def __init__(self, clock: Clock, layers: RankLayers, case: Case, every: dict[str, Contender]) -> None:
        self.clock, self.layers, self.case, self.every = clock, layers, case, every
        self.steps: dict[str, list[Timed[None]]] = {name: [] for name in (*every, PLAIN)}
        self.experts_s: dict[str, list[float]] = {name: [] for name in every}
        self.counts_compared = 0

    def add(self, name: str) -> None:
        """Add a step of a contender or of the plain layer."""
        layers, contender = self.layers, self.every.get(name)
        step = partial(layers.plain_step, self.case.experts_MR)
        if contender is not None:
            step = partial(layers.balanced_step, contender)
        self.steps[name].append(self.clock.time(step))
        if contender is not None:
            events = Events.of(layers.runtime.recorder.taken())
            self.counts_compared += check_rows(contender, layers.group.rank, events) * layers.group.num_ranks
            spent = events.where(kind=Kind.EXPERTS)
            self.experts_s[name].append(layers.largest(float((spent["end_us"] - spent["start_us"]).sum()) / 1e6))

    def about(self) -> dict[str, Any]:
        seconds = {name: [timed.seconds for timed in steps] for name, steps in self.steps.items()}
        others = [timed.others_share for steps in self.steps.values() for timed in steps]
        return {
            "seconds": seconds,
            "experts_share": {name: median(spent) / median(seconds[name]) for name, spent in self.experts_s.items()},
            "others_share": {"median": median(others), "high": max(others), "steps_run_again": self.clock.run_again},
            "counts_compared": self.counts_compared,
        }


def _orders(names: list[str], count: int) -> Iterator[list[str]]:
    """Orders of the contenders: rotated by one every repeat, every second one reversed."""
    for turn in range(count):
        at = turn % len(names)
        order = names[at:] + names[:at]
        yield order if turn % 2 == 0 else order[::-1]


def measured_rates(layers: RankLayers, case: Case) -> Rates:
    """Measured rates of rows and copies, so that the planner makes no copy that costs more than it saves.

    In processor time, so that other programs on the machine do not count. No engine copies while a core computes, so
    all of a copy's time counts.
    """
    weights, group = layers.runtime.weights[0], layers.group
    kind, home = layers.runtime.spec.activation, weights.homes()[:1]
    problems = case.load.num_experts * case.load.num_micro_batches
    num_rows = max(case.num_tokens * case.top_k // problems, 1)
    rows_ND = torch.randn(num_rows, weights.spec.hidden)
    results, h = expert_math.forward(kind, rows_ND, [num_rows], home)
    gradient = ExpertParts(**{name: torch.zeros(shape) for name, shape in weights.layout.shapes.items()})
    weighted = RowWeights(torch.ones(num_rows), torch.empty(num_rows))
    row = torch.zeros(weights.layout.size)
    received = torch.empty_like(row)
    sizes = [int(rank != group.rank) for rank in range(group.num_ranks)]

    def forward() -> None:
        expert_math.forward(kind, rows_ND, [num_rows], home)

    def backward() -> None:
        saved, dx_ND = (rows_ND, h, results), torch.empty_like(rows_ND)
        expert_math.backward(kind, saved, [num_rows], home, [gradient], dx_ND, weighted=weighted)

    def copy() -> None:
        weights.write_flat(int(weights.experts[0]), row)
        group.all_to_all(Channel.COPIES, row[None], sizes, received[None], sizes, what="measuring a copy").wait()
        received.add_(row)

    mine = torch.tensor([_processor_us(work) for work in (forward, backward, copy)], dtype=torch.float64)
    dist.all_reduce(mine)
    forward_us, backward_us, copy_us = (mine / group.num_ranks).tolist()
    return Rates(
        row_us={Stage.LOGPROB: forward_us / num_rows, Stage.UPDATE: (forward_us + backward_us) / num_rows},
        flash_copy_us={Stage.LOGPROB: copy_us, Stage.UPDATE: 2 * copy_us}, exposed_share=1.0,
        cross_row_us=0.0, standing_copy_us=0.0, move_us=0.0, move_inside_us=0.0,
    )  # fmt: skip


def _processor_us(work: Callable[[], None]) -> float:
    """The minimum of several times in microseconds; above 0 even with coarse clocks."""
    found = []
    for _ in range(8):
        start = process_time()
        work()
        found.append(process_time() - start)
    return max(min(found) * 1e6, 1e-3)


def _about(rates: Rates) -> dict[str, float]:
    return {
        **{f"row_us_{stage}": rates.row_us[stage] for stage in Stage},
        **{f"copy_us_{stage}": rates.flash_copy_us[stage] for stage in Stage},
    }


def _plan_about(contender: Contender) -> dict[str, Any]:
    """Statistics of a contender's plan."""
    plan = contender.plan
    rank_load = plan.rank_load(contender.load)
    return {
        "contender": contender.name,
        "imbalance": float(rank_load.max(axis=2).sum() / rank_load.mean(axis=2).sum()),
        "flash_copies": {str(stage): plan.stages[stage].num_copies for stage in Stage},
        "standing_copies": plan.standing.num_copies,
        "rows_of_rank": rank_load.sum(axis=(0, 1)).tolist(),
        "digest": plan.digest,
    }


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
    """Check that executed rows equal the simulated ones; returns the number of compared counts."""
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
