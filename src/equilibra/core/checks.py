"""Checks of settings, and the limits of a plan that many settings share.

Errors name the option, what it must be, and what it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, ClassVar

from equilibra.core.errors import InputError

MOST = 2**31 - 1
"""largest whole number of an option without a smaller limit"""
SHOWN = 60


def shown(value: object) -> str:
    """The value for a message: short, on one line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of thousands of digits
        return f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def check_whole(name: str, value: object, *, low: int, high: int | None = MOST) -> None:
    """Require a whole number from `low` to `high` (None: no limit), not a bool."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        end = "on" if high is None else f"to {high}"
        raise InputError(f"{name} must be a whole number from {low} {end}, not {shown(value)}")


def check_number(
    name: str, value: object, *, above: float | None = None, low: float = 0.0, high: float = 1e9, below: bool = False
) -> None:
    """Require a finite number: above `above` or at least `low`, up to `high` (`below`: less than `high`)."""
    start = f"more than {above:g}" if above is not None else f"from {low:g}"
    end = f"{'to below' if below and above is None else 'and below' if below else 'to'} {high:g}"
    end = end if math.isfinite(high) else "on"
    if not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))):
        enough = value > above if above is not None else value >= low
        if enough and (value < high if below else value <= high):
            return
    raise InputError(f"{name} must be a number {start} {end}, not {shown(value)}")


def check_flag(name: str, value: object) -> None:
    """Require a bool."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, not {shown(value)}")


def check_text(name: str, value: object, *, empty: bool = False) -> None:
    """Require text that files and paths can hold."""
    if not isinstance(value, str):
        raise InputError(f"{name} must be text, not {shown(value)}")
    if not value and not empty:
        raise InputError(f"{name} must not be empty")
    if "\0" in value or any("\ud800" <= sign <= "\udfff" for sign in value):
        raise InputError(f"{name} must be text without NUL and lone surrogates, not {shown(value)}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Require one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        near = get_close_matches(value, choices, 1) if isinstance(value, str) else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"{name} must be one of {', '.join(choices)}, not {shown(value)}{hint}")


def check_table(name: str, value: object) -> None:
    """Require a table of text, finite numbers and bools."""
    if not isinstance(value, Mapping):
        raise InputError(f"{name} must be a table of keys and values, not {shown(value)}")
    for key, entry in value.items():
        check_text(f"a key of {name}", key)
        if isinstance(entry, str):
            check_text(f"{name}.{key}", entry, empty=True)
        elif not (isinstance(entry, int) and abs(entry) < 2**63) and not (
            isinstance(entry, float) and math.isfinite(entry)
        ):
            raise InputError(f"{name}.{key} must be text, a finite number, true or false, not {shown(entry)}")


MOST_SLOTS = 2**16 - 1
"""largest number of copies or moves"""


@dataclass(frozen=True, kw_only=True)
class CopyLimits:
    """How many copies and moves a plan may use."""

    section: ClassVar[str] = ""
    """prefix of field names in messages"""

    spare_slots: int = 2
    """flash copies a rank can hold at a time, 0 or more: one buffer shared by all layers"""
    standing_slots: int = 2
    """standing copies a node may hold per layer, 0 or more"""
    max_moves_per_layer: int = -1
    """homes that may move per layer and step (a migration budget); -1: as many as pay"""

    def __post_init__(self) -> None:
        for name, low in (("spare_slots", 0), ("standing_slots", 0), ("max_moves_per_layer", -1)):
            check_whole(f"{self.section}{name}", getattr(self, name), low=low, high=MOST_SLOTS)

    def limits(self, **changes: int) -> dict[str, Any]:
        """The limits as keyword arguments, some changed: `StepProblem(..., **setting.limits(standing_slots=0))`."""
        return {one.name: getattr(self, one.name) for one in fields(CopyLimits)} | changes


@dataclass(frozen=True, kw_only=True)
class PlanLimits(CopyLimits):
    """Everything that bounds or seeds a plan, apart from its inputs."""

    seed: int = 0
    """seed of the planner's random choices, 0 or more"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(f"{self.section}seed", self.seed, low=0)

    def limits(self, **changes: int) -> dict[str, Any]:
        return super().limits(seed=self.seed) | changes
