"""From routing to the problems of a step: micro-batches of a given size, in the order of the recording.

A micro-batch takes whole sequences in file order up to the group's token budget; they go longest first to the cell with
the least work, as in frameworks that balance lengths. A cell is a node whose ranks share every sequence equally
(sequence or context parallelism), or several nodes for longer sequences. A planner that packs may move sequences, but
gets no more micro-batches and no larger cell than the largest here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import PlanLimits
from equilibra.core.errors import BudgetError, InputError
from equilibra.core.load import Schedule, SequenceLoad
from equilibra.core.model import MoEModel
from equilibra.core.placement import Cluster
from equilibra.cost.rates import Rates
from equilibra.plan.pack import DENSE_COST
from equilibra.plan.planner import StepProblem
from equilibra.trace.count import micro_batches_in_file_order, sequence_loads
from equilibra.trace.routing import Recording


def check_fits(recording: Recording, model: MoEModel, name: str) -> None:
    """Raise InputError unless the recording has the model's layers, experts and top-k."""
    found = (recording.num_layers, recording.num_experts, recording.top_k)
    asked = (model.num_layers, model.num_experts, model.top_k)
    if found != asked:
        shapes = [f"{layers} MoE layers, {experts} experts, top-{k}" for layers, experts, k in (found, asked)]
        raise InputError(
            f"{name} does not fit {model.name}: the recording has {shapes[0]}, the model {shapes[1]}; "
            "name the model it was recorded from"
        )


def joined(parts: Sequence[Recording]) -> SequenceLoad:
    """Sequence loads of several recordings of one step, concatenated."""
    loads = [sequence_loads(part) for part in parts]
    if len(loads) == 1:
        return loads[0]
    return SequenceLoad(
        tokens_SLE=np.concatenate([load.tokens_SLE for load in loads]),
        length_of_sequence=np.concatenate([load.length_of_sequence for load in loads]),
    )


def ranks_for_longest(lengths: NDArray[np.int64], cluster: Cluster, tokens_per_microbatch: int) -> int:
    """Ranks of a node, or of as few neighbouring nodes as can hold the longest sequence."""
    longest, num_ranks = int(lengths.max()), cluster.num_ranks
    for width in range(cluster.ranks_per_node, num_ranks + 1, cluster.ranks_per_node):
        if num_ranks % width == 0 and longest * num_ranks <= width * tokens_per_microbatch:
            return width
    raise BudgetError(
        f"sequence {int(lengths.argmax())} has {longest} tokens, a micro-batch only {tokens_per_microbatch}: "
        f"allow at least {longest} tokens per micro-batch"
    )


def file_order_schedule(
    lengths: NDArray[np.int64],
    cluster: Cluster,
    *,
    tokens_per_microbatch: int,
    ranks_per_sequence: int,
    token_cost: int = DENSE_COST,
) -> Schedule:
    """Micro-batches in file order; inside one, longest first to the cell with the least work."""
    if cluster.num_ranks % ranks_per_sequence:
        raise InputError(f"{ranks_per_sequence} ranks per sequence do not divide {cluster.num_ranks} ranks")
    bounds = micro_batches_in_file_order(lengths, tokens_per_microbatch)
    cells, cost = cluster.num_ranks // ranks_per_sequence, token_cost * lengths + lengths**2
    cell_of_sequence = np.zeros(lengths.size, np.int64)
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        spent = np.zeros(cells, np.int64)
        for s in first + np.argsort(-lengths[first:last], kind="stable"):
            cell_of_sequence[s] = cell = int(spent.argmin())
            spent[cell] += cost[s]
    return Schedule(
        micro_batch_of_sequence=np.repeat(np.arange(bounds.size - 1), np.diff(bounds)).astype(np.int32),
        rank_of_sequence=(cell_of_sequence * ranks_per_sequence).astype(np.int32),
        num_micro_batches=int(bounds.size - 1),
        ranks_per_sequence=ranks_per_sequence,
    )


def step_problems(
    sequences: SequenceLoad,
    cluster: Cluster,
    rates: Rates,
    *,
    tokens_per_microbatch: int,
    ranks_per_sequence: int | None = None,
    history_LE: NDArray[np.int64] | None = None,
    limits: PlanLimits | None = None,
    data_parallel: int = 1,
    optimizer_steps: int = 1,
) -> list[StepProblem]:
    """One problem per data-parallel group; without history, the first half of the sequences is used."""
    fitting = ranks_for_longest(sequences.length_of_sequence, cluster, tokens_per_microbatch)  # or an error
    width = ranks_per_sequence or fitting
    if history_LE is None:
        half = sequences.tokens_SLE[: max(sequences.num_sequences // 2, 1)]
        history_LE = half.sum(axis=0, dtype=np.int64)
    problems = []
    for part in _groups(sequences, data_parallel):
        lengths = part.length_of_sequence
        schedule = file_order_schedule(
            lengths, cluster, tokens_per_microbatch=tokens_per_microbatch, ranks_per_sequence=width,
            token_cost=rates.token_cost,
        )  # fmt: skip
        if schedule.num_micro_batches < optimizer_steps:
            raise InputError(
                f"{schedule.num_micro_batches} micro-batches of {tokens_per_microbatch} tokens cannot make "
                f"{optimizer_steps} optimizer steps: ask for fewer steps or smaller micro-batches"
            )
        cells = np.zeros((schedule.num_micro_batches, cluster.num_ranks), np.int64)
        np.add.at(cells, (schedule.micro_batch_of_sequence, schedule.rank_of_sequence), lengths)
        problems.append(StepProblem(
            cluster=cluster, sequences=part, schedule=schedule,
            tokens_per_rank=max(-(-int(cells.max()) // width), tokens_per_microbatch // cluster.num_ranks, 1),
            least_micro_batches=max(-(-int(lengths.sum()) // tokens_per_microbatch), optimizer_steps),
            history_LE=history_LE, rates=rates, **(limits or PlanLimits()).limits(),
        ))  # fmt: skip
    return problems


def _groups(sequences: SequenceLoad, count: int) -> list[SequenceLoad]:
    """Runs of neighbouring sequences with about the same number of tokens."""
    if count == 1:
        return [sequences]
    if sequences.num_sequences < count:
        raise InputError(f"{sequences.num_sequences} sequences cannot fill {count} data-parallel groups: use fewer")
    lengths = sequences.length_of_sequence
    middle = np.cumsum(lengths) - lengths / 2
    group = np.minimum(middle * count // lengths.sum(), count - 1).astype(np.int64)
    group = np.maximum(group, np.arange(lengths.size) - lengths.size + count)  # at least one sequence each
    group = np.minimum(group, np.arange(lengths.size))
    return [
        SequenceLoad(
            tokens_SLE=np.ascontiguousarray(sequences.tokens_SLE[group == g]), length_of_sequence=lengths[group == g]
        )
        for g in range(count)
    ]
