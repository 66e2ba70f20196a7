"""Observer: whoever watches a run. World rank 0 has a real one, the others a silent one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

__all__ = ["STAGES", "Observer", "Silent"]

STAGES = (
    "start", "warm-up", "weights", "evaluate", "rollout", "reward", "plan", "logprob", "advantages", "update",
    "checkpoint", "report",
)  # fmt: skip
"""what a run does, in the words that users see"""


class Observer(Protocol):
    """Told what happens, as it happens."""

    def stage(self, name: str, *, step: int, done: int = 0, total: int = 0) -> None:
        """A stage begins, or is `done` of `total` parts through."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is over."""
        ...

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Held-out problems were answered before this step."""
        ...


class Silent:
    """Says nothing."""

    def stage(self, name: str, *, step: int, done: int = 0, total: int = 0) -> None:
        """Nothing."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""
