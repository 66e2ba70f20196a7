"""Homes that move under Megatron: weights with the DistributedOptimizer's masters and moments, and checkpoints.

The optimizer shards each parameter's state over the expert-data-parallel ranks by its position in a buffer, so two
slots are cut at different places. The state of an expert that moves is gathered over these ranks, sent to the new home
and sharded again there, one matrix of a layer's experts at a time.

Megatron numbers experts in a distributed checkpoint by rank and position. `logical` puts logical numbers into what
`sharded_state_dict` describes; the optimizer follows the model's descriptions. Formats that store the optimizer's
buffers as they lie in memory do not know experts, and are refused once homes have moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equilibra.core.errors import InputError
from equilibra.execute.group import Channel, ExpertGroup, lost_rank_is_an_error
from equilibra.integrations.executor.balancer import gather_objects
from equilibra.integrations.megatron.copies import slot_and_part
from equilibra.integrations.megatron.visits import MegatronVisits
from equilibra.integrations.planned import HomeMove

LOGICAL_FORMATS = ("fully_reshardable", "fully_sharded_model_space")
FORMAT_KEY = "distrib_optim_sharding_type"
KEPT_ELSEWHERE = {
    "use_precision_aware_optimizer": "which scales its state",
    "optimizer_cpu_offload": "which steps on copies of its own",
}
"""options of Megatron's optimizer that put its state elsewhere"""


