"""Cases of the runtime bench: some micro-batches and layers of a recording, as two ranks hold them.

Symbols: M micro-batches, L layers, R ranks, E experts, T tokens of a rank in a micro-batch, K experts per token.

Selection. `EVEN` takes layers evenly spread over the model, and full micro-batches of whole sequences in file order,
evenly spread over the recording. `SKEWED` takes the worst of the recording: the layer, and its sequences, that give
contiguous homes the largest imbalance; the case's name says so. Sequences longer than half a micro-batch are cut, as
context parallelism does; tokens without recorded routing are left out. Both are counted.

Inside a micro-batch sequences go to ranks as in the simulator (`file_order_schedule`), and loads are the simulator's
(`step_load`), so execution can be compared with simulation to the token.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from benchmarks.problems import evenly_spread
from equilibra.core.errors import InputError
from equilibra.core.load import Schedule, StepLoad, step_load
from equilibra.core.placement import Cluster
from equilibra.simulate.scenario import file_order_schedule
from equilibra.trace.count import micro_batches_in_file_order, sequence_loads
from equilibra.trace.routing import Recording, RoutingTrace, id_dtype

CLUSTER = Cluster(num_nodes=1, ranks_per_node=2)
FULL = 0.7
"""part of its budget that a micro-batch must fill to be chosen"""

Routing = list[list[NDArray[np.int64]]]
"""[M][R] arrays [T, L, K]: experts of every token"""


class Select(StrEnum):
    """What to take from a recording."""

    EVEN = "even"
    """layers and micro-batches evenly spread"""
    SKEWED = "skewed"
    """the layers and sequences with most imbalance"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """Routing of one step for two ranks."""

    name: str
    """recording, and what was taken of it"""
    experts_MR: Routing
    """experts of every token of every micro-batch and rank"""
    load: StepLoad
    """the same, counted as the simulator does"""
    top_k: int
    """K"""
    layers: list[int]
    """chosen MoE layers of the recording"""
    notes: list[str]
    """what was cut or left out"""

    @property
    def num_tokens(self) -> int:
        return sum(len(experts) for ranks in self.experts_MR for experts in ranks)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Widths of a case's layers, and how they run."""

    hidden: int
    """width of a token"""
    ffn: int
    """inner width of an expert"""
    spare_slots: int
    """flash copies a rank can hold"""
    path: str
    """path of flash copies"""
    repeats: int
    """timed rounds of all contenders"""
    patience_s: float = 0.0
    """seconds for waiting until other programs are quiet, and for repeating disturbed steps"""
    seed: int = 0
    """seed of weights and hidden states"""
    timeout_s: float = 300.0
    """seconds after which a silent rank is lost"""


def case_of(
    recording: Recording, name: str, *, tokens: int, num_micro_batches: int, num_layers: int, select: Select
) -> Case:
    """Micro-batches of at most `tokens` tokens on both ranks together."""
    if not 1 <= num_layers <= recording.num_layers:
        raise InputError(f"{name} has {recording.num_layers} MoE layers, {num_layers} were asked for")
    if tokens < 2 or num_micro_batches < 1:
        raise InputError(f"{num_micro_batches} micro-batches of {tokens} tokens are too few: use 1 of 2 or more")
    CLUSTER.experts_per_rank(recording.num_experts)
    trace, notes = _whole(recording, tokens)
    choose = _even if select is Select.EVEN else _skewed
    sequences, first_of_micro_batch, layers = choose(trace, tokens, num_micro_batches, num_layers)
    part = _part(trace, sequences, layers)
    schedule = _schedule(part.length_of_sequence, first_of_micro_batch)
    load = step_load(sequence_loads(part), schedule, CLUSTER)
    what = "layers and micro-batches evenly spread" if select is Select.EVEN else "its most skewed layers and sequences"
    return Case(
        name=f"{name}, {what}", experts_MR=_routing(part, schedule), load=load, top_k=trace.top_k, layers=layers,
        notes=notes,
    )  # fmt: skip


def _whole(recording: Recording, tokens: int) -> tuple[RoutingTrace, list[str]]:
    """The recording in memory, without tokens that have no routing, in pieces that fit a rank."""
    ids = np.empty(recording.shape, id_dtype(recording.num_experts))
    for piece in recording.pieces():
        ids[piece.first_token : piece.first_token + len(piece.ids)] = piece.ids
    keep = np.ones(len(ids), np.bool_) if recording.recorded is None else recording.recorded
    length = np.add.reduceat(keep.astype(np.int64), recording.offsets[:-1])
    if not length.any():
        raise InputError("the recording has no token with recorded routing")
    most = tokens // 2
    cut = np.concatenate([np.diff(np.append(np.arange(0, n, most), n)) for n in length.tolist() if n])
    trace = RoutingTrace(
        ids=ids[keep], offsets=np.concatenate([[0], np.cumsum(cut)]).astype(np.int64), num_experts=recording.num_experts
    )
    notes = []
    if recording.tokens_without_routing:
        notes.append(f"{recording.tokens_without_routing} tokens without recorded routing left out")
    if (length > most).any():
        notes.append(f"{int((length > most).sum())} sequences of more than {most} tokens cut into pieces")
    return trace, notes


