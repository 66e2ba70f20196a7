"""Moving homes under Megatron: weights, and the DistributedOptimizer's masters and moments.

The optimizer keeps every parameter's state in flat pieces over the expert-data-parallel ranks, cut by where the
parameter lies in a buffer, so the pieces of two slots are cut at different places. For every expert that moves, the
state is put together over these ranks, sent to the new home, and cut there. One matrix of a layer's
leaving and arriving experts, with its state, is in memory at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equilibra.core.errors import InputError
from equilibra.execute.group import Channel, ExpertGroup, lost_rank_is_an_error
from equilibra.integrations.megatron.visits import MegatronVisits
from equilibra.integrations.planned.slots import HomeMove

__all__ = ["StateOfParameters", "move_layer"]


class StateOfParameters:
    """Where the optimizers keep the state of each parameter."""

    def __init__(self, optimizer: Any) -> None:  # noqa: ANN401 - Megatron's, chained or not
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        self.parts = [part for part in parts if not getattr(part, "is_stub_optimizer", False)]
        for part in self.parts:
            if not hasattr(part, "gbuf_ranges"):
                raise InputError(
                    f"cannot move homes under {type(part).__name__}: it must be Megatron's DistributedOptimizer "
                    "(use_distributed_optimizer=True); without an optimizer homes do not move"
                )
            if part.config.use_precision_aware_optimizer:
                raise InputError(
                    "cannot move homes with use_precision_aware_optimizer=True: its state is scaled, and would be "
                    "moved as copies; without an optimizer homes do not move"
                )

    def pieces(self, parameter: nn.Parameter) -> tuple[slice, dict[str, Tensor]] | None:
        """What this rank keeps of a parameter: which numbers, and by name the flat tensors; None: nothing."""
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
        """Names of the state, as the ranks that hold any of it say."""
        held = self.pieces(parameter)
        mine = sorted(held[1]) if held else []
        if Channel.REPLICAS not in group.channels:
            return mine
        every: list[Any] = [None] * group.num_groups
        with lost_rank_is_an_error("gathering names of optimizer state"):
            dist.all_gather_object(every, mine, group=group.channels[Channel.REPLICAS])
        return sorted({name for names in every for name in names})


@torch.no_grad()
def move_layer(visits: MegatronVisits, moves: list[HomeMove], state: StateOfParameters) -> int:
    """Collective: bring experts of a layer into their new slots. Returns the bytes that this rank sent."""
    group, sent_bytes = visits.group, 0
    if not moves:
        return 0
    leaving = [move for move in moves if move.source == group.rank]
    arriving = [move for move in moves if move.target == group.rank]
    for part in visits.parts[0]:
        names = state.names(visits.parts[0][part], group)
        packed = [_whole(visits.parts[move.source_slot][part], names, state, group) for move in leaving]
        like, width = visits.parts[0][part], visits.parts[0][part].numel() * (1 + len(names))
        sent = torch.cat(packed) if packed else torch.empty(0, dtype=torch.float32, device=like.device)
        received = torch.empty(len(arriving) * width, dtype=torch.float32, device=like.device)
        sizes = [[width * sum(getattr(m, end) == rank for m in some) for rank in range(group.num_ranks)]
                 for end, some in (("target", leaving), ("source", arriving))]  # fmt: skip
        group.all_to_all(
            Channel.STANDING, sent, sizes[0], received, sizes[1], what=f"moving homes of MoE layer {visits.layer}"
        ).wait()
        for move, whole in zip(arriving, received.view(-1, width), strict=True):
            _write(visits.parts[move.target_slot][part], whole, names, state)
        sent_bytes += sent.nbytes
    return sent_bytes


def _whole(parameter: nn.Parameter, names: list[str], state: StateOfParameters, group: ExpertGroup) -> Tensor:
    """A parameter and all its state, in float32, one after another: summed over ranks that hold pieces and zeros."""
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
    """The weights, and this rank's pieces of the state."""
    rows = whole.view(1 + len(names), -1)
    held = state.pieces(parameter)
    if held is not None:
        for row, name in enumerate(names, 1):
            held[1][name].copy_(rows[row, held[0]])
    parameter.detach().view(-1).copy_(rows[0])
