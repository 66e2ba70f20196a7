"""Random steps: times for the timeline alone, and whole steps with routing, a cluster, a machine and a setting."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from tests.references.machines import random_problems, random_times, round_hardware, small_model

from equilibra.core.checks import PlanLimits
from equilibra.core.placement import Cluster
from equilibra.core.plan import StepPlan
from equilibra.cost.prices import ExpertLaw
from equilibra.plan.planner import Planner, StepProblem, online_us_of, planner_named, timing_of
from equilibra.simulate.step import simulate_step
from equilibra.simulate.times import CopyPath, Pricing, RunSetting, Times

CLUSTERS = ((1, 4), (2, 2), (2, 4), (4, 2))
EVERY = ("static", "lpt", "eplb-oracle", "eplb-history", "lplb", "ultraep", "llep", "equilibra")


def some_setting(rng: np.random.Generator, *, layers: int, micro_batches: int = 3) -> RunSetting:
    paths = list(CopyPath)
    return RunSetting(
        prefetch_depth=int(rng.integers(4)),
        activation_recompute=bool(rng.integers(2)),
        pipeline_stages=int(rng.integers(1, min(layers, 3) + 1)),
        data_parallel=int(rng.integers(1, 3)),
        optimizer_steps=int(rng.integers(1, min(micro_batches, 3) + 1)),
        logprob_stage=bool(rng.integers(2)),
        logprob_path=paths[rng.integers(2)],
        update_path=paths[rng.integers(2)],
    )


def some_times(seed: int) -> tuple[np.random.Generator, Times, RunSetting]:
    rng = np.random.default_rng(seed)
    layers, micro_batches = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    nodes, group = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    online = bool(rng.integers(2))
    times = random_times(rng, layers=layers, micro_batches=micro_batches, nodes=nodes, group=group, online=online)
    return rng, times, some_setting(rng, layers=layers, micro_batches=micro_batches)


class Step:
    """A random step on a random cluster, and the means to run it under a planner and a machine."""

    def __init__(self, seed: int, **changes: object) -> None:
        rng = np.random.default_rng(seed)
        self.model = small_model(
            num_layers=int(rng.integers(1, 4)), num_experts=int(rng.choice([8, 16])), top_k=int(rng.integers(1, 4)),
            hidden=int(rng.choice([32, 256])), outer_parameters=int(rng.choice([0, 10**5])),
        )  # fmt: skip
        self.cluster = Cluster(**dict(zip(("num_nodes", "ranks_per_node"), CLUSTERS[rng.integers(4)], strict=True)))
        law = ExpertLaw(fixed_us=1.0, weight_gb_per_s=float(rng.choice([0, 0.3, 3])),
                        row_gb_per_s=float(rng.choice([0, 1])), tflops=float(rng.choice([0.1, 1, 10])),
                        instance_gb_per_s=[0.0, 0.5, 5.0][seed % 3])  # fmt: skip
        self.machine = round_hardware(
            experts_forward=law, experts_backward=law, attention_tflops=float(rng.choice([0.01, 1])),
            nvlink_gb_per_s=float(rng.choice([0.1, 1, 10])), nic_gb_per_s=float(rng.choice([0.1, 1, 10])),
            copy_engine_gb_per_s=float(rng.choice([0.3, 5])), copy_loss_gb_per_s=float(rng.choice([0.5, 1e9])),
            host_link_gb_per_s=float(rng.choice([0.1, 2])), hbm_gb_per_s=float(rng.choice([1.0, 1e6])),
        )  # fmt: skip
        self.setting = replace(some_setting(rng, layers=self.model.num_layers), **changes)
        self.problems = random_problems(
            rng, self.model, self.cluster, self.machine, data_parallel=self.setting.data_parallel, num_sequences=12,
            tokens_per_microbatch=int(rng.choice([64, 96])), ranks_per_sequence=[None, 1, 2][rng.integers(3)],
            limits=PlanLimits(spare_slots=int(rng.integers(3)), standing_slots=int(rng.integers(3))),
        )  # fmt: skip

    def pricing(self, **changes: object) -> Pricing:
        return Pricing(
            model=self.model, hardware=replace(self.machine, **changes), cluster=self.cluster, setting=self.setting
        )

    def fixed(self, name: str) -> Fixed:
        """The planner with the plans it makes now, whatever the machine becomes."""
        planner = planner_named(name)
        return Fixed(planner, {id(problem): planner.plan(problem) for problem in self.problems})

    def seconds(self, planner: object, **changes: object) -> float:
        return simulate_step(self.problems, planner, self.pricing(**changes)).step_s


class Fixed:
    """A planner that has made up its mind."""

    def __init__(self, planner: Planner, plans: dict[int, StepPlan]) -> None:
        self.name, self.plans = planner.name, plans
        self.timing, self.online_us = timing_of(planner), online_us_of(planner)

    def plan(self, problem: StepProblem) -> StepPlan:
        return self.plans[id(problem)]
