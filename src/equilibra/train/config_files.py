"""Configurations as text: TOML files, `section.key=value` on the command line, and `equilibra train --options`.

A written file reads back as the same value. Errors are one line; unknown names come with the nearest valid one. Values
on the command line are TOML. A bare word is text, and text options take any text as it is. A key inside a table
(`task.options.max_digits=2`) adds to the table.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from stat import S_ISREG
from typing import Any, get_type_hints

from equilibra.core.atomic import cannot
from equilibra.core.checks import shown
from equilibra.core.errors import InputError
from equilibra.train.config import TrainConfig

COLUMN = 38
"""column where explanations begin"""
WIDTH = 120
CHANGEABLE = (
    "run.steps", "run.checkpoint_every", "run.checkpoint_timeout_s", "run.evaluate_every", "run.timeout_s", "cluster.*",
    "balance.*", "rollout.server", "rollout.server_timeout_s", "rollout.weights_folder", "rollout.mismatch",
    "rollout.mismatch_limit", "rollout.timeout_s", "task.score_timeout_s",
)  # fmt: skip
"""options that may change on resume, because none of them changes results"""
MOST_BYTES = 1 << 20
"""largest configuration file"""
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def load_config(path: Path | str) -> TrainConfig:
    """Read a configuration; missing options have their defaults."""
    content = _bytes(Path(path))
    try:
        table = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot read {path}: not valid TOML ({str(error).splitlines()[0]})") from error
    try:
        return config_from_table(table)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _bytes(path: Path) -> bytes:
    try:
        status = path.stat()
        if not S_ISREG(status.st_mode):
            what = "a folder" if path.is_dir() else "not a regular file"
            raise InputError(f"cannot read {path}: it is {what}; give a TOML file")
        if status.st_size > MOST_BYTES:
            raise InputError(
                f"cannot read {path}: it has {status.st_size:,} bytes, but configurations have at most {MOST_BYTES:,}"
            )
        return path.read_bytes()
    except OSError as error:
        raise cannot("read", path, error) from error


def config_from_table(table: Mapping[str, Any]) -> TrainConfig:
    """The configuration in a table of sections; missing options have their defaults."""
    sections: dict[str, Any] = {}
    for name, section in table.items():
        if name not in option_types():
            raise _unknown(f"section [{name}]" if isinstance(section, dict) else f"key {name}", name)
        if not isinstance(section, dict):
            raise InputError(f"{name} must be a section, [{name}], not {shown(section)}")
        for key in section:
            if key not in option_types()[name]:
                raise _unknown(f"key {name}.{key}", f"{name}.{key}")
        values = {key: _as_type(option_types()[name][key], value) for key, value in section.items()}
        sections[name] = _sections()[name](**values)
    return TrainConfig(**sections)


def toml_text(config: TrainConfig) -> str:
    """The complete configuration as TOML."""
    lines = ["# everything this training run was told; `equilibra train --options` explains it"]
    for name, section in asdict(config).items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in section.items())]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        inside = ", ".join(
            f"{key if BARE_KEY.fullmatch(key) else _toml(key)} = {_toml(entry)}" for key, entry in value.items()
        )
        return f"{{ {inside} }}" if inside else "{}"
    return repr(value)  # int and float: Python's numbers are TOML's


def _as_type(kind: object, value: object) -> object:
    """Convert whole numbers to float where float is expected; join nested keys by dots."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        return float(value)
    if kind not in {int, float, str, bool} and isinstance(value, dict):
        return dict(_flat(value))
    return value


