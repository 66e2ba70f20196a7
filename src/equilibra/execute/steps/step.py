"""One step under way: its plan, the micro-batches this rank runs, and what happened in them.

Symbols: S sequences, T tokens, M micro-batches, L layers, E experts, K experts per token, R ranks, P passes.

Routing and data of a sequence travel only from the rank that owns it to the rank that runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import InputError, PlanError
from equilibra.core.load import Schedule, SequenceLoad, StepLoad, imbalance, spread
from equilibra.core.plan import GroupPlan, Stage, StepPlan
from equilibra.core.visit import signed_ids
from equilibra.events.run import PASSES, PlannerRecord, columns_of_plan
from equilibra.events.schema import Direction, Events, Kind
from equilibra.execute.group import Channel, ExpertGroup
from equilibra.execute.micro_batch import MicroBatch
from equilibra.execute.runtime import Runtime
from equilibra.execute.steps.planning import PlannedStep, StepCounts

# --- data of sequences ---


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """The world ranks that own and that run each sequence."""

    owner_of_sequence: NDArray[np.int64]
    """[S]"""
    runner_of_sequence: NDArray[np.int64]
    """[S]"""

    def owned(self, rank: int) -> NDArray[np.int64]:
        return np.flatnonzero(self.owner_of_sequence == rank)

    def run(self, rank: int) -> NDArray[np.int64]:
        return np.flatnonzero(self.runner_of_sequence == rank)

    def back(self) -> Route:
        """The reverse route, from runners to owners."""
        return Route(owner_of_sequence=self.runner_of_sequence, runner_of_sequence=self.owner_of_sequence)


def send_sequences(group: ExpertGroup, route: Route, values: Sequence[Tensor]) -> list[Tensor]:
    """Collective: one tensor [n, ...] per owned sequence in, one per sequence run here out; only n may differ."""
    me, world = group.world_rank, group.world_size
    mine = route.owned(me)
    if len(values) != mine.size:
        raise InputError(
            f"cannot send {len(values)} tensors for the {mine.size} sequences of this rank: give one tensor for each"
        )
    rest, dtype = _common_form(group, values)
    row_bytes = int(np.prod(rest, dtype=np.int64)) * dtype.itemsize
    own_lengths = np.array([len(value) for value in values], np.int64)
    lengths = np.zeros(route.owner_of_sequence.size, np.int64)
    by_owner = np.argsort(route.owner_of_sequence, kind="stable")  # gathered by rank; on the way back not by number
    lengths[by_owner] = np.concatenate(group.gather(own_lengths, what="gathering lengths of sequences' data"))
    order = mine[np.lexsort((mine, route.runner_of_sequence[mine]))]
    on_host = [values[int(np.searchsorted(mine, s))].detach().cpu().contiguous() for s in order]
    flat = [value.view(-1).view(torch.uint8) for value in on_host]
    sent = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
    sizes = lengths * row_bytes
    here = route.run(me)
    sent_sizes = np.bincount(route.runner_of_sequence[mine], weights=sizes[mine], minlength=world).astype(np.int64)
    received_sizes = np.bincount(route.owner_of_sequence[here], weights=sizes[here], minlength=world).astype(np.int64)
    received = torch.empty(int(received_sizes.sum()), dtype=torch.uint8)
    group.all_to_all(
        Channel.CONTROL, sent, sent_sizes.tolist(), received, received_sizes.tolist(),
        what="sending sequences' data between ranks",
    ).wait()  # fmt: skip
    arrived = here[np.lexsort((here, route.owner_of_sequence[here]))]
    pieces = dict(zip(arrived.tolist(), torch.split(received, sizes[arrived].tolist()), strict=True))
    return [pieces[s].view(dtype).view(int(lengths[s]), *rest) for s in here.tolist()]


def _common_form(group: ExpertGroup, values: Sequence[Tensor]) -> tuple[tuple[int, ...], torch.dtype]:
    """Trailing shape and dtype; ranks without sequences learn them from the others."""
    forms = {f"{str(value.dtype).removeprefix('torch.')} {','.join(map(str, value.shape[1:]))}" for value in values}
    said = set(group.gather_text(" | ".join(sorted(forms)) or "?", what="comparing sequences' data")) - {"?"}
    if len(said) != 1 or "|" in next(iter(said)):
        raise InputError(f"sequences' data must have one dtype and one trailing shape on all ranks, not {sorted(said)}")
    name, _, shape = next(iter(said)).partition(" ")
    return tuple(int(size) for size in shape.split(",") if size), getattr(torch, name)


# --- the record of a measured step ---


def executed_rows(rows: NDArray[np.void], shape: tuple[int, int, int], stage: Stage) -> NDArray[np.int64]:
    """[L, M, R] (token, expert) pairs that each rank computed in a stage's forward pass, from its events."""
    chosen = rows[
        (rows["kind"] == Kind.EXPERTS) & (rows["stage"] == stage.number) & (rows["direction"] == Direction.FORWARD)
        & (rows["micro_batch"] >= 0)
    ]  # fmt: skip
    counted = np.zeros(shape, np.int64)
    np.add.at(counted, (chosen["layer"], chosen["micro_batch"], chosen["rank"]), chosen["tokens"])
    return counted


