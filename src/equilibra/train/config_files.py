"""Configurations in TOML files: read, written, and read back as the same value.

Unknown sections and keys are errors that name the nearest valid one. A file that is no configuration (binary, huge,
a folder, keys given twice) is one clear line.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from stat import S_ISREG
from typing import Any, get_type_hints

from equilibra.core.atomic import cannot
from equilibra.core.checks import shown
from equilibra.core.errors import InputError
from equilibra.train.config import TrainConfig

__all__ = ["config_from_table", "load_config", "option_types", "table_of", "toml_line", "toml_text", "unknown"]

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
