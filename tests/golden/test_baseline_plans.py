"""The baselines' plans, decision by decision: figures against them mean what they meant.

`baselines.json` has the digest of each plan and the rows of its slowest ranks. After a change that is meant, write it
anew: `python -m tests.golden.test_baseline_plans`.
"""

import json
from pathlib import Path

import pytest
from tests.golden.test_plans import loads, summary

from equilibra.core.load import StepLoad
from equilibra.core.placement import Cluster
from equilibra.cost.rates import Rates
from equilibra.plan.baselines.online import LeastLoaded, UltraEP
from equilibra.plan.planner import Planner, StepProblem, planner_named

FILE = Path(__file__).with_name("baselines.json")
CLUSTERS = {"1x4": (1, 4, 8), "1x8": (1, 8, 16), "2x4": (2, 4, 16), "2x8": (2, 8, 32), "3x2": (3, 2, 12)}
KINDS = ("skewed", "hot", "few")
PLANNERS: dict[str, Planner] = {
    name: planner_named(name) for name in ("static", "eplb-oracle", "lpt", "lplb", "ultraep", "balanced")
} | {"llep in chunks of 40": LeastLoaded(min_chunk=40, trigger=1.1), "ultraep from 50": UltraEP(min_tokens_per_copy=50)}


def problem(shape: str, kind: str) -> StepProblem:
    num_nodes, ranks_per_node, num_experts = CLUSTERS[shape]
    cluster = Cluster(num_nodes=num_nodes, ranks_per_node=ranks_per_node)
    load = StepLoad(tokens_MLER=loads(kind, cluster.num_ranks, num_experts, seed=7))
    return StepProblem(cluster=cluster, given_load=load, rates=Rates.free(), spare_slots=2)


CASES = [(planner, shape, kind) for planner in PLANNERS for shape in CLUSTERS for kind in KINDS]


def found(planner: str, shape: str, kind: str) -> list[object]:
    step = problem(shape, kind)
    return summary(step, PLANNERS[planner].plan(step))


@pytest.mark.parametrize(("planner", "shape", "kind"), CASES)
def test_the_plan_is_the_known_one(planner: str, shape: str, kind: str) -> None:
    known = json.loads(FILE.read_text())[f"{planner} {shape} {kind}"]
    assert found(planner, shape, kind) == known


def test_planners_differ() -> None:
    known = json.loads(FILE.read_text())
    assert len(known) == len(CASES)
    for shape in CLUSTERS:
        assert len({known[f"{planner} {shape} skewed"][0] for planner in PLANNERS}) >= len(PLANNERS) - 2


if __name__ == "__main__":
    lines = [f"{json.dumps(' '.join(case))}: {json.dumps(found(*case))}" for case in CASES]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
