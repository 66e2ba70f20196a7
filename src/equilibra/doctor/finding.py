"""Findings, measurements and verdicts: what the doctor says, as values that travel as JSON between its processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["Ask", "Finding", "Measured", "PathState", "State", "Verdict", "first_line", "guarded", "without_gpu"]

MOST_LETTERS = 200


class State(StrEnum):
    """How a check came out."""

    OK = "ok"
    """tried or read, and as it should be"""
    WARNING = "warning"
    """works, but not as well as it could"""
    MISSING = "missing"
    """not there, or tried and failed"""
    NOT_TESTED = "not-tested"
    """nothing is known: there is nothing to try it on"""


class PathState(StrEnum):
    """What becomes of a transfer path on this machine."""

    WORKS = "will-work"
    FAILS = "will-not-work"
    NOT_TESTED = "not-tested"


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What the user wants to run on the machine."""

    model: str | None = None
    """preset or file: how much shared memory does it need?"""
    spare_slots: int = 2
    """flash copies a rank holds"""
    ranks_per_node: int | None = None
    """ranks on this machine; None: its GPUs"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check."""

    name: str
    """what was looked at"""
    state: State
    """how it came out"""
    text: str
    """what was found"""
    advice: str = ""
    """what to do about it; empty: nothing"""
    values: dict[str, Any] = field(default_factory=dict)
    """the same for programs"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measured rate."""

    name: str
    """what was measured"""
    value: float
    """median of the largest case"""
    unit: str
    """GB/s or TFLOP/s"""
    low: float
    """lower quartile of the largest case"""
    high: float
    """upper quartile of the largest case"""
    repeats: int
    """timings of the largest case"""
    cases: list[dict[str, Any]]
    """all cases, as `cost.calibrate` takes them"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One transfer path of the runtime."""

    path: str
    """as in the configuration"""
    state: PathState
    """what becomes of it"""
    text: str
    """why"""


def first_line(error: BaseException | str) -> str:
    """An error in one line that fits into a table."""
    line = next((part.strip() for part in str(error).splitlines() if part.strip()), "")
    if not isinstance(error, str):
        line = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return line if len(line) <= MOST_LETTERS else f"{line[: MOST_LETTERS - 1]}…"


def guarded(name: str, check: Callable[[], Finding | Sequence[Finding]], *, on_error: State) -> list[Finding]:
    """The findings of a check; if it raises, a finding that says so."""
    try:
        found = check()
    except ImportError as error:
        return [Finding(name=name, state=State.MISSING, text=first_line(error))]
    except Exception as error:  # noqa: BLE001 - whatever breaks in a probe is what the doctor is there to report
        return [Finding(name=name, state=on_error, text=first_line(error))]
    return [found] if isinstance(found, Finding) else list(found)


def without_gpu(name: str) -> Finding | None:
    """The finding of a check that needs a GPU where there is none; None where there is one."""
    import torch

    if torch.cuda.is_available():
        return None
    return Finding(name=name, state=State.NOT_TESTED, text="no GPU here")
