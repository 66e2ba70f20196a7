"""One step under way: its plan, the micro-batches this rank runs, and what happened in them.

Symbols: S sequences, M micro-batches, L layers, E experts, K experts per token.
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
from equilibra.core.load import Schedule, SequenceLoad
from equilibra.core.plan import GroupPlan, Stage, StepPlan
from equilibra.core.visit import signed_ids
from equilibra.events.imbalance import imbalance
from equilibra.events.run import PlannerRecord
from equilibra.execute.micro_batch import MicroBatch
from equilibra.execute.runtime import Runtime
from equilibra.execute.steps.counts import StepCounts
from equilibra.execute.steps.exchange import Route, send_sequences
from equilibra.execute.steps.measured import measured_record
from equilibra.execute.steps.planning import PlannedStep

__all__ = ["Step", "begin_step"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """What `Balancer.begin` returns."""

    runtime: Runtime
    """of this rank"""
    armed: GroupPlan
    """the plan that is executed, and the load it was made for"""
    route: Route
    """who has and who runs each sequence"""
    sequences_of_micro_batch: dict[int, NDArray[np.int64]]
    """numbers of this rank's sequences, by micro-batch"""
    experts_of_sequence: dict[int, NDArray[np.signedinteger]]
    """[T, L, K] recorded experts of every sequence that runs here, -1 where there are none"""
    as_planned_M: NDArray[np.bool_]
    """[M] whether all its tokens have recorded routing, and so are planned for; other micro-batches exchange counts"""
    sequence_loads: SequenceLoad
    """loads and lengths of all ranks' sequences"""
    tokens_without_routing: int
    """of all ranks: routed live"""
    static_imbalance: float
    """slowest over mean rank, mean over layers and micro-batches, if sequences had stayed with their ranks, homes were
    contiguous and there were no copies; the same on every rank"""

    @property
    def num_tokens(self) -> int:
        """Of all ranks."""
        return int(self.sequence_loads.length_of_sequence.sum())

    @property
    def plan(self) -> StepPlan:
        """The plan."""
        return self.armed.plan

    @cached_property
    def planned_imbalance(self) -> float:
        """The same of the plan: rows that every rank computes in the update, with copies."""
        return float(imbalance(self.plan.rank_load(self.armed.load, Stage.UPDATE)).mean())

    @property
    def num_mini_batches(self) -> int:
        """Optimizer steps."""
        return self._schedule.num_mini_batches

    @property
    def _schedule(self) -> Schedule:
        assert self.plan.schedule is not None
        return self.plan.schedule

    @property
    def sequences(self) -> NDArray[np.int64]:
        """Numbers of the sequences this rank runs."""
        return self.route.run(self.runtime.group.world_rank)

    def send(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Collective: data of this rank's own sequences in, data of those it runs out, in the order of `sequences`."""
        return send_sequences(self.runtime.group, self.route, values)

    def send_back(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Collective, the inverse of `send`: one tensor per sequence that ran here, in the order of `sequences`, in.

        Out comes one per own sequence, in their order.
        """
        return send_sequences(self.runtime.group, self.route.back(), values)

    def micro_batches(self, stage: Stage, mini_batch: int | None = None) -> list[MicroBatch]:
        """Those this rank's group runs, in order; those of one mini-batch, if it is given.

        Every rank of the group runs all of them, also without tokens. A group may have none of a mini-batch; its ranks
        still take part in `finish_gradients` and the optimizer's step.
        """
        spec = self.runtime.spec
        nothing = np.zeros((0, self.plan.num_layers, spec.top_k), signed_ids(spec.num_experts))
        found = []
        for number in self._numbers(mini_batch):
            sequences = self.sequences_of_micro_batch.get(number, np.zeros(0, np.int64))
            experts = [self.experts_of_sequence[s] for s in sequences.tolist()]
            found.append(MicroBatch(
                self.runtime, stage=stage, number=number, sequences=sequences,
                experts_TLK=np.concatenate([nothing, *experts]), planned=bool(self.as_planned_M[number]),
            ))  # fmt: skip
        return found

    def _numbers(self, mini_batch: int | None) -> list[int]:
        """Of this group's micro-batches."""
        if mini_batch is None:
            return self.armed.micro_batches
        if not 0 <= mini_batch < self.num_mini_batches:
            raise InputError(f"there is no mini-batch {mini_batch}: this step has 0 to {self.num_mini_batches - 1}")
        of_micro_batch = self._schedule.mini_batch_of_micro_batch
        return [
            number for number in self.armed.micro_batches
            if of_micro_batch is None or of_micro_batch[number] == mini_batch
        ]  # fmt: skip

    def record(self, *, seconds: float) -> PlannerRecord | None:
        """Collective, at the end of the step: what happened on all ranks, on world rank 0; None elsewhere."""
        group = self.runtime.group
        rows = group.gather(self.runtime.recorder.taken(), what="gathering events of the step")
        memory = group.gather(
            np.array([list(self.runtime.memory_bytes().values())], np.float64), what="gathering memory of the step"
        )
        if group.world_rank:
            return None
        names = list(self.runtime.memory_bytes())
        largest = dict(zip(names, np.concatenate(memory).max(axis=0).tolist(), strict=True))
        return measured_record(
            self.plan,
            self.armed.load,
            np.concatenate(rows),
            memory=largest,
            seconds=seconds,
            num_tokens=self.num_tokens,
        )


def begin_step(
    runtime: Runtime, planned: PlannedStep, counts: StepCounts, experts_TLK: NDArray[np.signedinteger],
    lengths: NDArray[np.int64],
) -> Step:  # fmt: skip
    """Collective: send every sequence's routing to the rank that runs it."""
    plan, group_of_micro_batch, group = planned.plan, planned.group_of_micro_batch, runtime.group
    schedule = plan.schedule
    if schedule is None or schedule.ranks_per_sequence != 1:
        raise PlanError("the runtime runs every sequence on one rank: the plan must have a schedule that says which")
    runner = group_of_micro_batch[schedule.micro_batch_of_sequence] * group.num_ranks + schedule.rank_of_sequence
    route = Route(owner_of_sequence=counts.rank_of_sequence, runner_of_sequence=runner)
    own = [torch.from_numpy(part) for part in np.split(experts_TLK, np.cumsum(lengths)[:-1])] if lengths.size else []
    arrived = send_sequences(group, route, own)
    here = route.run(group.world_rank)
    experts_of_sequence = {int(s): part.numpy() for s, part in zip(here, arrived, strict=True)}
    of_micro_batch = {
        int(m): here[schedule.micro_batch_of_sequence[here] == m]
        for m in np.unique(schedule.micro_batch_of_sequence[here])
    }
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
        sequences_of_micro_batch=of_micro_batch,
        experts_of_sequence=experts_of_sequence,
        as_planned_M=unrecorded_M == 0,
        sequence_loads=counts.sequences,
        tokens_without_routing=int(counts.unrecorded_of_sequence.sum()),
        static_imbalance=planned.static_imbalance,
    )
