"""The names and signatures of slime that the hooks rely on, as data, and whether an installed slime still has them.

slime is not on PyPI, so the second part is skipped where it is not installed; run it after an update of slime. Its
sources are read, not imported: they need GPUs and Ray.
"""

import ast
import importlib.util
import inspect
from argparse import Namespace
from pathlib import Path

import pytest

from equilibra.core.errors import InputError
from equilibra.integrations.slime import hooks, schedule
from equilibra.integrations.slime.hooks import OPTIONS, base_spec, setting_of

READ = {
    "backends/megatron_utils/actor.py": "028e29090ec8",
    "backends/megatron_utils/model.py": "00b5ed0e6c11",
    "backends/megatron_utils/model_provider.py": "13c3a7537c47",
    "ray/actor_group.py": "03b11f41fc73",
    "utils/arguments.py": "002fa9d6bac4",
    "utils/dp_schedule.py": "04e674348db1",
    "utils/logging_utils.py": "3906ba159d15",
    "utils/metric_utils.py": "45fcf06f3343",
    "utils/reloadable_process_group.py": "02debfd4a67f",
    "utils/routing_replay.py": "1eec71f8e2aa",
    "utils/timer.py": "789f31142f8e",
}
"""revisions in which files of THUDM/slime were read: of several dates, so they may never have been together; that
ray/rollout.py imports build_dp_schedule was read in a copy without a revision"""

HOOKS = {
    "--spec": (hooks.layer_spec, ["args", "config", "vp_stage"]),
    "--custom-megatron-before-log-prob-hook-path": (hooks.before_log_prob, ["args", "model", "store_prefix"]),
    "--custom-megatron-before-train-step-hook-path": (
        hooks.before_train_step, ["args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"],
    ),
}  # fmt: skip
"""flags, and what slime gives the functions that they name, by position"""

NAMES = {
    "utils/routing_replay.py register_routing_replay": ["module"],
    "utils/logging_utils.py log": ["args", "metrics", "step_key"],
    "utils/metric_utils.py compute_rollout_step": ["args", "rollout_id"],
    "utils/timer.py Timer.add": ["self", "name", "elapsed_time"],
    "utils/dp_schedule.py build_dp_schedule": ["args", "train_parallel_config", "total_lengths"],
    "backends/megatron_utils/model.py forward_only": [],
    "backends/megatron_utils/model.py train_one_step": [],
}
"""file of slime and a function in it: its first parameters"""

WORDS = [
    "utils/routing_replay.py: ROUTING_REPLAY_STAGE",
    "utils/routing_replay.py: ENABLE_ROUTING_REPLAY",
    'utils/routing_replay.py: "replay_forward"',
    "utils/routing_replay.py: routing_replay = RoutingReplay()",
    "utils/routing_replay.py: self.forward_index = 0",
    "utils/routing_replay.py: self.top_indices_list = []",
    "utils/arguments.py: --custom-config-path",
    "utils/arguments.py: --use-rollout-routing-replay",
    *(f"utils/arguments.py: {flag}" for flag in HOOKS if flag.startswith("--custom")),
    "backends/megatron_utils/model.py: (args, model, store_prefix)",
    "backends/megatron_utils/model.py: (args, rollout_id, step_id, model, optimizer, opt_param_scheduler)",
    "backends/megatron_utils/model_provider.py: (args, config, vp_stage)",
    "ray/rollout.py: import build_dp_schedule",
]
"""file of slime: what it must say"""


def differences(root: Path) -> list[str]:
    """What a slime in this folder does not have of the above."""
    missing = []
    for place, parameters in NAMES.items():
        file, name = place.split()
        found = _parameters(root / file, name.split(".")) if (root / file).is_file() else None
        if found is None:
            missing.append(f"slime/{file} has no {name}")
        elif found[: len(parameters)] != parameters:
            missing.append(f"{name} of slime/{file} takes {found}, not {parameters}")
    for place in WORDS:
        file, _, words = place.partition(": ")
        if not (root / file).is_file() or words not in (root / file).read_text(encoding="utf-8"):
            missing.append(f"slime/{file} does not say {words}")
    return missing


def _parameters(file: Path, path: list[str]) -> list[str] | None:
    """Parameters of a function in a file, or of a method of a class."""
    body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    for part in path:
        node = next((one for one in body if getattr(one, "name", None) == part), None)
        if node is None:
            return None
        body = node.body
    return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def test_an_installed_slime_has_what_is_relied_on():
    found = importlib.util.find_spec("slime")
    if found is None or not found.submodule_search_locations:
        pytest.skip("slime is not installed: what is relied on was read in its source")
    missing = differences(Path(found.submodule_search_locations[0]))
    assert not missing, f"slime is not as it was read: {'; '.join(missing)}"


def test_differences_are_found(tmp_path):
    for place, parameters in NAMES.items():
        file, name = place.split()
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        owner, _, function = name.rpartition(".")
        lines = f"def {function}({', '.join(parameters)}): ...\n"
        with path.open("a") as text:
            text.write(f"class {owner}:\n    {lines}" if owner else lines)
    for place in WORDS:
        file, _, words = place.partition(": ")
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        with (tmp_path / file).open("a") as text:
            text.write(f"# {words}\n")
    assert not differences(tmp_path)
    timer, model = tmp_path / "utils/timer.py", tmp_path / "backends/megatron_utils/model.py"
    timer.write_text(timer.read_text().replace("elapsed_time", "seconds"))
    model.write_text(model.read_text().replace("store_prefix", "prefix").replace("def forward_only", "def forward"))
    assert differences(tmp_path) == [
        "Timer.add of slime/utils/timer.py takes ['self', 'name', 'seconds'], not ['self', 'name', 'elapsed_time']",
        "slime/backends/megatron_utils/model.py has no forward_only",
        "slime/backends/megatron_utils/model.py does not say (args, model, store_prefix)",
    ]


@pytest.mark.parametrize("flag", HOOKS)
def test_hooks_take_what_slime_gives(flag):
    function, given = HOOKS[flag]
    assert list(inspect.signature(function).parameters) == given


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
        ({"slots": 2}, "equilibra_slots is not an option: use equilibra_planner, equilibra_spare_slots"),
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
