"""slime's schedule of a rollout, repacked: `build_dp_schedule` takes and returns what slime's own function does.

Symbols: S samples, M micro-batches of an optimizer step, R data-parallel ranks, L MoE layers, E experts.

slime fills micro-batches first-fit and balances ranks over a whole step. But ranks exchange tokens in every MoE layer,
so they wait for each other in every micro-batch. slime's own function still decides which samples belong to which
optimizer step and which are dropped. Then `equilibra.plan.pack` assigns the samples of each step to micro-batches and
ranks anew, and spreads experts where routing is known. slime's packing of a step is kept if ranks wait less with it,
if it has fewer micro-batches, or if a sample exceeds the token budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.core.load import Schedule
from equilibra.integrations.packing import Routes, pack_sequences, routes_of
from equilibra.integrations.planned import cluster_of
from equilibra.integrations.slime.hooks import setting_of
from equilibra.plan.pack import cell_cost

__all__ = ["DpSchedule", "Routes", "build_dp_schedule", "repacked"]


class DpSchedule(NamedTuple):
    """The result of slime's `build_dp_schedule`."""

    partitions: list[list[int]]
    """[R] samples of every rank, in order of micro-batches"""
    micro_batch_indices: list[list[list[int]]]
    """[R] for every micro-batch of all steps, indices into the rank's partition"""
    num_microbatches: list[int]
    """micro-batches of every optimizer step, the same on all ranks"""
    global_batch_sizes: list[int]
    """samples of every optimizer step"""


def build_dp_schedule(
    args: Any,  # noqa: ANN401 - slime's arguments
    train_parallel_config: dict[str, int],
    total_lengths: list[int],
    *,
    routed_experts: Sequence[NDArray[Any] | None] | None = None,
    **options: Any,  # noqa: ANN401 - differ between versions
) -> tuple[Any, ...]:
    """Replaces slime's function of this name. routed_experts: `rollout_routed_experts` of the samples."""
    own = import_module("slime.utils.dp_schedule").build_dp_schedule(
        args, train_parallel_config, total_lengths, **options
    )
    if not args.use_dynamic_batch_size or options.get("sample_is_multimodal") is not None:
        return own  # type: ignore[no-any-return]
    group = train_parallel_config["microbatch_group_size_per_vp_stage"] if train_parallel_config["vpp_size"] > 1 else 1
    return repacked(
        DpSchedule(*own), total_lengths, tokens_per_rank=args.max_tokens_per_gpu * train_parallel_config["cp_size"],
        multiple=group, routes=_routes(args, routed_experts),
    )  # fmt: skip


def repacked(
    own: DpSchedule, total_lengths: Sequence[int], *, tokens_per_rank: int, multiple: int = 1,
    routes: Routes | None = None,
) -> DpSchedule:  # fmt: skip
    """The schedule with every step repacked. multiple: a step's number of micro-batches must be a multiple of it."""
    num_ranks, lengths = len(own.partitions), np.asarray(total_lengths, np.int64)
    result = DpSchedule([[] for _ in own.partitions], [[] for _ in own.partitions], [], list(own.global_batch_sizes))
    first = 0
    for num in own.num_microbatches:
        cells = [
            [[own.partitions[rank][at] for at in own.micro_batch_indices[rank][first + m]] for rank in range(num_ranks)]
            for m in range(num)
        ]
        first += num
        _add(result, _better(cells, lengths, tokens_per_rank, multiple, routes))
    return result


def _better(
    own: list[list[list[int]]], lengths: NDArray[np.int64], budget: int, multiple: int, routes: Routes | None
) -> list[list[list[int]]]:
    """[M][R] samples of a step, repacked if ranks then wait less."""
    num_ranks, samples = len(own[0]), np.array(sorted(s for cells in own for cell in cells for s in cell))
    of_step = lengths[samples]
    if of_step.max() > budget:
        return own
    known = None if routes is None else Routes(routes.tokens_SLE[samples], routes.home)
    packed = pack_sequences(of_step, num_ranks=num_ranks, tokens_per_rank=budget, multiple=multiple, routes=known)
    found = [[samples[cell].tolist() for cell in cells] for cells in packed]
    if len(found) > len(own) or not all(cell for cells in found for cell in cells):
        return own
    return found if _waiting(found, lengths) < _waiting(own, lengths) else own


def _waiting(cells: list[list[list[int]]], lengths: NDArray[np.int64]) -> int:
    """Cost of the slowest rank, summed over micro-batches."""
    places = [(s, m, rank) for m, of_ranks in enumerate(cells) for rank, cell in enumerate(of_ranks) for s in cell]
    sample, micro_batch, rank = (np.array(column, np.int32) for column in zip(*places, strict=True))
    schedule = Schedule(micro_batch_of_sequence=micro_batch, rank_of_sequence=rank, num_micro_batches=len(cells))
    return int(cell_cost(schedule, lengths[sample], len(cells[0])).max(axis=1).sum())


def _add(result: DpSchedule, cells: list[list[list[int]]]) -> None:
    result.num_microbatches.append(len(cells))
    for of_ranks in cells:
        for partition, indices, cell in zip(result.partitions, result.micro_batch_indices, of_ranks, strict=True):
            indices.append(list(range(len(partition), len(partition) + len(cell))))
            partition.extend(cell)


def _routes(args: Any, routed_experts: Sequence[NDArray[Any] | None] | None) -> Routes | None:  # noqa: ANN401
    """Expert load of the samples; None unless all have routing."""
    if not routed_experts or any(routed is None for routed in routed_experts):
        return None
    ranks, experts = args.expert_model_parallel_size, args.num_experts
    every = [np.asarray(routed) for routed in routed_experts]
    frequency = args.moe_layer_freq
    columns = [
        layer for layer in range(every[0].shape[1])
        if (layer % frequency == 0 if isinstance(frequency, int) else frequency[layer])
    ]  # fmt: skip
    if min(int(routed.min(initial=0)) for routed in every) < 0 or max(int(r.max(initial=0)) for r in every) >= experts:
        raise InputError(f"routing of samples must name experts 0 to {experts - 1} of --num-experts {experts}")
    cluster = cluster_of(ranks, setting_of(args).ranks_per_node)
    return routes_of([routed[:, columns] for routed in every], experts, cluster)
