"""Options, refusals and micro-batches of the verl integration, which need no verl."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from equilibra.core.errors import InputError
from equilibra.core.load import StepLoad
from equilibra.core.placement import Cluster
from equilibra.core.plan import Stage
from equilibra.integrations.megatron import Step
from equilibra.integrations.verl import ENGINE
from equilibra.integrations.verl.engine import OPTIONS, VerlSetting, check_engine, figures, setting_of
from equilibra.plan.entry import plan_step

CLUSTER = Cluster(num_nodes=1, ranks_per_node=4)
PAGE = Path(__file__).resolve().parents[3] / "docs" / "integrations" / "verl.md"


def config(block: object) -> SimpleNamespace:
    return SimpleNamespace(override_mcore_model_config={"moe_config": {}, "equilibra": block})


def test_options_come_from_the_block() -> None:
    assert setting_of(SimpleNamespace(override_mcore_model_config={})) == VerlSetting()
    found = setting_of(config({"spare_slots": 1, "ranks_per_node": 4, "timeout_s": 60, "enabled": False}))
    assert found == VerlSetting(spare_slots=1, ranks_per_node=4, timeout_s=60, enabled=False)
    assert (found.max_moves_per_layer, found.hardware) == (0, "auto")
    assert setting_of(config({"hardware": "h200"})).hardware == "h200"


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"spare_slot": 1}, "has no option spare_slot: it has enabled, mode, planner"),
        ({"spare_slots": "1"}, "equilibra.spare_slots must be a whole number from 0 to 65535, not '1'"),
        ({"spare_slots": True}, "spare_slots must be a whole number from 0 to 65535, not True"),
        ({"ranks_per_node": 2.0}, "equilibra.ranks_per_node must be a whole number from 1 to 65535, not 2.0"),
        ({"enabled": "no"}, "equilibra.enabled must be true or false, not 'no'"),
        ({"max_moves_per_layer": -2}, "equilibra.max_moves_per_layer must be a whole number from -1"),
        ([1], "must be a table of options"),
    ],
)
def test_options_that_cannot_be(block: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        setting_of(config(block))


def test_every_option_is_on_the_page() -> None:
    page = PAGE.read_text()
    for option in OPTIONS:
        assert f"`{option}`" in page


def engine(**changed: object) -> SimpleNamespace:
    values = {
        "experts": 8, "mode": "R3", "ranks": 2, "dynamic_context_parallel": False, "peft_cls": None, "qat": False,
    } | changed  # fmt: skip
    return SimpleNamespace(
        tf_config=SimpleNamespace(num_moe_experts=values["experts"], expert_model_parallel_size=values["ranks"]),
        engine_config=SimpleNamespace(
            router_replay=SimpleNamespace(mode=values["mode"]),
            dynamic_context_parallel=values["dynamic_context_parallel"],
        ),
        peft_cls=values["peft_cls"],
        _qat_enabled=values["qat"],
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"experts": None}, "the actor's model has no experts"),
        ({"mode": "disabled"}, "cannot plan without replay"),
        ({"ranks": 1}, "nothing to balance with expert_model_parallel_size=1"),
        ({"dynamic_context_parallel": True}, "cannot plan with dynamic_context_parallel=True"),
        ({"peft_cls": object()}, "cannot copy experts with adapters"),
        ({"qat": True}, "cannot copy experts under quantisation-aware training"),
    ],
)
def test_engines_that_cannot_be_planned(changed: dict, said: str) -> None:
    check_engine(engine(), VerlSetting())
    check_engine(engine(mode="disabled"), VerlSetting(mode="live"))
    with pytest.raises(InputError, match=said) as caught:
        check_engine(engine(**changed), VerlSetting())
    assert "equilibra.enabled=False" in str(caught.value)


def test_the_plugin_waits_for_verl() -> None:
    before = list(sys.meta_path)
    try:
        from equilibra.integrations.verl import plugin

        plugin.install()
        plugin.install()
        assert len(sys.meta_path) == len([one for one in before if one in sys.meta_path]) + 1
        assert ENGINE not in sys.modules
    finally:
        sys.meta_path[:] = before


def test_figures_of_a_plan() -> None:
    tokens = np.ones((2, 3, 8, 4), np.int32)
    tokens[:, :, 0] = 40
    load = StepLoad(tokens_MLER=tokens)
    plan = plan_step(load, cluster=CLUSTER, spare_slots=2, standing_slots=0, max_moves_per_layer=0)
    found = figures(Step(plan=plan, load=load), Stage.UPDATE)
    assert found["imbalance_before"] > 2 > 1.2 > found["imbalance_after"]
    assert found["predicted_gain"] == pytest.approx(found["imbalance_before"] / found["imbalance_after"])
    assert found["copies"] > 0
    assert found["moves"] == found["plan_reused"] == 0
    assert not [name for name in found if "min" in name or "max" in name]  # verl reduces by these