def measured_record(
    plan: StepPlan, load: StepLoad, rows: NDArray[np.void], *, memory: dict[str, float], seconds: float, num_tokens: int
) -> PlannerRecord:
    """The record `equilibra report` shows, from all ranks' events. Token counts are measured, not planned."""
    shape = (plan.num_layers, plan.num_micro_batches, plan.cluster.num_ranks)
    ran_LMR = executed_rows(rows, shape, Stage.UPDATE)
    window = plan.num_micro_batches // 2
    shown = rows[(rows["micro_batch"] == window) | (rows["micro_batch"] < 0)]
    return PlannerRecord(
        metrics={
            "step_time_s": seconds,
            "throughput_tokens_per_s": num_tokens / seconds if seconds > 0 else 0.0,
            **_metrics(plan, ran_LMR, rows),
        },
        memory=memory,
        rank_tokens_LMR=ran_LMR.astype(np.int32),
        **columns_of_plan(plan, load),
        layer_us_PLM=_layer_us(rows, shape),
        events=Events.of(shown),
    )


def _metrics(plan: StepPlan, ran_LMR: NDArray[np.int64], rows: NDArray[np.void]) -> dict[str, float]:
    problems = plan.num_layers * plan.num_micro_batches
    ratio = spread(imbalance(ran_LMR))
    bound = float(plan.bound_LM.sum())
    flash, standing = plan.stages[Stage.UPDATE].num_copies / problems, plan.standing.num_copies / plan.num_layers
    waited = rows[np.isin(rows["kind"], (Kind.WAIT, Kind.PLAN, Kind.MIGRATION, Kind.COUNTS))]
    by_rank = np.bincount(waited["rank"], weights=waited["end_us"] - waited["start_us"], minlength=1)
    return {
        "imbalance_mean": ratio.mean,
        "imbalance_p99": ratio.p99,
        "slowest_rank_over_bound": float(ran_LMR.max(axis=2).sum()) / bound if bound else 1.0,
        "copies_per_layer": flash + standing,
        "flash_copies_per_layer": flash,
        "standing_copies_per_layer": standing,
        "migration_bytes": float(rows["bytes"][rows["kind"] == Kind.MIGRATION].sum()),
        "exposed_overhead_s": float(by_rank.max()) * 1e-6,
        "micro_batches": float(plan.num_micro_batches),
    }


