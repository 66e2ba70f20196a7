"""Configuration files: read, echoed, read back; what is no configuration is one clear line."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibra.core.errors import InputError
from equilibra.train.config import OptimizerConfig, RunConfig, TaskConfig, TrainConfig
from equilibra.train.config_files import (
    changed_options,
    check_resumable,
    config_from_table,
    load_config,
    toml_text,
    with_absolute_paths,
    with_overrides,
)

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
VALUES = st.one_of(
    TEXTS, st.booleans(), st.integers(-(2**63) + 1, 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False)
)  # fmt: skip


def write(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_file_changes_what_it_mentions(tmp_path):
    path = write(tmp_path, "[run]\nsteps = 5\n[optimizer]\nlr = 1\n[task.options]\nmax_digits = 2\n")
    assert load_config(path) == TrainConfig(
        run=RunConfig(steps=5), optimizer=OptimizerConfig(lr=1.0), task=TaskConfig(options={"max_digits": 2})
    )
    assert isinstance(load_config(path).optimizer.lr, float)
    assert load_config(write(tmp_path, "")) == TrainConfig()


def test_tables_inside_tables_have_dotted_keys(tmp_path):
    path = write(tmp_path, "[algorithm.options]\nnormalize = true\nloss.clip_high = 0.28\n")
    assert load_config(path).algorithm.options == {"normalize": True, "loss.clip_high": 0.28}


@given(
    options=st.dictionaries(TEXTS.filter(bool), VALUES, max_size=5), source=TEXTS.filter(bool),
    lr=st.floats(0, 1e9), seed=st.integers(0, 2**31 - 1),
)  # fmt: skip
def test_an_echoed_configuration_reads_back_as_the_same(options, source, lr, seed):
    import tomllib

    config = with_overrides(TrainConfig(), [f"run.seed={seed}"])
    config = config_from_table(
        {"run": {"seed": config.run.seed}, "task": {"options": options}, "model": {"source": source},
         "optimizer": {"lr": lr}}
    )  # fmt: skip
    assert config_from_table(tomllib.loads(toml_text(config))) == config


def test_the_echo_is_complete():
    text = toml_text(TrainConfig())
    assert "[debug]" in text
    assert "tokens_per_rank = 1024" in text
    assert "move_sequences = true" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"\xff\xfe[run]", "not valid TOML .*can't decode byte 0xff in position 0"),
        (b"\x7fELF\0\0", "not valid TOML"),
        ("[run]\nsteps = 5\nsteps = 6\n", "not valid TOML .*[Cc]annot overwrite"),
        ("[run]\n[run]\n", "not valid TOML"),
        ("[run\n", "not valid TOML"),
        ("a = " + "[" * 100_000, "not valid TOML"),
        ("[run]\nseed = " + "9" * 5000, "not valid TOML|must be a whole number"),
        ("#" * (1 << 20) + "\n", "but configurations have at most"),
        ("[run]\nsteps = '5'", r"config\.toml: run\.steps must be a whole number from 1 to \d+, not '5'"),
        ("[run]\nsteps = 1979-05-27", "run.steps must be a whole number"),
        ("[optimizer]\nlr = nan", "optimizer.lr must be a number"),
        ("[run]\nstesp = 5", r"unknown key run\.stesp; did you mean run\.steps\?"),
        ("[run]\nlr = 5", r"unknown key run\.lr; did you mean warm_up\.lr or optimizer\.lr\?"),
        ("[runn]\nsteps = 5", r"unknown section \[runn\]; did you mean run\?"),
        ("[nothing_like_it]\nx = 5", r"unknown section \[nothing_like_it\]; sections are run, cluster, "),
        ('"a\\nb" = 5', "unknown key a b; "),
        ("steps = 5", r"unknown key steps; did you mean run\.steps or warm_up\.steps\?"),
        ("run = 5", r"run must be a section, \[run\], not 5"),
        ("[[run]]\nsteps = 5", "run must be a section"),
        ("[run]\nsteps = {a = 1}", "run.steps must be a whole number"),
        ("[task]\noptions = 3", "task.options must be a table"),
        ("[task.options]\na = [1]", "task.options.a must be text"),
        ("[task.options.a]\n", "task.options.a must be text"),
        ("[task.options]\na = 0x" + "f" * 16, "task.options.a must be text"),
        ("[balance]\ntokens_per_rank = 10", "cannot hold the longest sequence"),
    ],
)
def test_what_is_no_configuration_is_one_clear_line(tmp_path, text, said):
    path = write(tmp_path, text)
    with pytest.raises(InputError, match=said) as error:
        load_config(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_file(tmp_path):
    with pytest.raises(InputError, match="it is a folder; give a TOML file"):
        load_config(tmp_path)
    with pytest.raises(InputError, match=r"cannot read .*: No such file"):
        load_config(tmp_path / "none.toml")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="it is not a regular file"):
        load_config(tmp_path / "pipe")


def changed(*overrides: str) -> dict[str, object]:
    config = TrainConfig()
    return {name: new for name, (_, new) in changed_options(config, with_overrides(config, overrides)).items()}


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("run.steps=5", "run.steps", 5),
        (" run.steps = 5", "run.steps", 5),
        ("run.timeout_s=5", "run.timeout_s", 5.0),
        ("optimizer.lr=3e-4", "optimizer.lr", 3e-4),
        ("model.activation_checkpointing=true", "model.activation_checkpointing", True),
        ("task.name=basic", "task.name", "basic"),
        ('task.name="basic"', "task.name", "basic"),
        ("task.name=2024", "task.name", "2024"),
        ("task.path=a=b#c", "task.path", "a=b#c"),
        ("task.path=true", "task.path", "true"),
        ("model.source=/a b/c", "model.source", "/a b/c"),
        ("task.options.max_digits=2", "task.options", {"max_digits": 2}),
        ("task.options.mode=easy", "task.options", {"mode": "easy"}),
        ("task.options={a = 1, b = 'x'}", "task.options", {"a": 1, "b": "x"}),
        ("algorithm.options.loss.clip_high=0.3", "algorithm.options", {"loss.clip_high": 0.3}),
    ],
)
def test_overrides(override, name, value):
    found = changed(override)
    assert found == {name: value}
    assert type(found[name]) is type(value)


def test_overrides_add_to_tables():
    base = TrainConfig(task=TaskConfig(options={"a": 1}))
    assert with_overrides(base, ["task.options.b=2"]).task.options == {"a": 1, "b": 2}
    assert with_overrides(base, ["task.options.a=true"]).task.options == {"a": True}
    assert base.task.options == {"a": 1}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.steps", "options are written section.key=value"),
        ("run.stesp=5", r"unknown option run\.stesp; did you mean run\.steps\?"),
        ("rum.steps=5", r"unknown option rum\.steps; did you mean run\.steps\?"),
        ("steps=5", r"unknown option steps; did you mean run\.steps or warm_up\.steps\?"),
        ("planer=static", r"did you mean balance\.planner\?"),
        ("run=5", "run is a section, its options are run.key=value"),
        ("=5", "unknown option; sections are run"),
        ("run.steps.x=5", r"run\.steps is not a table"),
        ("run.steps=6O", "run.steps must be a whole number from 1 to .*, not '6O'"),
        ("run.steps=", "cannot read run.steps=''"),
        ('run.steps="5', "write a value as in TOML"),
        ("run.steps=5\nx=6", "run.steps must be a whole number"),
        ("run.steps=[5]", r"run.steps must be a whole number from 1 to \d+, not \[5\]"),
        ("run.steps=true", "must be a whole number"),
        ("run.steps=nan", "must be a whole number"),
        ("task.options.x=[1]", "task.options.x must be text"),
        ("task.options.=1", "unknown option|must not be empty|must be a table"),
        ("task.name=a\udcffb", "task.name must be text without"),
    ],
)
def test_overrides_that_cannot_be_used(override, said):
    with pytest.raises(InputError, match=said):
        with_overrides(TrainConfig(), [override])


def test_an_option_is_given_once():
    with pytest.raises(InputError, match=r"run.keep is given twice, as '1' and as '1'"):
        with_overrides(TrainConfig(), ["run.keep=1", "run.keep=1"])


@pytest.mark.parametrize(
    "override",
    ["run.steps=9", "run.checkpoint_every=1", "run.evaluate_every=0", "cluster.nodes=1", "balance.planner=static",
     "run.seed=0"],
)  # fmt: skip
def test_a_resumed_run_may_be_told_these_anew(override):
    check_resumable(TrainConfig(), with_overrides(TrainConfig(), [override]))


@pytest.mark.parametrize("override", ["run.seed=1", "optimizer.lr=0.5", "task.options.a=1", "run.keep=9"])
def test_a_resumed_run_may_be_told_nothing_else_anew(override):
    name = override.partition("=")[0].replace("options.a", "options")
    with pytest.raises(InputError, match=rf"cannot resume with {name} = .*: the run has .* and only run\.steps, "):
        check_resumable(TrainConfig(), with_overrides(TrainConfig(), [override]))


def test_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = with_overrides(TrainConfig(), ["model.source=m", "task.reward=r.py:f", "task.path=p", "warm_up.cache=c"])
    config = with_absolute_paths(base)
    assert config.model.source == str(tmp_path / "m")
    assert config.task.reward == str(tmp_path / "r.py:f")
    assert config.task.path == str(tmp_path / "p")
    assert config.warm_up.cache == str(tmp_path / "c")
    assert config.debug.record == ""
    assert with_absolute_paths(config) == config
    assert with_absolute_paths(TrainConfig()) == TrainConfig()