def _even(
    trace: RoutingTrace, tokens: int, num_micro_batches: int, num_layers: int
) -> tuple[NDArray[np.int64], list[int], list[int]]:
    """Sequences, the first of each micro-batch among them, and layers."""
    bounds = micro_batches_in_file_order(trace.length_of_sequence, tokens)
    full = np.flatnonzero(np.diff(trace.offsets[bounds]) >= FULL * tokens)
    if full.size < num_micro_batches:
        raise InputError(
            f"the recording has {full.size} full micro-batches of {tokens} tokens, {num_micro_batches} were asked for: "
            "use fewer or smaller ones"
        )
    chosen = full[evenly_spread(full.size, num_micro_batches)]
    sequences = [np.arange(bounds[m], bounds[m + 1]) for m in chosen]
    first = np.cumsum([0] + [part.size for part in sequences])[:-1]
    return np.concatenate(sequences), first.tolist(), evenly_spread(trace.num_layers, num_layers).tolist()


def _skewed(
    trace: RoutingTrace, tokens: int, num_micro_batches: int, num_layers: int
) -> tuple[NDArray[np.int64], list[int], list[int]]:
    """The same for the most skewed layer and sequences: their tokens go most to one half of the experts."""
    load_SLE = sequence_loads(trace).tokens_SLE
    half_SLR = load_SLE.reshape(*load_SLE.shape[:2], CLUSTER.num_ranks, -1).sum(axis=3, dtype=np.int64)
    lengths, wanted = trace.length_of_sequence, min(num_micro_batches * tokens, trace.num_tokens)
    best, chosen = 0.0, np.zeros(0, np.int64)
    for layer in range(trace.num_layers):
        for rank in range(CLUSTER.num_ranks):
            share_S = half_SLR[:, layer, rank] / half_SLR[:, layer].sum(axis=1)
            order = np.argsort(-share_S, kind="stable")
            taken = order[np.cumsum(lengths[order]) <= wanted]
            loads_R = half_SLR[taken, layer].sum(axis=0)
            if taken.size >= num_micro_batches and loads_R.max() / loads_R.mean() > best:
                best, chosen = loads_R.max() / loads_R.mean(), np.sort(taken)
    if chosen.size == 0:
        raise InputError(f"the recording is too short for {num_micro_batches} micro-batches of {tokens} tokens")
    of_layer_LR = half_SLR[chosen].sum(axis=0)
    layers = np.sort(np.argsort(-of_layer_LR.max(axis=1) / of_layer_LR.mean(axis=1), kind="stable")[:num_layers])
    middle = np.cumsum(lengths[chosen]) - lengths[chosen] / 2
    micro_batch = np.minimum(middle * num_micro_batches // lengths[chosen].sum(), num_micro_batches - 1)
    return chosen, np.searchsorted(micro_batch, np.arange(num_micro_batches)).tolist(), layers.tolist()


def _part(trace: RoutingTrace, sequences: NDArray[np.int64], layers: list[int]) -> RoutingTrace:
    """Some sequences and layers as a recording."""
    lengths = trace.length_of_sequence[sequences]
    tokens = np.concatenate([np.arange(trace.offsets[s], trace.offsets[s + 1]) for s in sequences])
    return RoutingTrace(
        ids=np.ascontiguousarray(trace.ids[tokens][:, layers]), num_experts=trace.num_experts,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )  # fmt: skip


def _schedule(lengths: NDArray[np.int64], first_of_micro_batch: list[int]) -> Schedule:
    """The simulator's schedule of every micro-batch."""
    ranks, micro_batches = [], []
    for m, (first, last) in enumerate(
        zip(first_of_micro_batch, [*first_of_micro_batch[1:], lengths.size], strict=True)
    ):
        own = lengths[first:last]
        one = file_order_schedule(own, CLUSTER, tokens_per_microbatch=int(own.sum()), ranks_per_sequence=1)
        ranks.append(one.rank_of_sequence)
        micro_batches.append(np.full(own.size, m, np.int32))
    return Schedule(
        micro_batch_of_sequence=np.concatenate(micro_batches), rank_of_sequence=np.concatenate(ranks),
        num_micro_batches=len(first_of_micro_batch),
    )  # fmt: skip


def _routing(part: RoutingTrace, schedule: Schedule) -> Routing:
    """Experts of the tokens of every micro-batch and rank, sequences in order."""

    def tokens_of(m: int, rank: int) -> NDArray[np.int64]:
        mine = (schedule.micro_batch_of_sequence == m) & (schedule.rank_of_sequence == rank)
        experts_TLK: NDArray[np.int64] = part.ids[np.repeat(mine, part.length_of_sequence)].astype(np.int64)
        return experts_TLK

    return [[tokens_of(m, rank) for rank in range(CLUSTER.num_ranks)] for m in range(schedule.num_micro_batches)]
