"""Configurations in TOML files: read, written, and read back as the same value.

Unknown sections and keys are errors that name the nearest valid one. A file that is no configuration (binary, huge,
a folder, keys given twice) is one clear line.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from stat import S_ISREG
from typing import Any, get_type_hints

from equilibra.core.atomic import cannot
from equilibra.core.errors import InputError
from equilibra.train.config import TrainConfig
from equilibra.train.config_checks import shown

__all__ = [
    "changed_options", "check_resumable", "config_from_table", "load_config", "option_docs", "option_types",
    "options_text", "table_of", "toml_line", "toml_text", "unknown", "with_absolute_paths", "with_overrides",
]  # fmt: skip

# What `equilibra train --options` prints: every option with its default, explained by the docstring under its field.
#
# The text is a configuration file: written to one and changed, it can be given to `equilibra train --config`.


COLUMN = 38
"""where explanations begin"""
WIDTH = 120


@cache
def option_docs() -> dict[str, str]:
    """The explanation of every option, `section.key`, from the docstrings in the source."""
    return {
        f"{section}.{key}": doc
        for section, values in vars(TrainConfig()).items() for key, doc in _docs_of(type(values)).items()
    }  # fmt: skip


def _docs_of(section: type) -> dict[str, str]:
    """Fields of a section, and what is said of each."""
    (node,) = ast.parse(inspect.getsource(section)).body
    return _field_docs(node) if isinstance(node, ast.ClassDef) else {}


def _field_docs(node: ast.ClassDef) -> dict[str, str]:
    """Fields of a class and the strings under them."""
    docs = {}
    for one, after in pairwise(node.body):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(after, ast.Expr):
            docs[one.target.id] = inspect.cleandoc(str(ast.literal_eval(after.value)))
    return docs


def options_text(config: TrainConfig | None = None) -> str:
    """Every option with its value (its default), explained."""
    config = config or TrainConfig()
    docs, lines = option_docs(), ["# equilibra train: every option; change one with section.key=value, or in a file"]
    for section, values in table_of(config).items():
        about = type(getattr(config, section)).__doc__ or ""
        lines += ["", f"# {about.splitlines()[0]}", f"[{section}]"]
        for key, value in values.items():
            lines += _explained(toml_line(key, value), docs[f"{section}.{key}"])
    return "\n".join(lines) + "\n"


def _explained(line: str, doc: str) -> list[str]:
    """The line, with its explanation as a comment beside it."""
    first, *more = textwrap.wrap(" ".join(doc.split()), WIDTH - COLUMN - 2)
    return [f"{line:<{COLUMN}}# {first}", *(f"{'':<{COLUMN}}# {part}" for part in more)]


# Options on the command line: `section.key=value`, over a configuration.
#
# Values are written as in TOML; a bare word is text. Options that are text take what is written as it is. A key
# inside a
# table (`task.options.max_digits=2`) adds to the table.


CHANGEABLE = (
    "run.steps", "run.checkpoint_every", "run.checkpoint_timeout_s", "run.evaluate_every", "run.timeout_s", "cluster.*",
    "balance.*", "rollout.server", "rollout.server_timeout_s", "rollout.weights_folder", "rollout.mismatch",
    "rollout.mismatch_limit", "rollout.timeout_s", "task.score_timeout_s",
)  # fmt: skip
"""what a resumed run may be told anew: nothing that changes its numbers"""


def with_overrides(config: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    """The configuration with some options changed; each may be given once."""
    table = table_of(config)
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
        raise unknown(f"option {name}", f"{section}.{key}" if key else section)
    inside = types[section][key] not in {int, float, str, bool}
    if inner and not inside:
        raise InputError(f"unknown option {name}: {section}.{key} is no table; did you mean {section}.{key}?")
    if inner:
        table[section][key] = {**table[section][key], inner: _value(name, text)}
    else:
        table[section][key] = _text(text) if types[section][key] is str else _value(name, text)


def _text(text: str) -> str:
    """What is written, without the quotes of TOML if it has them."""
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
    """The value, if the text is one in TOML."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return None
    return table["value"] if len(table) == 1 else None


def changed_options(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[object, object]]:
    """Options that differ, with both values."""
    old, new = table_of(before), table_of(after)
    return {
        f"{section}.{key}": (old[section][key], value)
        for section, values in new.items() for key, value in values.items() if old[section][key] != value
    }  # fmt: skip


