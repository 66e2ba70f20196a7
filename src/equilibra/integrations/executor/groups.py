"""A framework's process groups as an expert-parallel group of ours.

Tokens travel in the framework's own expert-parallel group, and so do homes and gradients of copies. Copies have a group
of their own over the same ranks: they travel ahead, and neither wait behind tokens nor hold them up. Counts and hashes
need one more, over all ranks that have the same layers (a pipeline stage), from host memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist

from equilibra.core.cluster import Cluster
from equilibra.core.errors import InputError
from equilibra.execute.group import Channel, ExpertGroup, new_group, watch_over

__all__ = ["counts_of_world", "stage_group"]


def counts_of_world(count: int) -> list[int]:
    """A number of every process; all must call it."""
    every: list[Any] = [count]
    if dist.get_world_size() > 1:
        every *= dist.get_world_size()
        dist.all_gather_object(every, count)
    return every


def stage_group(
    expert_parallel: dist.ProcessGroup, expert_data_parallel: dist.ProcessGroup, cluster: Cluster, timeout_s: float
) -> ExpertGroup:
    """The ranks of this pipeline stage. All processes of the world must call it."""
    rank, index = expert_parallel.rank(), expert_data_parallel.rank()
    num_groups = expert_data_parallel.size()
    if cluster.num_ranks * num_groups == 1 and dist.get_world_size() == 1:
        return ExpertGroup(cluster=cluster, timeout_s=timeout_s, channels={})
    control = _control_group(expert_parallel, expert_data_parallel, timeout_s)
    copies = _new_group(dist.get_process_group_ranks(expert_parallel), timeout_s, backend=None)
    channels = dict.fromkeys((Channel.DISPATCH, Channel.STANDING, Channel.GRADIENTS), expert_parallel) | {
        Channel.COPIES: copies, Channel.CONTROL: control, Channel.REPLICAS: expert_data_parallel,
    }  # fmt: skip
    group = ExpertGroup(
        cluster=cluster, rank=rank, index=index, num_groups=num_groups, timeout_s=timeout_s, channels=channels,
        watch=watch_over(channels, timeout_s),
    )  # fmt: skip
    places = np.concatenate(group.gather(np.array([[rank, index]]), what="joining the ranks of a pipeline stage"))
    if control.size() != group.world_size or not np.array_equal(
        places, [[at % cluster.num_ranks, at // cluster.num_ranks] for at in range(group.world_size)]
    ):
        raise InputError(
            f"ranks of a pipeline stage are laid out as {places.tolist()}: (expert rank, expert data rank) must "
            "rise with the expert rank first, as the order tp-cp-ep-dp-pp has it, and expert_tensor_parallel_size must "
            "be 1"
        )
    return group


def _control_group(
    expert_parallel: dist.ProcessGroup, expert_data_parallel: dist.ProcessGroup, timeout_s: float
) -> dist.ProcessGroup:
    """A gloo group of the stage: the ranks that are reached through both groups."""
    across: list[Any] = [None] * expert_data_parallel.size()
    dist.all_gather_object(across, dist.get_process_group_ranks(expert_parallel), group=expert_data_parallel)
    return _new_group(sorted(rank for part in across for rank in part), timeout_s, backend="gloo")


def _new_group(mine: list[int], timeout_s: float, *, backend: str | None) -> dist.ProcessGroup:
    """A group of these ranks. Every process makes every group, so each says which one it is in."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, tuple(mine))
    made: dict[tuple[int, ...], dist.ProcessGroup] = {
        part: new_group(list(part), timeout_s, backend=backend) for part in sorted(set(every))
    }
    return made[tuple(mine)]