def logical(
    described: dict[str, Any], prefix: str, axis: int, visits: MegatronVisits, metadata: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """A layer's sharded state dict with logical expert numbers. axis: the experts' axis in global offsets."""
    if not visits.moved:
        return described
    _check_format(metadata.get(FORMAT_KEY))
    if metadata.get("singleton_local_shards"):
        raise InputError("cannot save moved homes with singleton_local_shards: keys would name slots; switch it off")
    result = {}
    for name, value in described.items():
        result[name] = value
        if name.startswith(prefix):
            with suppress(InputError):  # its experts share it
                slot, _ = slot_and_part(name.removeprefix(prefix))
                result[name] = _numbered(value, axis, visits.homes.expert_of_home[slot])
    return result


def _numbered(value: Any, axis: int, expert: int) -> Any:  # noqa: ANN401 - Megatron's descriptions
    """A tensor, object or factory description with another expert's number."""
    if hasattr(value, "build_fn"):
        return replace(value, build_fn=partial(_build_numbered, value.build_fn, axis, expert))
    offset = value.global_offset
    return replace(value, global_offset=(*offset[:axis], expert, *offset[axis + 1 :]))


def _build_numbered(build: Callable[..., Any], axis: int, expert: int, *arguments: Any) -> Any:  # noqa: ANN401
    built = build(*arguments)
    if isinstance(built, dict):
        return {name: _numbered(one, axis, expert) for name, one in built.items()}
    return [_numbered(one, axis, expert) for one in built]


def _check_format(name: str | None) -> None:
    if name is not None and name not in LOGICAL_FORMATS:
        raise InputError(
            f"cannot use {FORMAT_KEY}={name!r} while homes are moved: it stores the optimizer's buffers as they lie in "
            f"memory, and would load into other experts; use {LOGICAL_FORMATS[0]!r}, or restore_homes() before"
        )


def guard_optimizer(optimizer: Any, moved: Callable[[], bool]) -> None:  # noqa: ANN401 - Megatron's
    """Make a DistributedOptimizer refuse formats without expert numbers while `moved()`."""
    describe = optimizer.sharded_state_dict

    @wraps(describe)
    def guarded(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        name = options.get("sharding_type") or (options.get("metadata") or {}).get(FORMAT_KEY)
        if moved():
            _check_format(name)
        return describe(*arguments, **options)

    optimizer.sharded_state_dict = guarded


class ExpertParameter(NamedTuple):
    """One parameter of one expert at home on this rank."""

    layer: int
    """number among the balanced layers of this pipeline stage"""
    expert: int
    """logical number"""
    part: str
    """linear_fc1.weight, linear_fc2.weight"""
    parameter: nn.Parameter


def expert_parameters(model: nn.Module) -> Iterator[ExpertParameter]:
    """The parameters of this rank's home experts, by layer, slot and part; every rank has equally many."""
    for module in model.modules():
        visits = getattr(module, "visits", None)
        if isinstance(visits, MegatronVisits):
            for expert, parts in zip(visits.homes.expert_of_home, visits.homes.parts, strict=True):
                for part, parameter in parts.items():
                    yield ExpertParameter(visits.layer, expert, part, parameter)


class StateOfParameters:
    """Finds the optimizer state of a parameter."""

    def __init__(self, optimizer: Any) -> None:  # noqa: ANN401 - Megatron's, chained or not
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        self.parts = [part for part in parts if not getattr(part, "is_stub_optimizer", False)]
        for part in self.parts:
            if not hasattr(part, "gbuf_ranges"):
                raise InputError(
                    f"cannot move homes under {type(part).__name__}: use Megatron's DistributedOptimizer "
                    "(use_distributed_optimizer=True), or set max_moves_per_layer=0, so that homes stay"
                )
            for name, why in KEPT_ELSEWHERE.items():
                if getattr(part.config, name, False):
                    raise InputError(
                        f"cannot move homes with {name}=True, {why}: set it to False, or set max_moves_per_layer=0, so "
                        "that homes stay"
                    )

    def pieces(self, parameter: nn.Parameter) -> tuple[slice, dict[str, Tensor]] | None:
        """Range and flat tensors, by name, of this rank's shard of a parameter's state; None if it has none."""
        for part in self.parts:
            if parameter not in part.model_param_gbuf_map:
                continue
            buffer, dtype, bucket = part.model_param_gbuf_map[parameter]
            held = part.gbuf_ranges[buffer][dtype][bucket]["param_map"].get(parameter)
            if held is None:
                return None
            owned, tensors = held["param"], part._get_main_param_and_optimizer_states(parameter)  # noqa: SLF001
            flat = {name: t for name, t in sorted(tensors.items()) if isinstance(t, Tensor) and t.ndim}
            return slice(owned.start, owned.end), {name: t.detach().view(-1) for name, t in flat.items()}
        return None

    def names(self, parameter: nn.Parameter, group: ExpertGroup) -> list[str]:
        """Names of a parameter's state, gathered from the ranks that hold shards of it."""
        held = self.pieces(parameter)
        mine = sorted(held[1]) if held else []
        if Channel.REPLICAS not in group.channels:
            return mine
        with lost_rank_is_an_error("gathering names of optimizer state"):
            every = gather_objects(mine, group.channels[Channel.REPLICAS])
        return sorted({name for names in every for name in names})


@torch.no_grad()
def move_layer(visits: MegatronVisits, moves: list[HomeMove], state: StateOfParameters) -> None:
    """Collective: move experts of a layer, with their optimizer state, into their new slots."""
    group = visits.group
    for part, like in visits.homes.parts[0].items() if moves else ():
        names = state.names(like, group)
        pack = partial(_whole, names=names, state=state, group=group)
        width = torch.empty(0, (1 + len(names)) * like.numel(), dtype=torch.float32, device=like.device)
        for parameter, whole in exchange(visits, moves, part, pack, width):
            _write(parameter, whole, names, state)


@torch.no_grad()
def weights_in(visits: MegatronVisits, moves: list[HomeMove]) -> list[tuple[nn.Parameter, Tensor]]:
    """Collective: the parameters of the slots that experts would move into, each with the weights that arrive there."""
    arrived = [
        exchange(visits, moves, part, lambda parameter: parameter.detach().view(-1), like.new_empty(0, like.numel()))
        for part, like in (visits.homes.parts[0].items() if moves else ())
    ]
    return [(parameter, whole.view_as(parameter)) for of_part in arrived for parameter, whole in of_part]


def exchange(
    visits: MegatronVisits, moves: list[HomeMove], part: str, pack: Callable[[nn.Parameter], Tensor], like: Tensor
) -> list[tuple[nn.Parameter, Tensor]]:  # fmt: skip
    """Collective: send what `pack` makes of one part of leaving experts. like: [0, width] of what it makes."""
    group, parts = visits.group, visits.homes.parts
    leaving = [move for move in moves if move.source == group.rank]
    arriving = [move for move in moves if move.target == group.rank]
    sent = torch.cat([like.view(-1), *(pack(parts[move.source_slot][part]) for move in leaving)])
    received = like.new_empty(len(arriving), like.shape[1])
    sizes = [[like.shape[1] * sum(getattr(m, end) == rank for m in some) for rank in range(group.num_ranks)]
             for end, some in (("target", leaving), ("source", arriving))]  # fmt: skip
    group.all_to_all(
        Channel.STANDING, sent, sizes[0], received.view(-1), sizes[1],
        what=f"moving homes of MoE layer {visits.layer}",
    ).wait()  # fmt: skip
    return [(parts[move.target_slot][part], row) for move, row in zip(arriving, received, strict=True)]


def _whole(parameter: nn.Parameter, names: list[str], state: StateOfParameters, group: ExpertGroup) -> Tensor:
    """A parameter followed by its state, flat in float32; shards are gathered by a sum over zero-filled buffers."""
    count = parameter.numel()
    whole = torch.zeros(1 + len(names), count, dtype=torch.float32, device=parameter.device)
    held = state.pieces(parameter)
    if held is not None:
        for row, name in enumerate(names, 1):
            whole[row, held[0]] = held[1][name].float()
    group.sum(Channel.REPLICAS, whole, what="gathering optimizer state").wait()
    whole[0] = parameter.detach().view(-1).float()
    return whole.view(-1)


def _write(parameter: nn.Parameter, whole: Tensor, names: list[str], state: StateOfParameters) -> None:
    """Write a parameter's weights and this rank's shard of its state."""
    rows = whole.view(1 + len(names), -1)
    held = state.pieces(parameter)
    if held is not None:
        for row, name in enumerate(names, 1):
            held[1][name].copy_(rows[row, held[0]])
    parameter.detach().view(-1).copy_(rows[0])
