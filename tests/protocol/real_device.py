"""The real `DeviceEngine`, run without a GPU: its streams, events and signals are those of the model.

What it queues becomes operations of the model's agents. They must be the operations that the model's own engine has,
one by one, with what each waits for.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.protocol.calls import Call, Where
from tests.protocol.engines import DeviceRank

from equilibra.execute.copies import device


class Stream:
    """A stream of a rank."""

    def __init__(self, agent: str, rank: RealDeviceRank) -> None:
        self.agent, self.rank = agent, rank

    def wait_stream(self, other: Stream) -> None:
        self.rank.follow(self.agent, other.agent)

    def wait_event(self, event: Recorded) -> None:
        self.rank.system.wait(self.agent, *event)

    def record_event(self) -> Recorded:
        return Recorded(self.rank.system.now(self.agent))


class Recorded(set[Any]):
    """What an event of a stream stands for."""

    def query(self) -> bool:
        return False


class NoWatch:
    """Of a group in which no rank is lost."""

    def release_with(self, release: Any) -> None:
        """Nobody is released."""

    def expect(self, *_what: Any) -> None:
        """Nothing is late."""


class RealDeviceRank(DeviceRank):
    """A rank whose calls the executor's engine answers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.number, self.writes_to = 0, 0
        self.pending: dict[Any, Any] = {}
        self.numbers: dict[Where, int] = {}
        self.current = Stream(self.compute, self)
        row = torch.zeros(1)
        with self.cuda():
            group = SimpleNamespace(
                rank=self.rank, first_of_node=0, cluster=SimpleNamespace(ranks_per_node=self.plan.num_ranks),
                barrier=lambda what: self.barrier(), watch=NoWatch(),
                finish=lambda stream, what: self.follow(self.host, stream.agent),
            )  # fmt: skip
            self.engine = device.DeviceEngine(group, torch.zeros(2, self.plan.num_ranks, 1), row, self)
        self.engine.source = self

    # --- what the engine sees of torch ---

    @contextmanager
    def cuda(self):
        """The engine's torch has the streams of this rank."""
        fake = SimpleNamespace(
            current_stream=lambda _device: self.current, stream=self.on_stream,
            Stream=lambda _device: Stream(self.side, self),
        )  # fmt: skip
        real, mark = device.torch, device.mark
        device.torch = SimpleNamespace(cuda=fake)
        device.mark = Stream.record_event
        try:
            yield
        finally:
            device.torch, device.mark = real, mark

    @contextmanager
    def on_stream(self, stream: Stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    # --- the path: where it pulls from ---

    @property
    def in_place(self) -> bool:
        return self.path == "in place"

    @property
    def signals(self) -> Any:
        ranks = self.plan.num_ranks
        name = lambda number: ("given", number) if number < ranks else ("taken", number - ranks)  # noqa: E731
        return SimpleNamespace(
            give=lambda number, value, stream: self.give(stream.agent, name(number), value),
            wait=lambda number, value, stream: self.wait(stream.agent, name(number), value),
            release=None,
        )

    def publish(self, _copied: Any, _source: Any) -> None:
        if self.path == "host":
            for layer in self.plan.layers_served(self.rank):
                self.publish_layer(layer, self.number)

    def pull_weights(self, copies: Any, _slots: Any) -> None:
        self.pull(copies.where, copies.bank)

    def push_gradients(self, bank: int, _count: int) -> None:
        if self.path == "host":
            self.push(self.where, bank, self.engine._list)

    def gradients(self, copies: Any, bank: int, _rows: Any) -> list[Any]:
        number = self.numbers[copies.where]
        if self.path != "in place":
            self.pull_gradients(copies.where, bank, number)
        return [(copies.where, bank, number, k) for k in range(copies.served_expert.size)]

    def add_gradient(self, _layer: int, _expert: int, *rows: Any) -> None:
        for row in rows:
            self.add_row(*row)

    # --- calls ---

    def list_of(self, where: Where, bank: int = -1) -> Any:
        held, served = self.plan.held(where, self.rank), self.plan.served(where, self.rank)
        return SimpleNamespace(
            where=where, bank=bank, layer=where.layer, num_in_node=len(self.plan.of(where)), first_rank=0,
            held_expert=np.array([origin for origin, _ in held], np.int32),
            served_expert=np.array([origin for origin, _ in served], np.int32),
            served_target=np.array([holder for _, holder in served], np.int32),
        )  # fmt: skip

    def on_publish(self, call: Call) -> None:
        self.number = call.number
        with self.cuda():
            self.engine.publish(call.number, SimpleNamespace(most_served=self.plan.num_ranks))

    def on_fetch(self, call: Call) -> None:
        with self.cuda():
            self.pending[call.number] = self.engine.fetch(self.list_of(call.where, call.number), self.version, None)

    def on_arrive(self, call: Call) -> None:
        with self.cuda():
            self.pending.pop(call.number).wait()

    def on_gradient_slots(self, call: Call) -> None:
        with self.cuda():
            slots = self.engine.gradient_slots(self.list_of(call.where))
        self.writes_to = slots.storage_offset() // self.plan.num_ranks

    def bank(self, _number: int) -> int:
        return self.writes_to

    def on_give_back(self, call: Call) -> None:
        self.where = call.where
        self.numbers[call.where] = self.engine._list + 1
        with self.cuda():
            self.pending[call.where] = self.engine.give_back(self.list_of(call.where))

    def on_add(self, call: Call) -> None:
        with self.cuda():
            self.pending.pop(call.where).wait()

    def on_finish_sums(self, _call: Call) -> None:
        with self.cuda():
            self.engine.finish_sums()

    def on_finish_reads(self, _call: Call) -> None:
        with self.cuda():
            self.engine.finish_reads()
