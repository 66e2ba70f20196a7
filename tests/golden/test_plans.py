"""The planner's plans, decision by decision: they change only when somebody means it.

`plans.json` has the digest of each plan and the rows of its slowest ranks. After a change that is meant, look at the
rows and write it anew: `python -m tests.golden.test_plans`.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from equilibra.core.load import SequenceLoad, StepLoad
from equilibra.core.model import model_named
from equilibra.core.placement import Cluster, Placement
from equilibra.core.plan import Stage, StepPlan
from equilibra.cost.presets import prices_of
from equilibra.cost.rates import Rates, rates_for
from equilibra.plan.pack import in_order
from equilibra.plan.planner import StepProblem, planner_named

FILE = Path(__file__).with_name("plans.json")
CLUSTERS = {"1x4": (1, 4), "1x8": (1, 8), "2x2": (2, 2), "2x4": (2, 4), "4x2": (4, 2)}
SLOTS = {"2+2": (2, 2), "1+0": (1, 0), "0+1": (0, 1), "3+1": (3, 1)}
PRICES = ("free", "h200")
LOADS = ("skewed", "near", "hot", "few", "idle")


def loads(kind: str, num_ranks: int, num_experts: int, seed: int) -> np.ndarray:
    """[2, 1, E, R]; from numpy's frozen generator, so every version draws the same."""
    rng = np.random.RandomState(seed)
    popularity = 1000 // (1 + rng.permutation(num_experts).reshape(1, 1, num_experts, 1))
    tokens = popularity * (1 + rng.randint(0, 4, (2, 1, num_experts, num_ranks)))
    if kind == "near":
        tokens = 200 + rng.randint(0, 60, tokens.shape)
    if kind == "hot":
        tokens[:, :, 3] += tokens.sum(axis=2) // 2
    if kind == "few":
        tokens = rng.randint(0, 3, tokens.shape) * rng.randint(0, 2, tokens.shape)
    if kind == "idle":
        tokens[1, :, 4:] = tokens[:, :, :, 1] = tokens[:, :, 2] = 0
    return tokens.astype(np.int32)


def cases() -> dict[str, StepProblem]:
    found = {}
    for c, (shape, (num_nodes, ranks_per_node)) in enumerate(CLUSTERS.items()):
        cluster = Cluster(num_nodes=num_nodes, ranks_per_node=ranks_per_node)
        for s, (slots, (spare, standing)) in enumerate(SLOTS.items()):
            for k, kind in enumerate(LOADS):
                prices, num_experts = PRICES[(c + s + k) % 2], (8, 16)[(s + k) % 2]
                if kind == "few":
                    prices = "free"
                rates = Rates.free()
                if prices != "free":
                    rates = rates_for(model_named("qwen3-30b-a3b"), prices_of(prices), num_nodes=num_nodes)
                load = loads(kind, cluster.num_ranks, num_experts, 100 * c + 10 * s + k)
                load = load if prices == "free" else load * np.int32(16)
                found[f"{shape} {slots} {kind} {prices}"] = StepProblem(
                    cluster=cluster, given_load=StepLoad(tokens_MLER=load), rates=rates, spare_slots=spare,
                    standing_slots=standing, max_moves_per_layer=(-1, 0, 2)[(c + k) % 3],
                    previous=shuffled(cluster, num_experts, k) if k % 2 else None,
                )  # fmt: skip
    return found | packed_cases()


def shuffled(cluster: Cluster, num_experts: int, seed: int) -> Placement:
    rng = np.random.RandomState(seed)
    home = np.repeat(np.arange(cluster.num_ranks, dtype=np.int32), num_experts // cluster.num_ranks)
    return Placement(cluster=cluster, home_of_expert=np.stack([rng.permutation(home) for _ in range(1)]))


def packed_cases() -> dict[str, StepProblem]:
    """Sequences that the planner packs."""
    found = {}
    for seed, (shape, (num_nodes, ranks_per_node)) in enumerate(CLUSTERS.items()):
        cluster, rng = Cluster(num_nodes=num_nodes, ranks_per_node=ranks_per_node), np.random.RandomState(seed)
        length = rng.randint(1, 40, 24)
        chosen = rng.permutation(16)[(rng.randint(0, 16, (24, 1, 40, 2)) ** 2) // 16]
        load = np.stack([
            [np.bincount(layer[:n].ravel(), minlength=16) for layer in sequence]
            for sequence, n in zip(chosen, length, strict=True)
        ])  # fmt: skip
        sequences = SequenceLoad(tokens_SLE=load.astype(np.int32), length_of_sequence=length)
        found[f"{shape} packed"] = StepProblem(
            cluster=cluster, sequences=sequences, rates=Rates.free(), tokens_per_rank=60,
            schedule=in_order(length, cluster, tokens_per_rank=60),
        )  # fmt: skip
    return found


def summary(problem: StepProblem, plan: StepPlan) -> list[object]:
    """Digest, and rows of the slowest ranks. The load is that of the plan's own schedule."""
    load = problem.load_under(plan.schedule)
    return [plan.digest[:16], *(int(plan.rank_load(load, stage).max(axis=2).sum()) for stage in Stage)]


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_one_that_was_looked_at(name: str) -> None:
    known = json.loads(FILE.read_text())[name]
    found = summary(CASES[name], planner_named("equilibra").plan(CASES[name]))
    assert found == known, f"the plan of {name} changed: digest and rows of the slowest ranks were {known}"


def test_every_case_has_its_own_plan() -> None:
    """A constant would pass the test above."""
    known = json.loads(FILE.read_text())
    assert set(known) == set(CASES)
    assert len({digest for digest, *_ in known.values()}) == len(known)


if __name__ == "__main__":
    plans = {name: summary(problem, planner_named("equilibra").plan(problem)) for name, problem in CASES.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(plan)}" for name, plan in plans.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
