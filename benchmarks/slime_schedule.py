"""slime's schedule of a rollout against the same samples packed again, on recorded routing. Computed, not timed.

python -m benchmarks.slime_schedule RECORDING... [--output FOLDER]     # from the repository

slime's function is a stand-in (`tests/references/slime_schedule.py`), or slime's own where it is installed. "Waiting"
is slowest over mean rank of every micro-batch, where a sample of s tokens costs 24,576 s + s²: what attention and dense
layers lose. Imbalances are slowest over mean rank of an MoE layer in a micro-batch, on homes and under plans with two
spare slots and all prices zero.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from argparse import Namespace
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tests.references import slime_schedule

from equilibra.core.load import Schedule, SequenceLoad, imbalance, step_load
from equilibra.core.placement import Cluster, Placement
from equilibra.cost.rates import Rates
from equilibra.integrations.slime.schedule import DpSchedule, build_dp_schedule
from equilibra.plan.pack import cell_cost
from equilibra.plan.planner import StepProblem, planner_named
from equilibra.trace.count import sequence_loads
from equilibra.trace.open import load_trace
from equilibra.trace.routing import RoutingTrace

SETTINGS = [(4, 1024), (8, 1024), (8, 2048)]
"""ranks, data-parallel and expert-parallel, and tokens of one in a micro-batch"""


def use_slime() -> str:
    """Install slime's function, or the stand-in, under slime's name."""
    if importlib.util.find_spec("slime") is not None:
        return "slime's own function"
    sys.modules.update({name: ModuleType(name) for name in ("slime", "slime.utils")})
    sys.modules["slime.utils.dp_schedule"] = slime_schedule
    return "a stand-in for slime's function"


def as_schedule(found: DpSchedule, num_samples: int) -> Schedule:
    """A schedule of slime's as one of ours, for one optimizer step."""
    micro_batch, rank = np.zeros((2, num_samples), np.int32)
    for number, (partition, indices) in enumerate(zip(found.partitions, found.micro_batch_indices, strict=True)):
        for m, places in enumerate(indices):
            micro_batch[[partition[at] for at in places]] = m
            rank[[partition[at] for at in places]] = number
    return Schedule(micro_batch_of_sequence=micro_batch, rank_of_sequence=rank, num_micro_batches=len(indices))


def figures(sequences: SequenceLoad, schedule: Schedule, home: Placement) -> list[str]:
    """Micro-batches, waiting, imbalance on homes, imbalance under plans."""
    cost = cell_cost(schedule, sequences.length_of_sequence, home.cluster.num_ranks)
    load = step_load(sequences, schedule, home.cluster)
    problem = StepProblem(
        cluster=home.cluster, given_load=load, previous=home, spare_slots=2, standing_slots=0, max_moves_per_layer=0,
        rates=Rates.free(), seed=0,
    )  # fmt: skip
    static, planned = (planner_named(name).plan(problem) for name in ("static", "equilibra"))
    values = [cost.max(axis=1).sum() / cost.mean(axis=1).sum()]
    values += [float(imbalance(plan.rank_load(load)).mean()) for plan in (static, planned)]
    return [str(schedule.num_micro_batches), *(f"{value:.3f}" for value in values)]


def rows(path: Path) -> list[str]:
    """Rows of the table."""
    trace = load_trace(path)
    assert isinstance(trace, RoutingTrace)
    sequences, lines = sequence_loads(trace), []
    lengths = sequences.length_of_sequence.astype(int).tolist()
    routes = np.split(trace.ids, trace.offsets[1:-1])
    for ranks, budget in SETTINGS:
        cluster = Cluster(num_nodes=1, ranks_per_node=ranks)
        home_E = np.repeat(np.arange(ranks, dtype=np.int32), sequences.num_experts // ranks)
        home = Placement(home_of_expert=np.tile(home_E, (sequences.num_layers, 1)), cluster=cluster)
        parallel = {"dp_size": ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        for balance in (False, True):
            args = Namespace(
                use_dynamic_batch_size=True, max_tokens_per_gpu=budget, balance_data=balance, micro_batch_size=None,
                expert_model_parallel_size=ranks, num_experts=sequences.num_experts, moe_layer_freq=1,
            )  # fmt: skip
            asked: dict[str, Any] = {"global_batch_size": len(lengths), "rollout_indices": list(range(len(lengths)))}
            own = DpSchedule(
                *sys.modules["slime.utils.dp_schedule"].build_dp_schedule(args, parallel, lengths, **asked)
            )
            name = "slime, --balance-data" if balance else "slime"
            contenders: dict[str, tuple[Any, ...]] = {name: own}
            if balance:
                contenders["packed again"] = build_dp_schedule(args, parallel, lengths, **asked)
                contenders["packed again, with routes"] = build_dp_schedule(
                    args, parallel, lengths, routed_experts=routes, **asked
                )
            for contender, found in contenders.items():
                values = figures(sequences, as_schedule(DpSchedule(*found), len(lengths)), home)
                lines.append(f"| {path.stem} | {ranks} | {budget} | {contender} | {' | '.join(values)} |")
    return lines


def main() -> None:
    """Compute the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    asked = parser.parse_args()
    who = use_slime()
    lines = [
        "# slime's schedule, packed again", "",
        f"Computed {datetime.now(UTC):%Y-%m-%d} with {who}; `python -m benchmarks.slime_schedule RECORDING...`, which",
        "also describes the columns. Recordings of a few thousand tokens fill one to three micro-batches, the last of",
        "them half empty, so their waiting says little about rollouts of many.", "",
        "| recording | ranks | tokens per rank | schedule | micro-batches | waiting | imbalance on homes | planned |",
        "|---|---|---|---|---|---|---|---|",
        *(line for path in asked.recordings for line in rows(path)),
    ]  # fmt: skip
    (asked.output / "slime-schedule.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
