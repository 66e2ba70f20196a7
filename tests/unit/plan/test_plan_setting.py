"""Settings: limits are checked once and passed on whole; prices come from where the setting says."""

from dataclasses import fields, replace

import numpy as np
import pytest

from equilibra.core.checks import CopyLimits, PlanLimits
from equilibra.core.errors import InputError
from equilibra.core.load import StepLoad
from equilibra.core.model import model_named
from equilibra.core.placement import Cluster
from equilibra.core.plan import Stage
from equilibra.cost.presets import default_prices, prices_named, prices_toml
from equilibra.cost.rates import Rates, rates_for
from equilibra.execute.steps.planning import BalancerSetting
from equilibra.integrations.planned import MegatronSetting, PlanSetting
from equilibra.integrations.slime.hooks import SlimeSetting
from equilibra.integrations.verl.engine import VerlSetting
from equilibra.plan.entry import plan_step
from equilibra.plan.planner import PlannerSetting, StepProblem
from equilibra.plan.relevel import base_rows
from equilibra.plan.step import Equilibra
from equilibra.train.config import BalanceConfig

LIMITS = ("spare_slots", "standing_slots", "max_moves_per_layer")
MODEL, CLUSTER = model_named("qwen3-30b-a3b"), Cluster(num_nodes=1, ranks_per_node=8)
SETTINGS = {
    BalancerSetting: {"tokens_per_rank": 8}, PlannerSetting: {}, PlanSetting: {}, MegatronSetting: {}, SlimeSetting: {},
    VerlSetting: {},
}  # fmt: skip


def skewed(seed: int = 0) -> StepLoad:
    """One layer in which some experts are hot, eight micro-batches."""
    rng = np.random.default_rng(seed)
    popularity = rng.zipf(1.3, (8, 1, 128, 1)).clip(max=400)
    return StepLoad(tokens_MLER=(popularity * rng.integers(20, 60, (8, 1, 128, 8))).astype(np.int32))


@pytest.mark.parametrize("kind", [*SETTINGS, BalanceConfig, StepProblem])
def test_limits_are_declared_once(kind):
    assert issubclass(kind, CopyLimits)
    assert set(LIMITS) <= {one.name for one in fields(kind)}


def test_limits_travel_whole_and_changed():
    limits = PlanLimits(spare_slots=3, standing_slots=1, max_moves_per_layer=5, seed=7)
    assert limits.limits() == {"spare_slots": 3, "standing_slots": 1, "max_moves_per_layer": 5, "seed": 7}
    assert limits.limits(seed=8, spare_slots=0) == {**limits.limits(), "seed": 8, "spare_slots": 0}
    problem = StepProblem(cluster=CLUSTER, given_load=skewed(), rates=Rates.free(), **limits.limits())
    assert problem.limits() == limits.limits()
    assert BalanceConfig(spare_slots=3).limits() == {**BalanceConfig().limits(), "spare_slots": 3}
    assert "seed" not in BalanceConfig().limits()


def test_problems_with_the_same_limits_are_not_the_same():
    one, other = (StepProblem(cluster=CLUSTER, given_load=skewed(seed), rates=Rates.free()) for seed in (0, 1))
    assert one != other
    assert one != replace(one)
    assert len({one, other}) == 2


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("change", [
    {"spare_slots": -1}, {"spare_slots": 2**16}, {"standing_slots": True}, {"max_moves_per_layer": -2}, {"seed": 2**31},
    {"seed": 0.5}, {"hardware": ""},
])  # fmt: skip
def test_every_setting_refuses_what_cannot_be(kind, change):
    with pytest.raises(InputError, match=f"^{kind.section.replace('.', '[.]')}{next(iter(change))} must"):
        kind(**SETTINGS[kind], **change)


@pytest.mark.parametrize("kind", SETTINGS)
def test_every_setting_gets_the_prices_of_its_gpu(kind, tmp_path):
    setting = kind(**SETTINGS[kind])

    def of(prices):
        return rates_for(MODEL, prices, num_nodes=1)

    assert setting.on("NVIDIA H200").rates_of(MODEL, num_nodes=1) == of(prices_named("h200"))
    assert setting.on("NVIDIA H100 80GB HBM3").rates_of(MODEL, num_nodes=1) == of(prices_named("h100"))
    for unknown in (None, "Tesla T4"):
        assert setting.on(unknown).rates_of(MODEL, num_nodes=1) == of(default_prices())
    named = replace(setting, hardware="b200")
    assert named.on("NVIDIA H200").rates_of(MODEL, num_nodes=1) == of(prices_named("b200"))
    own = replace(prices_named("h200"), kernels=None, name="own")
    (tmp_path / "own.toml").write_text(prices_toml(own))
    from_file = replace(setting, hardware=str(tmp_path / "own.toml")).on("NVIDIA H200").rates_of(MODEL, num_nodes=1)
    assert from_file.row_us == pytest.approx(of(own).row_us, rel=1e-4)
    assert from_file.hold_us == of(own).hold_us
    assert replace(setting, hardware=own).rates_of(MODEL, num_nodes=1) == of(own)
    assert replace(setting, rates=Rates.free()).on("NVIDIA H200").rates_of(MODEL, num_nodes=1) == Rates.free()


def test_ranks_with_other_prices_notice():
    auto, free = PlannerSetting(), PlannerSetting(rates=Rates.free())
    assert auto.on("NVIDIA H200").prices_hash() == PlannerSetting(hardware="h200").prices_hash()
    assert len({one.prices_hash() for one in (auto.on(None), auto.on("NVIDIA H200"), free)}) == 3
    assert free.on("NVIDIA H200") is free


def test_a_plan_for_a_known_gpu_levels_time():
    """Rows and what copies cost together are more even than in a plan that knows of rows only."""
    load = skewed()
    rates = [PlannerSetting().on(device).rates_of(MODEL, num_nodes=1) for device in ("NVIDIA H200", None)]

    def slowest(one):
        problem = StepProblem(cluster=CLUSTER, given_load=load, rates=one, standing_slots=0)
        plan = Equilibra(threads=1).plan(problem)
        plan.check(load, spare_slots=2, standing_slots=0)
        cost_PR = base_rows(plan.stages[Stage.UPDATE], load, plan.standing, rates[0], Stage.UPDATE)
        rows_PR = plan.rank_load(load, Stage.UPDATE).reshape(cost_PR.shape)
        return (rows_PR + cost_PR).max(axis=1).sum()

    priced, plain = (slowest(one) for one in rates)
    assert priced < plain


def test_plan_step_takes_hardware():
    load = StepLoad(tokens_MLER=np.repeat(skewed().tokens_MLER, 48, axis=1))
    digests = [
        plan_step(load, cluster=CLUSTER, model="qwen3-30b-a3b", **more).digest
        for more in ({}, {"hardware": default_prices()}, {"hardware": "h200"})
    ]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]