def _flat(table: Mapping[str, object], before: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


@cache
def _sections() -> dict[str, type[Any]]:
    return get_type_hints(TrainConfig)


@cache
def option_types() -> dict[str, dict[str, Any]]:
    """Types of all options by section and key."""
    return {
        name: {one.name: get_type_hints(kind)[one.name] for one in fields(kind)} for name, kind in _sections().items()
    }


def _unknown(what: str, name: str) -> InputError:
    """The error for an unknown name, with the nearest valid ones."""
    near, what = _nearest(name[:100]), " ".join(what.split())[:100]
    hint = f"did you mean {' or '.join(near)}?" if near else f"sections are {', '.join(option_types())}"
    return InputError(f"unknown {what}; {hint} (all options: equilibra train --options)")


def _nearest(name: str) -> list[str]:
    """The options or sections that the user may mean: in the same section first, then any with such a key."""
    section, _, key = name.partition(".")
    types = option_types()
    dotted = [f"{one}.{entry}" for one in types for entry in types[one]]
    if key and section not in types:
        return get_close_matches(name, dotted, 1)
    if key and (near := get_close_matches(key, types[section], 1)):
        return [f"{section}.{near[0]}"]
    keys = sorted({entry for entries in types.values() for entry in entries})
    near = get_close_matches(key or section, keys if key else [*keys, *types], 1)
    return [one for one in dotted if near and one.endswith(f".{near[0]}")] or near


def with_overrides(config: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    """The configuration with some options changed, each at most once."""
    table = asdict(config)
    given: dict[str, str] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        name = name.strip()
        if not equals:
            raise InputError(f"cannot use {shown(override)}: options are written section.key=value, as in run.steps=20")
        if name in given:
            raise InputError(f"{name} is given twice, as {shown(given[name])} and as {shown(text)}; give it once")
        given[name] = text
        _set(table, name, text)
    return config_from_table(table)


def _set(table: dict[str, dict[str, Any]], name: str, text: str) -> None:
    section, _, rest = name.partition(".")
    key, _, inner = rest.partition(".")
    types = option_types()
    if name in types:
        raise InputError(
            f"cannot use {name}={shown(text)}: {section} is a section, its options are {section}.key=value"
        )
    if section not in types or key not in types[section]:
        raise _unknown(f"option {name}", f"{section}.{key}" if key else section)
    inside = types[section][key] not in {int, float, str, bool}
    if inner and not inside:
        raise InputError(f"unknown option {name}: {section}.{key} is not a table; did you mean {section}.{key}?")
    if inner:
        table[section][key] = {**table[section][key], inner: _value(name, text)}
    else:
        table[section][key] = _text(text) if types[section][key] is str else _value(name, text)


def _text(text: str) -> str:
    """The text without TOML quotes, if it has them."""
    parsed = _parsed(text)
    return parsed if isinstance(parsed, str) else text


def _value(name: str, text: str) -> object:
    parsed = _parsed(text)
    if parsed is not None:
        return parsed
    if not text or text[0] in "\"'[{":
        raise InputError(f"cannot read {name}={shown(text)}: write a value as in TOML, or a bare word")
    return text


def _parsed(text: str) -> object | None:
    """The TOML value; None if the text is not one."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return None
    return table["value"] if len(table) == 1 else None


def changed_options(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[object, object]]:
    """Old and new value of every option that differs."""
    old, new = asdict(before), asdict(after)
    return {
        f"{section}.{key}": (old[section][key], value)
        for section, values in new.items() for key, value in values.items() if old[section][key] != value
    }  # fmt: skip


def check_resumable(before: TrainConfig, after: TrainConfig) -> None:
    """Refuse to change options on resume that would change the results."""
    for name, (old, new) in changed_options(before, after).items():
        if name not in CHANGEABLE and f"{name.partition('.')[0]}.*" not in CHANGEABLE:
            raise InputError(
                f"cannot resume with {name} = {shown(new)}: the run has {shown(old)}, and only "
                f"{', '.join(CHANGEABLE)} can change; leave it out, or start a new run"
            )


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """Make paths absolute, so that a run can be resumed from any folder."""
    source, task, debug, rollout = config.model.source, config.task, config.debug, config.rollout
    hardware = config.balance.hardware
    return replace(
        config,
        model=replace(config.model, source=source if source == "embedded" else _absolute(source)),
        task=replace(task, path=_absolute(task.path), reward=_absolute(task.reward)),
        rollout=replace(rollout, weights_folder=_absolute(rollout.weights_folder)),
        warm_up=replace(config.warm_up, cache=_absolute(config.warm_up.cache)),
        balance=replace(config.balance, hardware=_absolute(hardware) if Path(hardware).suffix else hardware),
        debug=replace(debug, record=_absolute(debug.record), replay=_absolute(debug.replay)),
    )


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""


@cache
def option_docs() -> dict[str, str]:
    """Explanations of all options by `section.key`, from the docstrings under their fields."""
    return {
        f"{section}.{key}": doc
        for section, values in vars(TrainConfig()).items() for key, doc in _docs_of(type(values)).items()
    }  # fmt: skip


def _docs_of(section: type[Any]) -> dict[str, str]:
    """Explanations of a section's fields, inherited ones included."""
    docs: dict[str, str] = {}
    for kind in reversed(section.__mro__[:-1]):
        (node,) = ast.parse(inspect.getsource(kind)).body
        for one, after in pairwise(node.body) if isinstance(node, ast.ClassDef) else ():
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(after, ast.Expr):
                docs[one.target.id] = inspect.cleandoc(str(ast.literal_eval(after.value)))
    return {one.name: docs[one.name] for one in fields(section)}


def options_text(config: TrainConfig | None = None) -> str:
    """Every option with its value and explanation, as a configuration file."""
    config = config or TrainConfig()
    docs, lines = option_docs(), ["# equilibra train: every option; change one with section.key=value, or in a file"]
    for section, values in asdict(config).items():
        about = type(getattr(config, section)).__doc__ or ""
        lines += ["", f"# {about.splitlines()[0]}", f"[{section}]"]
        for key, value in values.items():
            lines += _explained(f"{key} = {_toml(value)}", docs[f"{section}.{key}"])
    return "\n".join(lines) + "\n"


def _explained(line: str, doc: str) -> list[str]:
    first, *more = textwrap.wrap(" ".join(doc.split()), WIDTH - COLUMN - 2)
    return [f"{line:<{COLUMN}}# {first}", *(f"{'':<{COLUMN}}# {part}" for part in more)]
