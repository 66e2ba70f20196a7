"""What engines do with the calls of a rank, as operations of its agents. One home of one expert per rank and layer.

Agents of a rank: its host, and on GPUs the compute stream and the engine's side stream, or on hosts the thread that
reads. Cells of memory, and what is in them:

    weights, rank, layer            their version
    published, rank, layer          the same, in memory of the node
    slot, rank, bank, n             (origin, layer, version) of a copy
    bank, rank, bank, n             a gradient of a copy: (step, micro-batch, layer, origin, holder)
    sent, rank, bank, n             the same, in memory of the node
    row, rank, n                    the same, pulled by its origin
    gradient, rank, layer           all that was added, in order

Without `rendezvous`, ranks wait for each other only where the protocol makes them: tokens need not travel between all
of them. With it, dispatch and combine of every visit wait for all ranks, which could close a circle of waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.protocol.calls import Call, Where
from tests.protocol.model import Reached, System

Copy = tuple[int, int]
"""(origin, holder)"""


class RefusedError(Exception):
    """An engine was asked for another version than is published: StaleError."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who copies what from whom."""

    num_ranks: int
    num_layers: int
    copies: dict[tuple[int, int], tuple[Copy, ...]]
    """by micro-batch and layer"""

    def of(self, where: Where) -> tuple[Copy, ...]:
        return self.copies.get((where.micro_batch, where.layer), ())

    def held(self, where: Where, rank: int) -> list[Copy]:
        """In the order of slots."""
        return sorted(copy for copy in self.of(where) if copy[1] == rank)

    def served(self, where: Where, rank: int) -> list[Copy]:
        """In the order of sums."""
        return sorted((copy for copy in self.of(where) if copy[0] == rank), key=lambda copy: copy[1])

    def layers_served(self, rank: int) -> list[int]:
        """Layers in which others copy a rank's expert."""
        return sorted({layer for (_, layer), copies in self.copies.items() if any(copy[0] == rank for copy in copies)})

    def slot(self, where: Where, copy: Copy) -> int:
        return self.held(where, copy[1]).index(copy)


