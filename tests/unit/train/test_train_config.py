"""The configuration checks itself: every option documented, every wrong value one clear line."""

import math
from dataclasses import fields, replace

import pytest

from equilibra.core.errors import InputError
from equilibra.train.config import (
    BalanceConfig,
    DebugConfig,
    OptimizerConfig,
    RunConfig,
    TaskConfig,
    TrainConfig,
)
from equilibra.train.config_files import config_from_table, option_docs, option_types, options_text

SECTIONS = {one.name: one.default_factory for one in fields(TrainConfig)}


def build(section: str, key: str, value: object) -> object:
    return SECTIONS[section](**{key: value})


def every(kind: object) -> list[tuple[str, str]]:
    return [(section, key) for section, keys in option_types().items() for key in keys if keys[key] is kind]


def test_the_default_is_two_nodes_of_two():
    assert TrainConfig().cluster.num_processes == 4


@pytest.mark.parametrize(("section", "key"), every(int))
@pytest.mark.parametrize("value", ["3", True, 1.0, math.nan, -2, 2**31, None, [1], pytest.param(10**5000, id="huge")])
def test_whole_numbers_are_nothing_else(section, key, value):
    with pytest.raises(InputError, match=rf"^{section}\.{key} must be a whole number from -?\d+ to \d+, not ") as error:
        build(section, key, value)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(("section", "key"), every(float))
@pytest.mark.parametrize("value", ["0.1", True, math.nan, math.inf, -0.1, None, pytest.param(10**5000, id="huge")])
def test_numbers_are_finite_and_not_negative(section, key, value):
    with pytest.raises(InputError, match=rf"^{section}\.{key} must be a number (more than|from) "):
        build(section, key, value)


@pytest.mark.parametrize(("section", "key"), every(str))
@pytest.mark.parametrize("value", [1, True, None, {}, "a\0b", "\udcff"])
def test_text_is_text(section, key, value):
    with pytest.raises(InputError, match=rf"^{section}\.{key} must be "):
        build(section, key, value)


@pytest.mark.parametrize(("section", "key"), every(bool))
@pytest.mark.parametrize("value", [0, 1, "true", None])
def test_flags_are_true_or_false(section, key, value):
    with pytest.raises(InputError, match=rf"^{section}\.{key} must be true or false, not "):
        build(section, key, value)


@pytest.mark.parametrize("section", ["task", "algorithm"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, "must be a table"),
        ({"a": [1]}, r"options\.a must be text, a finite number, true or false, not \[1\]"),
        ({"a": math.nan}, "finite"),
        ({"a": None}, "finite"),
        ({1: 1}, "a key of .*options must be text"),
        ({"": 1}, "a key of .*options must not be empty"),
        ({"a": "\0"}, "NUL"),
    ],
)
def test_tables_hold_plain_values(section, value, said):
    with pytest.raises(InputError, match=said):
        build(section, "options", value)


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("run", "steps", 0, "from 1 to"),
        ("run", "dtype", "float63", "one of float64, float32, bfloat16, not 'float63'; did you mean 'float64'?"),
        ("run", "device", "tpu", "one of auto, cpu, cuda, not 'tpu'"),
        ("run", "timeout_s", 0, "more than 0 and below 1e\\+06, not 0"),
        ("run", "timeout_s", 1e6, "below 1e\\+06"),
        ("run", "checkpoint_timeout_s", 0, "more than 0"),
        ("cluster", "nodes", 65_537, "from 1 to 65536, not 65537"),
        ("model", "source", "", "model.source must not be empty"),
        ("task", "kind", "json", "did you mean 'jsonl'"),
        ("task", "kind", "jsonl", "needs a file of problems: set task.path"),
        ("task", "name", "", "set task.name"),
        ("task", "reward", "mine.py", "must be file.py:function, not 'mine.py'"),
        ("task", "reward", "mine.py:", "must be file.py:function"),
        ("task", "reward", ":score", "must be file.py:function"),
        ("warm_up", "lr", 0.0, "more than 0"),
        ("rollout", "temperature", 0, "more than 0"),
        ("optimizer", "beta1", 1.0, "from 0 to below 1, not 1.0"),
        ("balance", "max_moves_per_layer", -2, "from -1 to"),
        ("balance", "path", "nvlink", "one of collective, host"),
    ],
)
def test_limits(section, key, value, said):
    with pytest.raises(InputError, match=said):
        build(section, key, value)


def test_options_that_contradict_each_other():
    with pytest.raises(InputError, match=r"tokens_per_rank = 64 cannot hold the longest sequence: .* = 71; raise it"):
        TrainConfig(balance=BalanceConfig(tokens_per_rank=64))
    TrainConfig(balance=BalanceConfig(tokens_per_rank=79))
    with pytest.raises(InputError, match=r"debug\.record and debug\.replay exclude each other"):
        DebugConfig(record="a", replay="b")


def test_edges_that_are_allowed():
    replace(TaskConfig(), kind="jsonl", path="problems.jsonl", reward="C:/mine.py:score")
    OptimizerConfig(lr=0, beta1=0)
    RunConfig(evaluate_every=0)


def test_every_option_is_explained_and_printed_with_its_default():
    docs, text = option_docs(), options_text()
    for section, keys in option_types().items():
        assert f"[{section}]" in text
        for key in keys:
            assert len(docs[f"{section}.{key}"]) > 10, key
            first = docs[f"{section}.{key}"].split()[:3]
            lines = [line for line in text.splitlines() if line.startswith(f"{key} = ")]
            assert any(" ".join(first) in line for line in lines)
    assert all(len(line) <= 120 for line in text.splitlines())


def test_the_printed_options_are_a_configuration_file():
    import tomllib

    assert config_from_table(tomllib.loads(options_text())) == TrainConfig()
    changed = replace(TrainConfig(), run=RunConfig(steps=7), task=TaskConfig(options={"a b": 'x"\\', "n": 2}))
    assert config_from_table(tomllib.loads(options_text(changed))) == changed