def check_resumable(before: TrainConfig, after: TrainConfig) -> None:
    """An error if a resumed run is told anew what would make it another run."""
    for name, (old, new) in changed_options(before, after).items():
        if name not in CHANGEABLE and f"{name.partition('.')[0]}.*" not in CHANGEABLE:
            raise InputError(
                f"cannot resume with {name} = {shown(new)}: the run has {shown(old)}, and only "
                f"{', '.join(CHANGEABLE)} can change; leave it out, or start a new run"
            )


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """The configuration with paths that do not depend on the current folder, so that a run resumes anywhere."""
    source, task, debug, rollout = config.model.source, config.task, config.debug, config.rollout
    return replace(
        config,
        model=replace(config.model, source=source if source == "embedded" else _absolute(source)),
        task=replace(task, path=_absolute(task.path), reward=_absolute(task.reward)),
        rollout=replace(rollout, weights_folder=_absolute(rollout.weights_folder)),
        warm_up=replace(config.warm_up, cache=_absolute(config.warm_up.cache)),
        debug=replace(debug, record=_absolute(debug.record), replay=_absolute(debug.replay)),
    )


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""


MOST_BYTES = 1 << 20
"""a larger file is no configuration"""
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def load_config(path: Path | str) -> TrainConfig:
    """The configuration in a file; what it does not mention has its default."""
    path = Path(path)
    try:
        table = tomllib.loads(_bytes(path).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {path}: it is no TOML, byte {error.start} is not UTF-8") from error
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot read {path}: it is no TOML ({str(error).splitlines()[0]})") from error
    try:
        return config_from_table(table)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _bytes(path: Path) -> bytes:
    """What is in a file that can be a configuration."""
    try:
        status = path.stat()
        if not S_ISREG(status.st_mode):
            what = "a folder" if path.is_dir() else "no ordinary file"
            raise InputError(f"cannot read {path}: it is {what}; give a TOML file")
        if status.st_size > MOST_BYTES:
            size = f"{status.st_size:,} bytes, at most {MOST_BYTES:,} can be"
            raise InputError(f"cannot read {path}: it is no configuration ({size})")
        return path.read_bytes()
    except OSError as error:
        raise cannot("read", path, error) from error


def config_from_table(table: Mapping[str, Any]) -> TrainConfig:
    """The configuration of a table of sections; what it does not mention has its default."""
    sections: dict[str, Any] = {}
    for name, section in table.items():
        if name not in option_types():
            raise unknown(f"section [{name}]" if isinstance(section, dict) else f"key {name}", name)
        if not isinstance(section, dict):
            raise InputError(f"{name} must be a section, [{name}], not {shown(section)}")
        for key in section:
            if key not in option_types()[name]:
                raise unknown(f"key {name}.{key}", f"{name}.{key}")
        values = {key: _as_type(option_types()[name][key], value) for key, value in section.items()}
        sections[name] = _sections()[name](**values)
    return TrainConfig(**sections)


def table_of(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """The configuration as plain tables."""
    return asdict(config)


def toml_text(config: TrainConfig) -> str:
    """The complete configuration as a file that `load_config` reads."""
    lines = ["# everything this training run was told; `equilibra train --options` explains it"]
    for name, section in table_of(config).items():
        lines += ["", f"[{name}]", *(toml_line(key, value) for key, value in section.items())]
    return "\n".join(lines) + "\n"


def toml_line(key: str, value: object) -> str:
    """One key and its value."""
    return f"{key} = {_toml(value)}"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {_toml(entry)}" for key, entry in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    return repr(value)  # int and float: Python's numbers are TOML's


def _key(key: str) -> str:
    return key if BARE_KEY.fullmatch(key) else _toml(key)


def _as_type(kind: object, value: object) -> object:
    """A whole number where a number is expected becomes one; keys of tables in tables are joined by dots."""
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
    """Type of every option, by section and key."""
    return {
        name: {one.name: get_type_hints(kind)[one.name] for one in fields(kind)} for name, kind in _sections().items()
    }


def unknown(what: str, name: str) -> InputError:
    """The error for a name that is no option: what was given, and the nearest valid ones."""
    near, what = _nearest(name[:100]), " ".join(what.split())[:100]
    hint = f"did you mean {' or '.join(near)}?" if near else f"sections are {', '.join(option_types())}"
    return InputError(f"unknown {what}; {hint} (all options: equilibra train --options)")


def _nearest(name: str) -> list[str]:
    section, _, key = name.partition(".")
    types = option_types()
    if section in types and key:
        return [f"{section}.{one}" for one in get_close_matches(key, types[section], 1)] or _having(key)
    if key:
        dotted = [f"{one}.{entry}" for one in types for entry in types[one]]
        return get_close_matches(name, dotted, 1)
    keys = sorted({entry for keys in types.values() for entry in keys})
    near = get_close_matches(section, [*keys, *types], 1)
    return near if near and near[0] not in keys else _having(section)


def _having(key: str) -> list[str]:
    """Options of any section with that key, or one like it."""
    keys: Iterable[str] = {entry for section in option_types().values() for entry in section}
    found = get_close_matches(key, sorted(keys), 1)
    return [f"{name}.{found[0]}" for name, section in option_types().items() if found and found[0] in section]