@dataclass(kw_only=True)
class Rank:
    """What all engines share: a rank's agents, its own weights and gradients."""

    system: System
    plan: Plan
    rank: int
    rendezvous: bool = False
    faults: frozenset[str] = frozenset()
    version: int = 0
    """of the weights, where the host is"""
    step: int = 0
    owed: dict[int, list[object]] = field(default_factory=dict)
    """by layer: what must have been added since the last change of weights"""
    taken: tuple[Where, int] | None = None
    """copies that the next computation uses, and their bank"""
    kept: dict[int, list[int]] = field(default_factory=dict)
    """by layer: the micro-batches whose rows are kept for the backward pass"""
    barriers: int = 0
    meetings: int = 0

    def __post_init__(self) -> None:
        self.host, self.compute = f"host {self.rank}", f"compute {self.rank}"
        for layer in range(self.plan.num_layers):
            self.system.start["weights", self.rank, layer] = 0
            self.system.start["gradient", self.rank, layer] = ()
        self.system.operations.setdefault(self.host, [])

    def run(self, calls: list[Call]) -> None:
        for call in calls:
            handler = getattr(self, f"on_{call.what.replace(' ', '_')}", None)
            if handler is not None:
                handler(call)

    @property
    def computes_on(self) -> str:
        return self.compute

    def do(self, agent: str, what: str, **accesses: object) -> None:
        """Queue an operation; hosts do theirs themselves."""
        self.system.add(agent, what, host=None if agent == self.host else self.host, **accesses)

    def give(self, agent: str, signal: object, value: int) -> None:
        self.do(agent, f"signal {signal} = {value}", gives=Reached(signal, value))

    def wait(self, agent: str, signal: object, value: int) -> None:
        self.system.wait(agent, Reached(signal, value))

    def follow(self, agent: str, other: str) -> None:
        """Wait for all that another agent was given so far."""
        self.system.wait(agent, *self.system.now(other))

    def barrier(self) -> None:
        self.barriers += 1
        self.give(self.host, ("barrier", self.rank), self.barriers)
        for rank in range(self.plan.num_ranks):
            self.wait(self.host, ("barrier", rank), self.barriers)

    def meet(self) -> None:
        """An all-to-all of rows."""
        if self.rendezvous:
            self.meetings += 1
            self.give(self.computes_on, ("rows", self.rank), self.meetings)
            for rank in range(self.plan.num_ranks):
                self.wait(self.computes_on, ("rows", rank), self.meetings)

    # --- contents ---

    def contribution(self, where: Where, copy: Copy) -> tuple[object, ...]:
        return ("copy", self.step, where.micro_batch, where.layer, *copy)

    def used(self, where: Where) -> list[tuple[object, object]]:
        """What a computation reads."""
        cells: list[tuple[object, object]] = [(("weights", self.rank, where.layer), self.version)]
        if self.plan.of(where):
            assert self.taken is not None
            bank = self.taken[1]
            cells += [
                (("slot", self.rank, bank, n), (origin, where.layer, self.version))
                for n, (origin, _) in enumerate(self.plan.held(where, self.rank))
            ]
        return cells

    # --- calls of every engine ---

    def on_take(self, call: Call) -> None:
        self.taken = (call.where, call.number)

    def on_forward(self, call: Call) -> None:
        where = call.where
        self.meet()
        rows = self.rows(where)
        if where.micro_batch not in self.kept.setdefault(where.layer, []):
            self.kept[where.layer].append(where.micro_batch)
        self.do(self.computes_on, f"forward, {where}", reads=tuple(self.used(where)), writes=(rows,))
        self.meet()

    def rows(self, where: Where) -> tuple[object, object]:
        """What a forward pass keeps for the backward pass."""
        return ("rows", self.rank, where.micro_batch, where.layer), (self.step, where)

    def on_backward_of_copies(self, call: Call) -> None:
        where = call.where
        self.meet()
        written = self.gradients_of_copies(where)
        if written:
            self.do(self.computes_on, f"backward of copies, {where}", reads=tuple(self.used(where)), writes=written)

    def on_backward_of_homes(self, call: Call) -> None:
        """The rank's own gradient is added; those of copies must follow it."""
        where = call.where
        kept, wanted = self.rows(where)
        if "the visit that ran last goes backward" in self.faults:
            kept = (*kept[:2], self.kept[where.layer].pop(), where.layer)
        own = ("own", self.step, where.micro_batch, where.layer)
        copies = [self.contribution(where, copy) for copy in self.plan.served(where, self.rank)]
        self.owed.setdefault(where.layer, []).extend([own, *copies])
        self.do(
            self.computes_on, f"backward of homes, {where}", reads=(*self.used(where)[:1], (kept, wanted)),
            adds=((("gradient", self.rank, where.layer), own),),
        )  # fmt: skip
        self.meet()

    def on_change(self, call: Call) -> None:
        """The optimizer: gradients must be whole and in order."""
        for layer in range(self.plan.num_layers):
            self.do(
                self.computes_on, f"optimizer, layer {layer}",
                reads=((("gradient", self.rank, layer), tuple(self.owed.get(layer, []))),
                       (("weights", self.rank, layer), self.version)),
                writes=((("gradient", self.rank, layer), ()), (("weights", self.rank, layer), call.number)),
            )  # fmt: skip
        self.owed, self.version, self.step = {}, call.number, self.step + 1

    def gradients_of_copies(self, where: Where) -> tuple[tuple[object, object], ...]:
        """Cells, and what is written there."""
        raise NotImplementedError


