"""Checkpoints of a run: weights and optimizers of both models, homes, and unfinished answers.

    RUN/checkpoints/value/step-...      the value model, if any: written first
    RUN/checkpoints/carried/step-...    unfinished answers, one file per rank
    RUN/checkpoints/policy/step-...     the policy: written last, so its presence completes a checkpoint

All noise follows from seed and step, so there is no random state to save.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from equilibra.core.errors import InputError, UnreadableError
from equilibra.core.placement import Placement
from equilibra.execute.state.checkpoint import Checkpoints, checkpoint_steps, remove_checkpoint
from equilibra.rl.engine import Sample
from equilibra.rl.learner import Learner
from equilibra.rl.recording import read_samples, write_samples


class State:
    """The checkpoints of a run."""

    def __init__(self, folder: Path, policy: Learner, critic: Learner | None, *, keep: int, timeout_s: float) -> None:
        """timeout_s: how long ranks wait for each other's disks."""
        self.folder, self.group = folder / "checkpoints", policy.model.runtime.group
        self.learners = {"policy": policy} if critic is None else {"policy": policy, "value": critic}
        self.checkpoints = {
            name: Checkpoints(
                self.folder / name, one.model.runtime, one.model, one.optimizer,  # type: ignore[arg-type]
                masters=one.balancer.masters, keep=keep + (name == "value"), timeout_s=timeout_s,
            )
            for name, one in self.learners.items()
        }  # fmt: skip

    def save(self, step: int, carried: Sequence[Sample] | None) -> None:
        """Collective: save the state after `step` steps. carried: this rank's unfinished answers; None: no windows."""
        for name in reversed(self.checkpoints):
            if name == "policy" and carried is not None:  # the same decision on every rank
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

        what = f"writing the unfinished answers of step {step}"
        self.group.all_succeed(clear, what=what)
        self.group.all_succeed(lambda: write_samples(self._carried(step) / f"rank-{rank:05d}.npz", carried), what=what)

    def _forget_carried(self) -> None:
        """Remove unfinished answers of removed checkpoints; those of kept and set-aside ones stay."""
        if self.group.world_rank == 0 and (self.folder / "carried").is_dir():
            kept = {path.name.partition(".")[0] for path in (self.folder / "policy").iterdir()}
            for path in (self.folder / "carried").iterdir():
                if path.name.partition(".")[0] not in kept:
                    with suppress(OSError):
                        shutil.rmtree(path)

    def load(self, *, windowed: bool, say: Callable[[str], None]) -> tuple[int, list[Sample]]:
        """Collective: load the newest intact checkpoint; returns its step and all ranks' unfinished answers."""
        steps = checkpoint_steps(self.folder / "policy")
        if not steps:
            raise InputError(f"no checkpoint in {self.folder}: the run ended before its first one; start a new run")
        for step in reversed(steps):
            try:
                carried = self._load(step, windowed=windowed)
                break
            except UnreadableError as error:  # it may be intact: loading an older one would lose steps
                raise UnreadableError(
                    f"{error}; the checkpoint of step {step} may be intact: resume when it can be read, or move it "
                    "away to use an older one"
                ) from error
            except InputError as error:
                if step == steps[0]:
                    raise
                say(
                    f"the checkpoint of step {step} cannot be used ({error}); using an older one; the next checkpoint "
                    "sets it aside as step-*.aside"
                )
        self.forget_halves(after=steps[-1])
        return step, carried

    def forget_halves(self, after: int = -1) -> None:
        """Remove value models after this step: a run that was killed before their policy was written left them."""
        folder = self.folder / "value"
        for step in checkpoint_steps(folder) if self.group.world_rank == 0 else ():
            if step > after:
                remove_checkpoint(folder, step)

    def _load(self, step: int, *, windowed: bool) -> list[Sample]:
        found: list[Sample] = []

        def carried() -> None:
            files = sorted(self._carried(step).glob("rank-*.npz"))
            if not files:
                raise InputError(f"no unfinished answers in {self._carried(step)}")
            found.extend(sample for file in files for sample in read_samples(file))

        if windowed:
            self.group.all_succeed(carried, what="reading unfinished answers")
        for name, checkpoints in self.checkpoints.items():
            self._restore(self.learners[name], checkpoints.load(step).extra["homes"])
        return found

    def _restore(self, learner: Learner, homes: dict[str, Any]) -> None:
        """Restore the homes if the cluster is the same: then sums keep their order, and results their bits."""
        cluster = learner.model.runtime.group.cluster
        if (homes["nodes"], homes["ranks_per_node"]) == (cluster.num_nodes, cluster.ranks_per_node):
            placed = np.array(homes["home_of_expert"], np.int32)
            learner.balancer.move_homes(Placement(home_of_expert=placed, cluster=cluster))

    def close(self) -> None:
        for checkpoints in self.checkpoints.values():
            checkpoints.close()
