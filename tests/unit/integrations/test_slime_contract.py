"""Hooks and options as slime gives them. What slime must have for it is in tests/contracts/upstream/slime.toml."""

import inspect
import sys
from argparse import Namespace
from types import ModuleType

import pytest

from equilibra.core.errors import InputError
from equilibra.integrations.slime import hooks, schedule
from equilibra.integrations.slime.hooks import OPTIONS, base_spec, setting_of

HOOKS = {
    "--spec": (hooks.layer_spec, ["args", "config", "vp_stage"]),
    "--custom-megatron-before-log-prob-hook-path": (hooks.before_log_prob, ["args", "model", "store_prefix"]),
    "--custom-megatron-before-train-step-hook-path": (
        hooks.before_train_step, ["args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"],
    ),
}  # fmt: skip
"""flags, and what slime gives the functions that they name, by position"""


@pytest.mark.parametrize("flag", HOOKS)
def test_hooks_take_what_slime_gives(flag):
    function, given = HOOKS[flag]
    assert list(inspect.signature(function).parameters) == given


@pytest.mark.parametrize("package", ["slime.utils", "slime.observability"])
def test_metrics_go_where_slime_has_them(package, monkeypatch):
    """They moved on 2026-08-21."""
    names = ("logging_utils", "metric_utils", "timer")
    modules = {name: ModuleType(name) for name in ("slime", package, *(f"{package}.{name}" for name in names))}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert hooks._metrics_modules() == tuple(modules[f"{package}.{name}"] for name in names)


def test_without_slime_nothing_is_logged():
    assert hooks._metrics_modules() is None


def test_the_schedule_takes_what_slime_gives():
    inspect.signature(schedule.build_dp_schedule).bind(
        Namespace(), {}, [1], global_batch_size=1, rollout_indices=[0], sample_is_multimodal=None
    )


def test_options():
    given = {"equilibra_planner": "static", "equilibra_spare_slots": 3, "equilibra_ranks_per_node": 4}
    setting = setting_of(Namespace(lr=1.0, **given, equilibra_timeout_s=9, equilibra_seed=5, equilibra_spec="a b"))
    assert (setting.planner, setting.spare_slots, setting.ranks_per_node) == ("static", 3, 4)
    assert (setting.timeout_s, setting.seed) == (9, 5)
    assert base_spec(Namespace(equilibra_spec="a.b c")) == ["a.b", "c"]
    assert base_spec(Namespace()) is None
    assert setting_of(Namespace()).spare_slots == 2
    assert {f"equilibra_{name}" for name in OPTIONS} >= set(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"slots": 2}, "equilibra_slots is not an option: use equilibra_mode, equilibra_history_steps"),
        ({"spare_slots": "2"}, "equilibra_spare_slots must be a whole number from 0 to 65535, not '2'"),
        ({"spare_slots": True}, "equilibra_spare_slots must be a whole number from 0 to 65535, not True"),
        ({"spare_slots": -1}, "spare_slots must be a whole number from 0"),
        ({"timeout_s": 0}, r"timeout_s must be a number more than 0 and below 1e\+06, not 0"),
        ({"spec": "a.b"}, "a module and a function in it"),
    ],
)
def test_options_that_cannot_be(given, said):
    args = Namespace(**{f"equilibra_{name}": value for name, value in given.items()})
    with pytest.raises(InputError, match=said):
        base_spec(args) if "spec" in given else setting_of(args)