@dataclass(kw_only=True)
class DeviceRank(Rank):
    """`DeviceEngine` over `PinnedPath` ("host"), `IpcPath` between GPUs ("ipc") or on one ("in place")."""

    path: str
    published: int = -1
    lists: int = 0
    summed: set[object] | None = None
    arrivals: dict[int, set[object]] = field(default_factory=dict)
    """by bank of slots: the end of what was pulled into it"""
    coming: dict[Where, int] = field(default_factory=dict)
    """numbers of lists"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.side = f"side {self.rank}"
        self.system.operations.setdefault(self.compute, [])
        self.system.operations.setdefault(self.side, [])

    def bank(self, number: int) -> int:
        """Of a list."""
        return 0 if "one bank of gradients" in self.faults else (number - 1) % 2

    # --- what is done with memory ---

    def publish_layer(self, layer: int, version: int) -> None:
        self.do(
            self.compute, f"publish layer {layer}", reads=((("weights", self.rank, layer), version),),
            writes=((("published", self.rank, layer), version),),
        )  # fmt: skip

    def pull(self, where: Where, bank: int) -> None:
        for n, (origin, _) in enumerate(self.plan.held(where, self.rank)):
            source = ("published" if self.path == "host" else "weights", origin, where.layer)
            self.do(
                self.side, f"pull {where} from {origin}", reads=((source, self.version),),
                writes=((("slot", self.rank, bank, n), (origin, where.layer, self.version)),),
            )  # fmt: skip

    def gradients_of_copies(self, where: Where) -> tuple[tuple[object, object], ...]:
        bank = self.bank(self.lists + 1)
        held = self.plan.held(where, self.rank)
        return tuple((("bank", self.rank, bank, n), self.contribution(where, copy)) for n, copy in enumerate(held))

    def push(self, where: Where, bank: int, number: int) -> None:
        for n, copy in enumerate(self.plan.held(where, self.rank)):
            value = self.contribution(where, copy)
            self.do(
                self.side, f"push list {number}", reads=((("bank", self.rank, bank, n), value),),
                writes=((("sent", self.rank, bank, n), value),),
            )  # fmt: skip

    def pull_gradients(self, where: Where, bank: int, number: int) -> None:
        for k, copy in enumerate(self.plan.served(where, self.rank)):
            place = ("sent" if self.path == "host" else "bank", copy[1], bank, self.plan.slot(where, copy))
            value = self.contribution(where, copy)
            self.do(
                self.side, f"pull gradient {number} from {copy[1]}", reads=((place, value),),
                writes=((("row", self.rank, k), value),),
            )  # fmt: skip

    def add_row(self, where: Where, bank: int, number: int, k: int) -> None:
        """The gradient of the k-th copy that others made of this rank's expert."""
        copy = self.plan.served(where, self.rank)[k]
        value, place = self.contribution(where, copy), ("row", self.rank, k)
        if self.path == "in place":
            place = ("bank", copy[1], bank, self.plan.slot(where, copy))
        self.do(
            self.side, f"add gradient {number} of {copy[1]}", reads=((place, value),),
            adds=((("gradient", self.rank, where.layer), value),),
        )  # fmt: skip

    # --- calls ---

    def on_publish(self, call: Call) -> None:
        self.follow(self.host, self.side)
        self.follow(self.host, self.compute)
        if "no barrier before publishing" not in self.faults:
            self.barrier()
        if self.path == "host":
            for layer in self.plan.layers_served(self.rank):
                self.publish_layer(layer, call.number)
        self.follow(self.host, self.compute)
        if "no barrier after publishing" not in self.faults:
            self.barrier()
        self.published = call.number

    def on_fetch(self, call: Call) -> None:
        if not self.plan.held(call.where, self.rank):
            return
        if self.version != self.published and "no check of versions" not in self.faults:
            raise RefusedError(f"{call}: version {self.published} is published, {self.version} was asked for")
        if "a fetch does not wait for the compute stream" not in self.faults:
            self.follow(self.side, self.compute)
        self.pull(call.where, call.number)
        self.arrivals[call.number] = self.system.now(self.side)

    def on_arrive(self, call: Call) -> None:
        if call.number in self.arrivals:
            self.system.wait(self.compute, *self.arrivals.pop(call.number))

    def on_gradient_slots(self, call: Call) -> None:
        if self.lists >= 2 and self.plan.of(call.where) and "no wait for taken" not in self.faults:
            late = 1 if "a bank waits for the list before" in self.faults else 0
            for rank in range(self.plan.num_ranks):
                self.wait(self.compute, ("taken", rank), self.lists - 1 - late)

    def on_give_back(self, call: Call) -> None:
        where = call.where
        if not self.plan.of(where):
            return
        self.lists += 1
        self.coming[where] = self.lists
        if "given before gradients are computed" not in self.faults:
            self.follow(self.side, self.compute)
        if self.path == "host":
            self.push(where, self.bank(self.lists), self.lists)
        self.give(self.side, ("given", self.rank), self.lists)
        if self.path != "in place":
            if "taken before gradients are pulled" in self.faults:
                self._taken(where)
            self._receive(where)
            self.pull_gradients(where, self.bank(self.lists), self.lists)
            if "taken before gradients are pulled" not in self.faults:
                self._taken(where)

    def _receive(self, where: Where) -> None:
        if "no wait for given" not in self.faults:
            for holder in sorted({holder for _, holder in self.plan.served(where, self.rank)}):
                self.wait(self.side, ("given", holder), self.coming[where])

    def _taken(self, where: Where) -> None:
        if "only ranks that serve say taken" in self.faults and not self.plan.served(where, self.rank):
            return
        self.give(self.side, ("taken", self.rank), self.coming[where])

    def on_add(self, call: Call) -> None:
        where = call.where
        if not self.plan.of(where):
            return
        self.on_finish_sums(call)
        if "sums do not wait for the compute stream" not in self.faults:
            self.follow(self.side, self.compute)
        early = "taken before the add in place" in self.faults
        if self.path == "in place":
            self._receive(where)
        if self.path == "in place" and early:
            self._taken(where)
        number = self.coming[where]
        for k in range(len(self.plan.served(where, self.rank))):
            self.add_row(where, self.bank(number), number, k)
        if self.path == "in place" and not early:
            self._taken(where)
        self.summed = self.system.now(self.side)

    def on_finish_sums(self, _call: Call) -> None:
        if self.summed is not None and "no finish_sums" not in self.faults:
            self.system.wait(self.compute, *self.summed)
        self.summed = None

    def on_finish_reads(self, _call: Call) -> None:
        if "no finish_reads" not in self.faults:
            self.follow(self.host, self.side)
            self.barrier()
