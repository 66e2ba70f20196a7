"""The names and signatures of slime that the hooks rely on, as data, and whether an installed slime still has them.

slime is not on PyPI, so the second part is skipped where it is not installed; run it after an update of slime.
"""

import importlib
import importlib.util
import inspect
from argparse import Namespace

import pytest

from equilibra.core.errors import InputError
from equilibra.integrations.slime import hooks, schedule
from equilibra.integrations.slime.options import OPTIONS, base_spec, setting_of

READ = "2026-08"
"""the slime that the facts below were read in"""

HOOKS = {
    "--spec": (hooks.layer_spec, ["args", "config", "vp_stage"]),
    "--custom-megatron-before-log-prob-hook-path": (hooks.before_log_prob, ["args", "model", "store_prefix"]),
    "--custom-megatron-before-train-step-hook-path": (
        hooks.before_train_step, ["args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"],
    ),
}  # fmt: skip
"""flags, and what slime gives the functions that they name, by position"""

NAMES = [
    ("slime.utils.routing_replay", "RoutingReplay", []),
    ("slime.utils.routing_replay", "register_routing_replay", ["module"]),
    ("slime.utils.logging_utils", "log", ["args", "metrics", "step_key"]),
    ("slime.utils.metric_utils", "compute_rollout_step", ["args", "rollout_id"]),
    ("slime.utils.timer", "Timer.add", ["self", "name", "elapsed_time"]),
    ("slime.utils.dp_schedule", "build_dp_schedule", ["args", "train_parallel_config", "total_lengths"]),
]
"""module, name, and the first parameters"""

WORDS = [
    ("slime.utils.routing_replay", "ROUTING_REPLAY_STAGE"),
    ("slime.utils.routing_replay", "ENABLE_ROUTING_REPLAY"),
    ("slime.utils.routing_replay", '"replay_forward"'),
    ("slime.utils.routing_replay", "routing_replay = RoutingReplay()"),
    ("slime.utils.arguments", "--custom-config-path"),
    ("slime.utils.arguments", "--use-rollout-routing-replay"),
    *(("slime.utils.arguments", flag) for flag in HOOKS if flag.startswith("--custom")),
    ("slime.backends.megatron_utils.model", "(args, model, store_prefix)"),
    ("slime.backends.megatron_utils.model", "(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)"),
    ("slime.backends.megatron_utils.model_provider", "(args, config, vp_stage)"),
    ("slime.ray.rollout", "import build_dp_schedule"),
]
"""module, and what its source must say; sources are read, not imported: they need GPUs and Ray"""


@pytest.mark.parametrize("flag", HOOKS)
def test_hooks_take_what_slime_gives(flag):
    function, given = HOOKS[flag]
    assert list(inspect.signature(function).parameters) == given


def test_the_schedule_takes_what_slime_gives():
    inspect.signature(schedule.build_dp_schedule).bind(
        Namespace(), {}, [1], global_batch_size=1, rollout_indices=[0], sample_is_multimodal=None
    )


def source_of(module: str) -> str:
    if importlib.util.find_spec("slime") is None:
        pytest.skip(f"slime is not installed: what is relied on was read in slime of {READ}")
    found = importlib.util.find_spec(module)
    assert found is not None, f"slime has no {module} any more (it had in {READ})"
    assert found.origin is not None
    with open(found.origin, encoding="utf-8") as file:  # noqa: PTH123
        return file.read()


@pytest.mark.parametrize(("module", "name", "parameters"), NAMES)
def test_names_of_slime(module, name, parameters):
    source_of(module)
    found = importlib.import_module(module)
    for part in name.split("."):
        assert hasattr(found, part), f"{module}.{name} is gone (it was there in {READ})"
        found = getattr(found, part)
    if parameters:
        assert list(inspect.signature(found).parameters)[: len(parameters)] == parameters
    elif name == "RoutingReplay":
        replay = found()
        found.all_routing_replays.remove(replay)
        assert (replay.forward_index, replay.top_indices_list) == (0, [])


@pytest.mark.parametrize(("module", "words"), WORDS)
def test_words_of_slime(module, words):
    assert words in source_of(module), f"{module} does not say {words!r} any more (it did in {READ})"


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
        ({"slots": 2}, "equilibra_slots is no option: there are equilibra_planner, equilibra_spare_slots"),
        ({"spare_slots": "2"}, "equilibra_spare_slots must be of type int, not '2'"),
        ({"spare_slots": True}, "must be of type int, not True"),
        ({"spare_slots": -1}, "spare_slots must be a whole number from 0"),
        ({"timeout_s": 0}, "equilibra_timeout_s must be above 0, not 0"),
        ({"spec": "a.b"}, "a module and a function in it"),
    ],
)
def test_options_that_cannot_be(given, said):
    args = Namespace(**{f"equilibra_{name}": value for name, value in given.items()})
    with pytest.raises(InputError, match=said):
        base_spec(args) if "spec" in given else setting_of(args)
