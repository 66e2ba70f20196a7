"""Copies fetched ahead: while a layer computes, those of the layer that comes next are on their way.

Which layer comes next is Megatron's business: 1F1B and interleaved schedules, recompute of all layers or of some. So it
is learned: what came after a layer last time is taken to come after it again. Ranks of an expert-parallel group run the
same layers in the same order, so they fetch the same copies in the same order. A wrong guess makes nothing wrong:
copies wait under the layer, direction and micro-batch that they are for; a layer that nobody foresaw fetches its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from equilibra.core.plan import Stage
from equilibra.events.schema import Direction

__all__ = ["MOST_LAYERS", "Ahead", "Fetching"]

MOST_LAYERS = 2
"""whose copies are held for later, at a time: the next one's, and those of a guess whose time has not come"""


class Fetching(Protocol):
    """A layer that can fetch copies before it runs."""

    @property
    def num_arriving(self) -> int:
        """Visits that lie ahead, whose copies were asked for."""
        ...

    def fetch_next(self, direction: Direction) -> None:
        """Collective: start to fetch the copies of its next visit, if it has one and nobody has."""
        ...


class Ahead:
    """What comes after what, by kind of pass; one for the layers of a pipeline stage."""

    def __init__(self, layers: Sequence[Fetching]) -> None:
        self._layers = layers
        self._after_of_stage: dict[Stage, dict[tuple[Direction, int], tuple[Direction, int]]] = {}
        self.arm(Stage.UPDATE)

    def arm(self, stage: Stage) -> None:
        """A pass begins. Nothing is fetched for its first layer: weights may still be loaded before it runs."""
        self._after = self._after_of_stage.setdefault(stage, {})
        self._last: tuple[Direction, int] | None = None

    def began(self, layer: int, direction: Direction) -> None:
        """Learn that a layer came after the last one, and start to fetch what came after it before."""
        now = direction, layer
        if self._last is not None:
            self._after[self._last] = now
        self._last = now
        following = self._after.get(now)
        if following is not None and sum(one.num_arriving for one in self._layers) < MOST_LAYERS:
            self._layers[following[1]].fetch_next(following[0])
