"""Options on the command line: `section.key=value`, over a configuration.

Values are written as in TOML; a bare word is text. Options that are text take what is written as it is. A key inside a
table (`task.options.max_digits=2`) adds to the table.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from equilibra.core.checks import shown
from equilibra.core.errors import InputError
from equilibra.train.config import TrainConfig
from equilibra.train.config_files import config_from_table, option_types, table_of, unknown

__all__ = ["changed_options", "check_resumable", "with_absolute_paths", "with_overrides"]

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
