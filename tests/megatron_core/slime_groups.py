"""A stand-in for slime's process groups under `--offload-train`: destroyed while the rollout runs, then made again.

slime hands out a group that stands for another, which can be replaced, and has torch.distributed unwrap it. Up to
2026-08 it left groups of gloo and of one rank as they were; here the backend is gloo throughout, so only those that ask
for it are. Since then it destroys WORLD, and with it every group, waits in a temporary one, and makes all of them anew.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

UNWRAPPING = (
    "get_rank", "get_world_size", "get_backend", "get_global_rank", "get_group_rank", "get_process_group_ranks",
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "broadcast", "broadcast_object_list", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "gather",
    "barrier", "send", "recv", "isend", "irecv", "_coalescing_manager",
)  # fmt: skip


class Replaceable(dist.ProcessGroup):
    """A group that stands for another."""

    made: ClassVar[list[Replaceable]] = []

    def __init__(self, group: Any, how: tuple[Any, dict[str, Any]]) -> None:
        super().__init__(group.rank(), group.size())
        self.group, self.how = group, how
        Replaceable.made.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)


def _forwarding(name: str) -> Any:
    return lambda self, *arguments, **options: getattr(self.group, name)(*arguments, **options)


for _name in dir(dist.ProcessGroup):  # Megatron has kept some of torch's own functions, which call the group
    if not _name.startswith("__") and callable(getattr(dist.ProcessGroup, _name)):
        setattr(Replaceable, _name, _forwarding(_name))


NEW_GROUP = dist.new_group


def install(*, world: bool = False) -> None:
    """Before Megatron makes its groups. world: WORLD will be destroyed too, so that every group is replaceable."""

    def new_group(*arguments: Any, **options: Any) -> Any:
        group = NEW_GROUP(*arguments, **options)
        wanted = arguments[0] if arguments else options.get("ranks")
        if not world and (options.get("backend") == "gloo" or (wanted is not None and len(wanted) == 1)):
            return group
        return Replaceable(group, (arguments, options)) if isinstance(group, dist.ProcessGroup) else group

    dist.new_group = new_group
    for name in UNWRAPPING:
        setattr(dist, name, _unwrapping(getattr(dist, name)))


def _unwrapping(function: Any) -> Any:
    @wraps(function)
    def unwrapped(*arguments: Any, **options: Any) -> Any:
        return function(*map(_inner, arguments), **{name: _inner(value) for name, value in options.items()})

    return unwrapped


def _inner(value: Any) -> Any:
    return value.group if isinstance(value, Replaceable) else value


def sleep_and_wake_up(*, world: bool = False) -> int:
    """All replaceable groups, or WORLD with all groups, are destroyed and made again in order. Returns how many."""
    if world:
        _replace_world()
    for one in Replaceable.made:
        if not world:
            dist.destroy_process_group(one.group)
        one.group = None
    for one in Replaceable.made:
        arguments, options = one.how
        one.group = NEW_GROUP(*arguments, **options)
    return len(Replaceable.made)


def _replace_world() -> None:
    """Destroy WORLD and join a temporary one; the same again when waking up. Every one has keys of its own."""
    rank, size, store = dist.get_rank(), dist.get_world_size(), _get_default_store()
    for time in ("asleep", "awake"):
        dist.barrier()
        dist.destroy_process_group()
        keys = PrefixStore(f"{time} {len(WORLDS)}", store)
        WORLDS.append(store)
        dist.init_process_group("gloo", store=keys, rank=rank, world_size=size)


WORLDS: list[Any] = []
"""stores of all worlds: the first one's server ends with it"""
