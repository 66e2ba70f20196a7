"""An expert process: it holds some experts of every MoE layer and computes the rows that attention processes write.

Symbols: N rows, P pairs of (token, expert), D width.

It never waits for an idle attention process: all messages of the layer that has waited longest are computed together,
so under load experts get more rows at a time. Weights are rows of one buffer: homes, and spare slots for copies of hot
experts.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import InputError
from equilibra.execute.experts import expert_math
from equilibra.execute.experts.weights import FlatLayout
from equilibra.execute.kernels import ExpertParts
from equilibra.rollout.control import NAP_S, Ask, Loader, Target, apply_setting, export_rows, import_rows
from equilibra.rollout.ends import Ends, Receiver
from equilibra.rollout.instances import Instances
from equilibra.rollout.m2n import Message
from equilibra.rollout.setting import PoolModel, PoolSetting


class ExpertShare:
    """The experts that one process holds."""

    def __init__(self, number: int, spare_slots: int, model: PoolModel, instances: Instances) -> None:
        self.number, self.spare_slots, self.model = number, spare_slots, model
        self.homes = [instances.experts_on(number, layer) for layer in range(model.num_layers)]
        num_slots = sum(map(len, self.homes)) + model.num_layers * spare_slots
        layout = FlatLayout(model.spec.part_shapes())
        self.rows_SP = torch.zeros(num_slots, layout.size, dtype=model.dtype, device=model.device)
        self._parts: list[ExpertParts] = layout.experts(self.rows_SP)
        self.slot_of: dict[tuple[int, int], int] = {}
        self.assign(instances)

    def assign(self, instances: Instances) -> list[tuple[int, int]]:
        """Assign slots to instances; returns the new copies. Homes and copies that stay keep their slots."""
        before, self.slot_of, slot = self.slot_of, {}, 0
        for layer, experts in enumerate(self.homes):
            for expert in experts:
                self.slot_of[layer, expert] = slot
                slot += 1
        new = []
        for layer in range(self.model.num_layers):
            free = set(range(slot, slot + self.spare_slots))
            copies = instances.copies_on(self.number, layer)
            kept = [e for e in copies if before.get((layer, e)) in free]
            for expert in kept:
                self.slot_of[layer, expert] = before[layer, expert]
                free.remove(before[layer, expert])
            for expert in sorted(set(copies) - set(kept)):
                self.slot_of[layer, expert] = free.pop()
                new.append((layer, expert))
            slot += self.spare_slots
        return new

    def parts_of(self, layer: int, expert: int) -> ExpertParts:
        return self._parts[self.slot_of[layer, expert]]

    def targets(self) -> dict[str, list[Target]]:
        """Destinations of published tensors, by name."""
        naming, found = self.model.naming, dict[str, list[Target]]()
        for layer, expert in self.slot_of:
            row = expert if naming.stacked else None
            for entry in naming.entries(self.model.spec, layer, expert, self.parts_of(layer, expert)):
                found.setdefault(entry.name, []).append(Target(view=entry.value, shape=entry.shape, row=row))
        return found

    def compute(self, layer: int, messages: list[Message]) -> list[Tensor]:
        """Results [P, D] of every message's pairs, in their order."""
        expert_P = np.concatenate([message.pairs.expert_P for message in messages])
        rows_PD = _chosen(messages[0].rows_ND, messages[0].pairs.row_P)
        order_P: NDArray[np.int64] | None = None
        if len(messages) > 1:  # one message is already sorted by expert
            rows_PD = torch.cat([rows_PD, *(_chosen(one.rows_ND, one.pairs.row_P) for one in messages[1:])])
            order_P = np.argsort(expert_P, kind="stable")
            rows_PD, expert_P = _chosen(rows_PD, order_P), expert_P[order_P]
        experts, sizes = np.unique(expert_P, return_counts=True)
        try:
            parts = [self.parts_of(layer, expert) for expert in experts.tolist()]
        except KeyError as error:
            raise InputError(f"a token arrived for (layer, expert) {error}, which is not on this process") from error
        results, _ = expert_math.forward(self.model.spec.activation, rows_PD, sizes.tolist(), parts, keep=False)
        if order_P is not None:
            results = _chosen(results, np.argsort(order_P))
        return list(torch.split(results, [message.pairs.row_P.size for message in messages]))


def _chosen(rows_ND: Tensor, number_P: NDArray[np.integer]) -> Tensor:
    """Rows by number; torch's index_select is several times as fast as indexing on CPUs."""
    return rows_ND.index_select(0, torch.from_numpy(number_P.astype(np.int64)).to(rows_ND.device))


def run_experts(
    pipe: Connection, number: int, setting: PoolSetting, model: PoolModel, ends: Ends, instances: Instances
) -> None:
    """Serve until the pipe closes."""
    apply_setting(model.device, setting.threads)
    receiver = ends.receiver(number, model.device)
    share, loader = ExpertShare(number, setting.spare_slots, model, instances), Loader()
    pipe.send(receiver.handle())
    while True:
        mark = receiver.mark()
        messages = receiver.ready()
        if messages:
            layer = messages[0].pairs.layer
            chosen = [message for message in messages if message.pairs.layer == layer]
            for message, results in zip(chosen, share.compute(layer, chosen), strict=True):
                receiver.reply(message, results)
            receiver.made_progress()
        elif pipe.poll():
            _answer(pipe, pipe.recv(), share, loader, receiver)
        else:
            receiver.wait(mark, NAP_S)


def _answer(pipe: Connection, asked: Any, share: ExpertShare, loader: Loader, receiver: Receiver) -> None:  # noqa: ANN401
    what, value = asked
    if what is Ask.INSTANCES:
        pipe.send(share.assign(value))
    elif what is Ask.LOAD_BEGIN:
        loader.begin(share.targets())
    elif what is Ask.LOAD:
        pipe.send(loader.take(*value))
    elif what is Ask.LOAD_END:
        pipe.send(loader.end())
    elif what is Ask.EXPORT:
        where, wanted = value
        pipe.send(export_rows(where, [share.rows_SP[share.slot_of[one]] for one in wanted]))
    elif what is Ask.IMPORT:
        where, placed = value
        import_rows(where, [(at, share.rows_SP[share.slot_of[one]]) for one, at in placed])
        pipe.send(None)
    elif what is Ask.CONNECT:
        receiver.connect(value)
        pipe.send(None)
