"""Start a run: as processes of this machine, or, under torchrun, as the rank that this process is.

torchrun says who a process is by RANK and WORLD_SIZE; without RANK this process starts all ranks itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from equilibra.core.errors import InputError
from equilibra.train.config import ClusterConfig
from equilibra.train.interrupts import Interrupts
from equilibra.train.observers import Screen
from equilibra.train.processes import run_processes
from equilibra.train.rank import Job, failure_of, run_rank
from equilibra.train.run_folder import FolderLock

__all__ = ["Place", "launch", "place_under_torchrun"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Who this process is under torchrun."""

    rank: int
    """among all processes"""
    world: int
    """processes in all"""
    restarts: int = 0
    """times that torchrun has started all processes again"""


def place_under_torchrun(cluster: ClusterConfig, environment: Mapping[str, str] = os.environ) -> Place | None:
    """Who this process is; None if torchrun did not start it. An error if torchrun started another number of them."""
    if "RANK" not in environment:
        return None
    try:
        rank, world = int(environment["RANK"]), int(environment.get("WORLD_SIZE", ""))
        restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    except ValueError:
        raise InputError(
            "RANK is set, but RANK and WORLD_SIZE are not both numbers: use torchrun, or unset RANK"
        ) from None
    size = cluster.nodes * cluster.ranks_per_node
    if world != cluster.num_processes:
        groups = f"set cluster.groups={world // size}" if world % size == 0 else "change cluster.*"
        raise InputError(
            f"torchrun started {world} processes, but cluster.nodes={cluster.nodes} x cluster.ranks_per_node="
            f"{cluster.ranks_per_node} x cluster.groups={cluster.groups} is {cluster.num_processes}: "
            f"{groups}, or start {cluster.num_processes} processes"
        )
    return Place(rank=rank, world=world, restarts=restarts)


def launch(job: Job, *, screen: Screen, place: Place | None, lock: FolderLock | None) -> bool:
    """Run until all steps are done; returns whether the run was told to stop before."""
    if place is None:
        assert lock is not None
        return run_processes(job, screen=screen, lock=lock)
    with Interrupts(_end_at_second) as interrupts:
        told = False

        def stop() -> bool:
            nonlocal told
            if interrupts.count and not told:
                told = True
                screen.note("stopping: the step is finished, a checkpoint is written next")
            return interrupts.count > 0

        try:
            run_rank(job, place.rank, screen=screen, stop=stop)
        except (OSError, MemoryError) as error:
            failure = failure_of(error)
            if failure.is_input:
                raise InputError(failure.text) from error
            raise
    return interrupts.count > 0


def _end_at_second(count: int) -> None:
    if count > 1:
        os._exit(130)
