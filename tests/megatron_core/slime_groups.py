"""A stand-in for slime's process groups under `--offload-train`: destroyed while the rollout runs, then made again.

slime hands out a group that stands for another, which can be replaced, and has torch.distributed unwrap it. Groups of
gloo, and of one rank, are left as they are; here the backend is gloo throughout, so only those that ask for it are.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, ClassVar

import torch.distributed as dist

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


def install() -> None:
    """Before Megatron makes its groups."""

    def new_group(*arguments: Any, **options: Any) -> Any:
        group = NEW_GROUP(*arguments, **options)
        wanted = arguments[0] if arguments else options.get("ranks")
        if options.get("backend") == "gloo" or (wanted is not None and len(wanted) == 1):
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


def sleep_and_wake_up() -> int:
    """All replaceable groups are destroyed, and made again in their order. Returns how many."""
    for one in Replaceable.made:
        dist.destroy_process_group(one.group)
        one.group = None
    for one in Replaceable.made:
        arguments, options = one.how
        one.group = NEW_GROUP(*arguments, **options)
    return len(Replaceable.made)
