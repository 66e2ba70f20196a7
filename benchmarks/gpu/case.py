"""Cases of the GPU bench: a recording's routing, a model's widths, and a number of ranks.

Symbols: S sequences, M micro-batches, L layers, E experts, R ranks.

The recording gives the tokens of every expert, and with them the number of experts and top-k; the model gives hidden
and FFN width. A case takes layers evenly spread over the recording, and full micro-batches of whole sequences in file
order, evenly spread over it. If the recording is too short, its sequences are repeated from the start, and the case
says so. Inside a micro-batch sequences go to ranks as in the simulator (`file_order_schedule`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.problems import evenly_spread, static_imbalance
from equilibra.core.errors import InputError
from equilibra.core.load import Schedule, SequenceLoad, StepLoad, step_load
from equilibra.core.model import MoEModel
from equilibra.core.placement import Cluster
from equilibra.simulate.scenario import file_order_schedule, joined, ranks_for_longest
from equilibra.trace.count import micro_batches_in_file_order
from equilibra.trace.routing import Recording

RECORDINGS = {"gpt-oss-20b": ("gpt-oss-20b",), "dsv2-lite": ("dsv2-lite-law", "dsv2-lite-intent")}
"""default recordings, each from one file or several joined ones"""
MODELS = ("gpt-oss-20b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")
"""default models, whose hidden and FFN widths are taken"""
RANKS = (8, 16, 32)
PATHS = ("device", "host")
"""where copies come from: another place of the device's memory, or pinned memory of the host"""
MOST = 1 << 20
"""limit of every number; more is a typing error"""
FULL = 0.9
"""share of its budget that a chosen micro-batch must fill"""
SECONDS_PER_RANK, SECONDS_PER_FLOP = 3.6e-3, 2.1e-15
"""estimated time to queue a rank's kernels, and to run them and rest; within a quarter of most cases on an H200
(benchmarks/results/gpu.json)"""
MOST_SEQUENCES = 1 << 20
"""most sequences of a step, with repeats"""


