"""What a run can go on from: weights and optimizers of both models, homes, and answers under way.

    RUN/checkpoints/value/step-...      the value model, if there is one: written first
    RUN/checkpoints/carried/step-...    unfinished answers, a file per rank
    RUN/checkpoints/policy/step-...     the policy: written last, so a checkpoint counts when this is there

All noise follows from seed and step, so nothing else needs to be kept.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from equilibra.core.errors import InputError, UnreadableError
from equilibra.core.placement import Placement
from equilibra.execute.state.checkpoint import Checkpoints
from equilibra.execute.state.checkpoint_folder import checkpoint_steps, remove_checkpoint
from equilibra.rl.learner import Learner
from equilibra.rl.recording import read_samples, write_samples
from equilibra.rl.sample import Sample

__all__ = ["State", "resumable_steps"]


def resumable_steps(folder: Path) -> list[int]:
    """Steps that a run in this folder can go on from."""
    return checkpoint_steps(folder / "checkpoints" / "policy")


class State:
    """The checkpoints of a run."""

    def __init__(
        self, folder: Path, policy: Learner, critic: Learner | None, *, keep: int, timeout_s: float
    ) -> None:  # fmt: skip
        """timeout_s: how long ranks wait for each other's disks."""
        self.folder, self.keep, self.timeout_s = folder / "checkpoints", keep, timeout_s
        self.learners = {"policy": policy, **({} if critic is None else {"value": critic})}
        self.checkpoints = {name: self._of(name, learner) for name, learner in self.learners.items()}
        self.group = policy.model.runtime.group

    def _of(self, name: str, learner: Learner) -> Checkpoints:
        assert isinstance(learner.model, nn.Module)
        return Checkpoints(
            self.folder / name, learner.model.runtime, learner.model, learner.optimizer,
            masters=learner.balancer.masters, keep=self.keep + (name == "value"),
            timeout_s=self.timeout_s,
        )  # fmt: skip

    # --- save ---

    def save(self, step: int, carried: Sequence[Sample] | None) -> None:
        """Collective: everything after `step` steps. carried: answers under way here; None: the run carries none."""
        for name in reversed(self.checkpoints):
            if name == "policy" and carried is not None:  # the same on every rank, also on those without an answer
                self._save_carried(step, carried)
            self.checkpoints[name].save(step, {"homes": self._homes(name)})
        self._forget_carried()

    def _homes(self, name: str) -> dict[str, Any]:
        placement = self.learners[name].model.runtime.placement
        cluster = placement.cluster
        return {
            "nodes": cluster.num_nodes, "ranks_per_node": cluster.ranks_per_node,
            "home_of_expert": placement.home_of_expert.tolist(),
        }  # fmt: skip

    def _carried(self, step: int) -> Path:
        return self.folder / "carried" / f"step-{step:08d}"

    def _save_carried(self, step: int, carried: Sequence[Sample]) -> None:
        rank = self.group.world_rank

        def clear() -> None:
            if rank == 0:
                shutil.rmtree(self._carried(step), ignore_errors=True)
                self._carried(step).mkdir(parents=True)

        what = f"writing the answers under way of step {step}"
        self.group.all_succeed(clear, what=what)
        self.group.all_succeed(lambda: write_samples(self._carried(step) / f"rank-{rank:05d}.npz", carried), what=what)

    def _forget_carried(self) -> None:
        """Those of checkpoints that are gone; those that were set aside are still there."""
        if self.group.world_rank == 0 and (self.folder / "carried").is_dir():
            kept = {path.name.partition(".")[0] for path in (self.folder / "policy").iterdir()}
            for path in (self.folder / "carried").iterdir():
                if path.name.partition(".")[0] not in kept:
                    with suppress(OSError):
                        shutil.rmtree(path)

    # --- load ---

    def load(self, *, windowed: bool, say: Callable[[str], None]) -> tuple[int, list[Sample]]:
        """Collective: the newest state that is whole; returns its step and all ranks' answers under way."""
        steps = checkpoint_steps(self.folder / "policy")
        if not steps:
            raise InputError(f"there is no checkpoint in {self.folder}: the run ended before its first one; start anew")
        for step in reversed(steps):
            try:
                carried = self._load(step, windowed=windowed)
            except UnreadableError as error:  # it may be good: an older one instead would lose what it holds
                raise UnreadableError(
                    f"{error}; the checkpoint of step {step} may be good: resume again when it can be read, or move it "
                    "away to go back to an older one"
                ) from error
            except InputError as error:
                if step == steps[0]:
                    raise
                say(
                    f"the checkpoint of step {step} cannot be used ({error}); going back to an older one; the next "
                    "checkpoint sets it aside as step-*.aside"
                )
            else:
                self._forget_halves(steps[-1])
                return step, carried
        raise AssertionError

    def _forget_halves(self, last: int) -> None:
        """Value models of checkpoints whose policy was never written, because something ended the run before."""
        folder = self.folder / "value"
        for step in checkpoint_steps(folder) if self.group.world_rank == 0 else ():
            if step > last:
                remove_checkpoint(folder, step)

    def _load(self, step: int, *, windowed: bool) -> list[Sample]:
        found: list[Sample] = []

        def carried() -> None:
            files = sorted(self._carried(step).glob("rank-*.npz"))
            if not files:
                raise InputError(f"there are no answers under way in {self._carried(step)}")
            found.extend(sample for file in files for sample in read_samples(file))

        if windowed:
            self.group.all_succeed(carried, what="reading answers under way")
        for name, checkpoints in self.checkpoints.items():
            loaded = checkpoints.load(step)
            self._restore(name, loaded.extra.get("homes"))
        return found

    def _restore(self, name: str, homes: Any) -> None:  # noqa: ANN401 - as it was saved
        """Homes where they were, if the ranks are the same: then sums have their old order, and results their bits."""
        learner = self.learners[name]
        cluster = learner.model.runtime.group.cluster
        if not isinstance(homes, dict) or learner.optimizer is None:
            return
        if (homes.get("nodes"), homes.get("ranks_per_node")) == (cluster.num_nodes, cluster.ranks_per_node):
            placed = np.array(homes["home_of_expert"], np.int32)
            learner.balancer.move_homes(Placement(home_of_expert=placed, cluster=cluster))

    def close(self) -> None:
        """Give back threads."""
        for checkpoints in self.checkpoints.values():
            checkpoints.close()
