"""Engines on CPUs: the host computes itself, threads move what travels. Cells of memory are those of `engines`, and

packed, rank, buffer, n         copies that a rank sends
received, rank, buffer, n       gradients that came home
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.protocol.calls import Call, Where
from tests.protocol.engines import Rank


@dataclass(kw_only=True)
class HostRank(Rank):
    """`HostEngine`: the host computes, a thread reads memory of the node."""

    lists: int = 0
    arrivals: dict[int, set[object]] = field(default_factory=dict)
    coming: dict[Where, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reader = f"reader {self.rank}"
        self.system.operations.setdefault(self.reader, [])

    @property
    def computes_on(self) -> str:
        return self.host

    def on_publish(self, call: Call) -> None:
        if "no barrier before publishing" not in self.faults:
            self.barrier()
        for layer in self.plan.layers_served(self.rank):
            self.do(
                self.host, f"publish layer {layer}", reads=((("weights", self.rank, layer), call.number),),
                writes=((("published", self.rank, layer), call.number),),
            )  # fmt: skip
        if "no barrier after publishing" not in self.faults:
            self.barrier()

    def on_fetch(self, call: Call) -> None:
        for n, (origin, _) in enumerate(self.plan.held(call.where, self.rank)):
            self.do(
                self.reader, f"read {call.where} of {origin}",
                reads=((("published", origin, call.where.layer), self.version),),
                writes=((("slot", self.rank, call.number, n), (origin, call.where.layer, self.version)),),
            )  # fmt: skip
            self.arrivals[call.number] = self.system.now(self.reader)

    def on_arrive(self, call: Call) -> None:
        if call.number in self.arrivals:
            self.system.wait(self.host, *self.arrivals.pop(call.number))

    def bank(self, number: int) -> int:
        return 0 if "one bank of gradients" in self.faults else (number - 1) % 2

    def gradients_of_copies(self, where: Where) -> tuple[tuple[object, object], ...]:
        number, held = self.lists + 1, self.plan.held(where, self.rank)
        if "given before gradients are computed" in self.faults and self.plan.of(where):
            self.give(self.host, ("given", self.rank), number)
        bank = self.bank(number)
        return tuple((("bank", self.rank, bank, n), self.contribution(where, copy)) for n, copy in enumerate(held))

    def on_give_back(self, call: Call) -> None:
        if self.plan.of(call.where):
            self.lists += 1
            self.coming[call.where] = self.lists
            if "given before gradients are computed" not in self.faults:
                self.give(self.host, ("given", self.rank), self.lists)

    def on_add(self, call: Call) -> None:
        where = call.where
        if not self.plan.of(where):
            return
        number = self.coming[where]
        if "no wait for given" not in self.faults:
            for rank in range(self.plan.num_ranks):
                self.wait(self.host, ("given", rank), number)
        for copy in self.plan.served(where, self.rank):
            value, place = (
                self.contribution(where, copy),
                ("bank", copy[1], self.bank(number), self.plan.slot(where, copy)),
            )
            self.do(
                self.host, f"add gradient {number} of {copy[1]}", reads=((place, value),),
                adds=((("gradient", self.rank, where.layer), value),),
            )  # fmt: skip


@dataclass(kw_only=True)
class CollectiveRank(Rank):
    """`CollectiveEngine` on gloo: the host computes; a thread for each kind of traffic runs all-to-alls in order."""

    copied: int = 0
    """all-to-alls so far"""
    returned: int = 0
    free: dict[str, list[int]] = field(default_factory=lambda: {"packed": [], "received": []})
    made: dict[str, int] = field(default_factory=lambda: {"packed": 0, "received": 0})
    arrivals: dict[int, tuple[set[object], int]] = field(default_factory=dict)
    coming: dict[Where, tuple[set[object], int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.copies, self.gradients = f"copies {self.rank}", f"gradients {self.rank}"
        for agent in (self.copies, self.gradients):
            self.system.operations.setdefault(agent, [])

    @property
    def computes_on(self) -> str:
        return self.host

    def buffer(self, kind: str) -> int:
        if "one buffer for all lists" in self.faults:
            return 0
        if self.free[kind]:
            return self.free[kind].pop()
        self.made[kind] += 1
        return self.made[kind] - 1

    def exchange(self, agent: str, kind: str, number: int, pulls: list[tuple[object, object, object]]) -> set[object]:
        """An all-to-all: ranks read from each other when all have come, and go on when all have read."""
        self.give(agent, (kind, "here", self.rank), number)
        for rank in range(self.plan.num_ranks):
            self.wait(agent, (kind, "here", rank), number)
        if pulls:
            self.do(
                agent, f"receive {kind} {number}", reads=tuple((source, value) for source, _, value in pulls),
                writes=tuple((target, value) for _, target, value in pulls),
            )  # fmt: skip
        self.give(agent, (kind, "read", self.rank), number)
        for rank in range(self.plan.num_ranks):
            self.wait(agent, (kind, "read", rank), number)
        return self.system.now(agent)

    def on_fetch(self, call: Call) -> None:
        where, number = call.where, self.copied + 1
        self.copied, buffer = number, self.buffer("packed")
        value = (self.rank, where.layer, self.version)
        served = self.plan.served(where, self.rank)
        if served:
            self.do(
                self.host, f"pack {where}", reads=((("weights", self.rank, where.layer), self.version),),
                writes=tuple((("packed", self.rank, buffer, k), value) for k in range(len(served))),
            )  # fmt: skip
        pulls = []
        for n, (origin, holder) in enumerate(self.plan.held(where, self.rank)):
            k = self.plan.served(where, origin).index((origin, holder))
            pulls.append(
                (
                    ("packed", origin, buffer, k),
                    ("slot", self.rank, call.number, n),
                    (origin, where.layer, self.version),
                )
            )
        self.arrivals[call.number] = self.exchange(self.copies, "copies", number, pulls), buffer

    def on_arrive(self, call: Call) -> None:
        if call.number in self.arrivals:
            end, buffer = self.arrivals.pop(call.number)
            self.system.wait(self.host, *end)
            self.free["packed"].append(buffer)

    def gradients_of_copies(self, where: Where) -> tuple[tuple[object, object], ...]:
        held = self.plan.held(where, self.rank)
        return tuple((("bank", self.rank, n), self.contribution(where, copy)) for n, copy in enumerate(held))

    def on_give_back(self, call: Call) -> None:
        where = call.where
        if not self.plan.of(where):
            return
        self.returned += 1
        buffer = self.buffer("received")
        pulls = [
            (("bank", copy[1], self.plan.slot(where, copy)), ("received", self.rank, buffer, k),
             self.contribution(where, copy))
            for k, copy in enumerate(self.plan.served(where, self.rank))
        ]  # fmt: skip
        self.coming[where] = self.exchange(self.gradients, "gradients", self.returned, pulls), buffer

    def on_add(self, call: Call) -> None:
        where = call.where
        if not self.plan.of(where):
            return
        end, buffer = self.coming[where]
        if "no wait for given" not in self.faults:
            self.system.wait(self.host, *end)
        for k, copy in enumerate(self.plan.served(where, self.rank)):
            value = self.contribution(where, copy)
            self.do(
                self.host, f"add gradient of {copy[1]}", reads=((("received", self.rank, buffer, k), value),),
                adds=((("gradient", self.rank, where.layer), value),),
            )  # fmt: skip
        self.free["received"].append(buffer)