def _layer_us(rows: NDArray[np.void], shape: tuple[int, int, int]) -> NDArray[np.float32]:
    """[P, L, M] duration of each pass through each layer, from the first start to the last end over ranks."""
    layers, micro_batches, _ = shape
    of_layer = rows[(rows["layer"] >= 0) & (rows["micro_batch"] >= 0) & (rows["kind"] != Kind.ATTENTION)]
    backward = of_layer["direction"] != Direction.FORWARD
    number = np.where(of_layer["stage"] == Stage.LOGPROB.number, 0, np.where(backward, 2, 1))
    first = np.full((len(PASSES), layers, micro_batches), np.inf)
    last = np.zeros_like(first)
    np.minimum.at(first, (number, of_layer["layer"], of_layer["micro_batch"]), of_layer["start_us"])
    np.maximum.at(last, (number, of_layer["layer"], of_layer["micro_batch"]), of_layer["end_us"])
    return np.where(np.isfinite(first), last - first, 0.0).astype(np.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One planned step, as `Balancer.begin` returns it."""

    runtime: Runtime
    armed: GroupPlan
    """the plan and the load it was made for"""
    route: Route
    """owner and runner of each sequence"""
    experts_of_sequence: dict[int, NDArray[np.signedinteger]]
    """[T, L, K] recorded experts of every sequence run here; -1: no recording"""
    as_planned_M: NDArray[np.bool_]
    """[M] whether all tokens have recorded routing; other micro-batches exchange counts"""
    sequence_loads: SequenceLoad
    """loads and lengths of all ranks' sequences"""
    tokens_without_routing: int
    """tokens of all ranks that are routed live"""
    static_imbalance: float
    """slowest over mean rank with contiguous homes, no copies and every sequence on its owner; mean over visits"""

    @property
    def num_tokens(self) -> int:
        return int(self.sequence_loads.length_of_sequence.sum())

    @property
    def plan(self) -> StepPlan:
        return self.armed.plan

    @cached_property
    def planned_imbalance(self) -> float:
        """Slowest over mean rank under the plan, in the update stage."""
        return float(imbalance(self.plan.rank_load(self.armed.load, Stage.UPDATE)).mean())

    @property
    def num_mini_batches(self) -> int:
        return self._schedule.num_mini_batches

    @property
    def _schedule(self) -> Schedule:
        assert self.plan.schedule is not None
        return self.plan.schedule

    @property
    def sequences(self) -> NDArray[np.int64]:
        return self.route.run(self.runtime.group.world_rank)

    def send(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Collective: data of owned sequences in, data of the sequences run here out, in the order of `sequences`."""
        return send_sequences(self.runtime.group, self.route, values)

    def send_back(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Collective: the inverse of `send`."""
        return send_sequences(self.runtime.group, self.route.back(), values)

    def micro_batches(self, stage: Stage, mini_batch: int | None = None) -> list[MicroBatch]:
        """The micro-batches of this rank's group in order, optionally those of one mini-batch.

        Every rank of the group must run all of them, even without tokens. A group with none in a mini-batch still takes
        part in `finish_gradients` and the optimizer step.
        """
        spec, here = self.runtime.spec, self.sequences
        nothing = np.zeros((0, self.plan.num_layers, spec.top_k), signed_ids(spec.num_experts))
        found = []
        for number in self._numbers(mini_batch):
            sequences = here[self._schedule.micro_batch_of_sequence[here] == number]
            experts = [self.experts_of_sequence[s] for s in sequences.tolist()]
            found.append(MicroBatch(
                self.runtime, stage=stage, number=number, sequences=sequences,
                experts_TLK=np.concatenate([nothing, *experts]), planned=bool(self.as_planned_M[number]),
            ))  # fmt: skip
        return found

    def _numbers(self, mini_batch: int | None) -> list[int]:
        if mini_batch is None:
            return self.armed.micro_batches
        if not 0 <= mini_batch < self.num_mini_batches:
            raise InputError(f"there is no mini-batch {mini_batch}: this step has 0 to {self.num_mini_batches - 1}")
        of_micro_batch = self._schedule.mini_batch_of_micro_batch
        numbers = self.armed.micro_batches
        return [n for n in numbers if of_micro_batch is None or of_micro_batch[n] == mini_batch]

    def record(self, *, seconds: float) -> PlannerRecord | None:
        """Collective, after the step: the measured record of all ranks on world rank 0, None elsewhere."""
        group = self.runtime.group
        rows = group.gather(self.runtime.recorder.taken(), what="gathering events of the step")
        own = self.runtime.memory_bytes()
        memory = group.gather(np.array([[*own.values()]], np.float64), what="gathering memory of the step")
        if group.world_rank:
            return None
        largest = dict(zip(own, np.concatenate(memory).max(axis=0).tolist(), strict=True))
        return measured_record(
            self.plan, self.armed.load, np.concatenate(rows), memory=largest, seconds=seconds,
            num_tokens=self.num_tokens,
        )  # fmt: skip


def begin_step(
    runtime: Runtime, planned: PlannedStep, counts: StepCounts, experts_TLK: NDArray[np.signedinteger]
) -> Step:
    """Collective: send every sequence's routing to its runner, and return the step."""
    plan, group_of_micro_batch, group = planned.plan, planned.group_of_micro_batch, runtime.group
    schedule = plan.schedule
    if schedule is None or schedule.ranks_per_sequence != 1:
        raise PlanError("cannot run the plan: it needs a schedule that gives every sequence to one rank")
    runner = group_of_micro_batch[schedule.micro_batch_of_sequence] * group.num_ranks + schedule.rank_of_sequence
    route = Route(owner_of_sequence=counts.rank_of_sequence, runner_of_sequence=runner)
    lengths = counts.sequences.length_of_sequence[route.owned(group.world_rank)]
    own = np.split(experts_TLK, np.cumsum(lengths)[:-1]) if lengths.size else []
    arrived = send_sequences(group, route, [torch.from_numpy(part) for part in own])
    here = route.run(group.world_rank)
    experts_of_sequence = {int(s): part.numpy() for s, part in zip(here, arrived, strict=True)}
    unrecorded_M = np.bincount(
        schedule.micro_batch_of_sequence, weights=counts.unrecorded_of_sequence, minlength=plan.num_micro_batches
    )
    return Step(
        runtime=runtime,
        armed=GroupPlan(
            plan=plan,
            load=planned.load,
            micro_batches=np.flatnonzero(group_of_micro_batch == group.index).tolist(),
            late=planned.late,
        ),
        route=route,
        experts_of_sequence=experts_of_sequence,
        as_planned_M=unrecorded_M == 0,
        sequence_loads=counts.sequences,
        tokens_without_routing=int(counts.unrecorded_of_sequence.sum()),
        static_imbalance=planned.static_imbalance,
    )
