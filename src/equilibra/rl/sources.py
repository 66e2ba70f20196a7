"""Where samples come from: an engine that answers now, or a recording of what one answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from equilibra.execute.group import ExpertGroup
from equilibra.rl.learner import total_over
from equilibra.rl.observe import Clock
from equilibra.rl.recording import ModelShape, load_rollout, save_rollout
from equilibra.rl.rollout import Rollout
from equilibra.rl.sample import Sample
from equilibra.rl.tasks.timed import TimedTask

__all__ = ["EngineSource", "RecordedSource", "Recording"]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A folder that every rollout is written to."""

    folder: Path
    """made if it is not there"""
    model: ModelShape
    """that answers"""
    about: Mapping[str, object]
    """task and seed, for people"""


class EngineSource:
    """Asks the engine; unfinished answers are carried from window to window."""

    def __init__(
        self, rollout: Rollout, group: ExpertGroup, weights: Callable[[], Iterable[tuple[str, Tensor]]], *,
        num_held_out: int, windowed: bool, record: Recording | None = None,
    ) -> None:  # fmt: skip
        """Hold an engine.

        group: the ranks, with the patience that rollouts and engines need. weights: the policy's, by published names.
        record: where every rollout is written down.
        """
        self.rollout, self.group, self.weights, self.record = rollout, group, weights, record
        self.num_held_out, self.windowed = num_held_out, windowed
        self.carried: list[Sample] = rollout.places() if windowed else []
        """windows: what this rank's places hold before the next step"""

    def samples(self, step: int, *, version: int, clock: Clock) -> list[Sample]:
        """Collective in the sense that every rank does its part."""
        with clock.stage("rollout"):
            begun = self.carried if self.windowed else self.rollout.begin(step)
            grown = self.rollout.generate(begun, version=version)
        with clock.stage("reward"):
            rewarded = self.rollout.rewarded(grown)
        self.group.barrier(what="waiting for the rollouts of all ranks")
        if self.windowed:
            self.carried = self.rollout.succeed(rewarded)
        if self.record is not None:
            save_rollout(
                self.record.folder, step, rewarded, rank=self.group.world_rank, world_size=self.group.world_size,
                model=self.record.model, about=self.record.about,
            )  # fmt: skip
        return rewarded

    def new_weights(self, version: int) -> None:
        """Collective: the engine takes the policy's weights."""
        self.rollout.engine.load_weights(self.weights(), version=version)

    def held_out(self) -> dict[str, float]:
        """Collective: mean rewards on held-out problems."""
        return self.rollout.held_out(self.num_held_out, total_over(self.group))

    def take_unscored(self) -> int:
        """Own answers since the last call that got no reward because scoring them did not end in time."""
        task = self.rollout.task
        return task.take_unscored() if isinstance(task, TimedTask) else 0

    def resume(self, carried: Sequence[Sample]) -> None:
        """Go on with answers that any ranks had under way."""
        self.carried = self.rollout.here(carried)


class RecordedSource:
    """Reads what a rollout wrote down; nobody is asked anything."""

    def __init__(self, folder: Path, group: ExpertGroup, model: ModelShape) -> None:
        self.folder, self.group, self.model = folder, group, model

    def samples(self, step: int, *, version: int, clock: Clock) -> list[Sample]:  # noqa: ARG002 - answers have their own
        """Own part of a step."""
        with clock.stage("rollout"):
            return load_rollout(
                self.folder, step, rank=self.group.world_rank, world_size=self.group.world_size, model=self.model
            )

    def new_weights(self, version: int) -> None:
        """Nobody takes them."""

    def held_out(self) -> dict[str, float]:
        """Nobody can be asked."""
        return {}

    def take_unscored(self) -> int:
        """Rewards are recorded, too."""
        return 0