@dataclass(frozen=True, kw_only=True)
class GpuSetting:
    """Settings shared by all cases."""

    tokens_per_rank: int = 4096
    """tokens per micro-batch and rank"""
    layers: int = 2
    """MoE layers, evenly spread over the model; the next of them is the one whose copies move"""
    micro_batches: int = 2
    """micro-batches of the planned step, evenly spread over the recording"""
    repeats: int = 5
    """timed rounds of all contenders, after one untimed"""
    spare_slots: int = 2
    """flash copies a rank can hold"""
    standing_slots: int = 2
    """standing copies a node can hold per layer"""
    ranks_per_node: int = 8
    """ranks that share fast links; fewer ranks are one node"""
    paths: tuple[str, ...] = PATHS
    """paths of flash copies; figures are those of the first"""
    network: bool = False
    """whether plans count traffic across nodes, as on a cluster; nothing here runs it"""
    seconds: int | None = None
    """time for all cases together; each stops after a layer and micro-batch when its share is used up"""
    seed: int = 0
    """seed of weights and rows"""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("seed", "spare_slots", "standing_slots") else 1
            if field.name not in ("paths", "network") and value is not None and not least <= value <= MOST:
                raise InputError(f"{field.name} must be from {least} to {MOST}, not {value}")
        if not self.paths or set(self.paths) - set(PATHS):
            raise InputError(f"paths must be some of {', '.join(PATHS)}, not {', '.join(self.paths) or 'none'}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing:
    """One or several recordings of one model, counted."""

    name: str
    sequences: SequenceLoad
    """loads [S, L, E]"""
    top_k: int
    """experts of a token"""
    without_routing: int
    """tokens without recorded routing; they are not computed"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A recording, a model's widths and a number of ranks: one row of the table."""

    recording: str
    """name of the recording"""
    model: MoEModel
    """hidden and FFN width of the model that was named, experts and layers of the recording"""
    cluster: Cluster
    """the ranks"""
    load: StepLoad
    """[M, L, E, R] of the chosen micro-batches and layers"""
    layers: list[int]
    """chosen MoE layers of the recording"""
    notes: list[str]
    """what was repeated or left out"""

    @property
    def name(self) -> str:
        return f"{self.recording}, {self.model.name}, EP {self.cluster.num_ranks}"

    @property
    def round_s(self) -> float:
        """Approximate seconds of a round of one contender on an H200; cases share the available time by it."""
        ranks = len(self.layers) * self.load.num_micro_batches * self.cluster.num_ranks
        flop = 6.0 * self.model.expert_parameters * float(self.load.tokens_MLER.sum(dtype=np.int64))
        return SECONDS_PER_RANK * ranks + SECONDS_PER_FLOP * flop

    def static_imbalance(self) -> dict[str, float]:
        """Imbalance of contiguous homes: by layer and micro-batch, and of the summed rows of slowest ranks."""
        return static_imbalance(self.load, self.cluster.num_ranks)


def routing_of(name: str, parts: list[Recording]) -> Routing:
    """Recordings of one model, one after another."""
    shapes = {(part.num_layers, part.num_experts, part.top_k) for part in parts}
    if len(shapes) != 1:
        raise InputError(f"{name}: recordings of different models cannot be joined: {sorted(shapes)}")
    return Routing(
        name=name, sequences=joined(parts), top_k=parts[0].top_k,
        without_routing=sum(part.tokens_without_routing for part in parts),
    )  # fmt: skip


def cases_for(
    routings: list[Routing], models: list[MoEModel], ranks: list[int], setting: GpuSetting
) -> tuple[list[Case], list[dict[str, str]]]:
    """Every recording with every model and number of ranks; also those left out, with the reason."""
    cases, left_out = [], []
    for routing in routings:
        for model in models:
            for num_ranks in ranks:
                try:
                    cases.append(case_of(routing, model, num_ranks, setting))
                except InputError as error:
                    name = f"{routing.name}, {model.name}, EP {num_ranks}"
                    left_out.append({"case": name, "reason": str(error)})
    if not cases:
        raise InputError(f"no case can run; {left_out[0]['case']}: {left_out[0]['reason']}")
    return cases, left_out


def case_of(routing: Routing, model: MoEModel, num_ranks: int, setting: GpuSetting) -> Case:
    """A case, or an error that says why it is impossible."""
    per_node = min(setting.ranks_per_node, num_ranks)
    if num_ranks % per_node:
        raise InputError(f"{num_ranks} ranks are not whole nodes of {per_node}")
    cluster = Cluster(num_nodes=num_ranks // per_node, ranks_per_node=per_node)
    sequences = routing.sequences
    cluster.experts_per_rank(sequences.num_experts)
    if setting.layers > sequences.num_layers:
        raise InputError(f"the recording has {sequences.num_layers} MoE layers, {setting.layers} were asked for")
    tokens = setting.tokens_per_rank * num_ranks
    width = ranks_for_longest(sequences.length_of_sequence, cluster, tokens)
    chosen, first_of_micro_batch, notes = _chosen(sequences.length_of_sequence, tokens, setting.micro_batches)
    layers = evenly_spread(sequences.num_layers, setting.layers).tolist()
    lengths = sequences.length_of_sequence[chosen]
    part = SequenceLoad(
        tokens_SLE=np.ascontiguousarray(sequences.tokens_SLE[:, layers][chosen]), length_of_sequence=lengths
    )
    load = step_load(part, _schedule(lengths, first_of_micro_batch, cluster, tokens, width), cluster)
    if routing.without_routing:
        notes.append(f"{routing.without_routing} tokens of the recording have no routing and are not computed")
    shape = replace(model, num_layers=sequences.num_layers, num_experts=sequences.num_experts, top_k=routing.top_k)
    return Case(recording=routing.name, model=shape, cluster=cluster, load=load, layers=layers, notes=notes)


def _chosen(
    lengths: NDArray[np.int64], tokens: int, num_micro_batches: int
) -> tuple[NDArray[np.int64], list[int], list[str]]:
    """Chosen sequences, the first sequence of each micro-batch, and whether the recording was repeated."""
    times = 1
    while True:
        many = np.tile(lengths, times)
        bounds = micro_batches_in_file_order(many, tokens)
        full = np.flatnonzero(np.add.reduceat(many, bounds[:-1]) >= FULL * tokens)
        if full.size >= num_micro_batches:
            break
        times += max(int(num_micro_batches * tokens / lengths.sum()) - times, 1)
        if times * lengths.size > MOST_SEQUENCES:
            raise InputError(f"sequences do not fill micro-batches of {tokens} tokens: allow more tokens per rank")
    parts = [np.arange(bounds[m], bounds[m + 1]) for m in full[evenly_spread(full.size, num_micro_batches)]]
    first = np.cumsum([0] + [part.size for part in parts])[:-1].tolist()
    needed = sum(int(many[part].sum()) for part in parts)
    notes = []
    if times > 1:
        notes.append(f"{needed} tokens from a recording of {lengths.sum()}: its sequences are repeated in order")
    return np.concatenate(parts) % lengths.size, first, notes


def _schedule(
    lengths: NDArray[np.int64], first_of_micro_batch: list[int], cluster: Cluster, tokens: int, width: int
) -> Schedule:
    """The simulator's schedule of every micro-batch."""
    ends = [*first_of_micro_batch[1:], lengths.size]
    ranks = [
        file_order_schedule(
            lengths[first:last], cluster, tokens_per_microbatch=tokens, ranks_per_sequence=width
        ).rank_of_sequence
        for first, last in zip(first_of_micro_batch, ends, strict=True)
    ]
    return Schedule(
        micro_batch_of_sequence=np.repeat(np.arange(len(ranks)), [part.size for part in ranks]).astype(np.int32),
        rank_of_sequence=np.concatenate(ranks), num_micro_batches=len(ranks), ranks_per_sequence=width,
    )  # fmt: skip
