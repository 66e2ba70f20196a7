"""What the host of every rank asks of an engine, in order: the rules of `Copies` and `SpareSlots`, without tensors.

Symbols: L layers; a visit is (stage, micro-batch, layer) and a direction: F forward, A forward again (activations
are computed anew), B backward.

All ranks of a node make the same calls. `Calls` is the model's copy of these rules: the distributed tests compare what
the executor really asked with it, call by call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Where(NamedTuple):
    stage: str
    """"log-prob" or "update" """
    micro_batch: int
    layer: int

    def __str__(self) -> str:
        return f"{self.stage} of micro-batch {self.micro_batch}, layer {self.layer}"


class Visit(NamedTuple):
    where: Where
    direction: str


class Call(NamedTuple):
    """One call: what, for which visit, and a number: the bank of slots of a fetch, the version of a publication."""

    what: str
    where: Where | None = None
    number: int = -1


class Armed(NamedTuple):
    """Another plan is executed."""

    moves: Callable[[Where], object]
    after: Callable[[str, int], int | None]


Event = Visit | Armed | str | int
"""a visit; "offer": weights of the next version are there; "home": gradients come home before the optimizer;
"change": weights change; "forget": no copy is good any more; a number: weights of this version are there"""


@dataclass
class _Bank:
    number: int
    key: Where | None = None
    arriving: bool = False


@dataclass(kw_only=True)
class Calls:
    """The calls that a run of events leads to."""

    num_layers: int
    depth: int
    """layers ahead that copies are fetched"""
    moves: Callable[[Where], object]
    """whether the node copies anything for a visit"""
    after: Callable[[str, int], int | None]
    """the micro-batch that the group runs next with the same weights"""
    faults: frozenset[str] = frozenset()
    version: int = -1
    made: list[Call] = field(default_factory=list)
    _returning: Where | None = None
    _summing: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._banks = [_Bank(number) for number in range(self.depth + 1)]

    def run(self, events: Iterable[Event]) -> list[Call]:
        for event in events:
            if isinstance(event, Visit):
                self._visit(event)
            elif isinstance(event, Armed):
                self.moves, self.after = event
            elif isinstance(event, int):
                self.version = event - 1
                self.offer()
            else:
                getattr(self, event)()
        return self.made

    def _call(self, what: str, where: Where | None = None, number: int = -1) -> None:
        self.made.append(Call(what, where, number))

    # --- between visits ---

    def offer(self) -> None:
        self.version += 1
        if self.version and "weights are not published again" in self.faults:
            return
        self._call("publish", number=self.version)

    def home(self) -> None:
        self._finish_returns()
        self._call("finish reads")

    def change(self) -> None:
        self._call("change", number=self.version + 1)

    def forget(self) -> None:
        self._finish_returns()
        for bank in self._banks:
            if bank.arriving:
                self._call("arrive", bank.key, bank.number)
            if "copies are kept when weights change" in self.faults:
                continue
            bank.key = None
            bank.arriving = False

    # --- visits ---

    def _visit(self, visit: Visit) -> None:
        where, direction = visit
        self._call("visit", where)
        self._take(where)
        self._look_ahead(where, backward=direction != "F")
        if direction == "B":
            self._end_return()
            if where.layer in self._summing and "no finish_sums before a layer's next use" not in self.faults:
                self._finish_sums()
            self._call("gradient slots", where)
            self._call("backward of copies", where)
            self._call("give back", where)
            self._returning = where
            self._call("backward of homes", where)
        else:
            self._call("forward", where)

    def _same(self, one: Where | None, other: Where) -> bool:
        if one is not None and "a bank is found by its layer alone" in self.faults:
            return one.layer == other.layer
        return one == other

    def _start(self, where: Where) -> None:
        if not self.moves(where) or any(self._same(bank.key, where) for bank in self._banks):
            return
        bank = self._banks.pop(0)
        if bank.arriving:
            self._call("arrive", bank.key, bank.number)
        bank.key, bank.arriving = where, True
        self._call("fetch", where, bank.number)
        self._banks.append(bank)

    def _take(self, where: Where) -> None:
        if not self.moves(where):
            return
        self._start(where)
        bank = next(bank for bank in self._banks if self._same(bank.key, where))
        self._banks.remove(bank)
        self._banks.append(bank)
        if bank.arriving and "compute does not wait for copies" not in self.faults:
            self._call("arrive", where, bank.number)
        bank.arriving = False
        self._call("take", where, bank.number)

    def _look_ahead(self, where: Where, *, backward: bool) -> None:
        stage, number, layer = where
        for _ in range(self.depth):
            if not backward and layer == self.num_layers - 1 and stage == "update":
                backward = True
                continue
            layer += -1 if backward else 1
            if not 0 <= layer < self.num_layers:
                following = self.after(stage, number)
                if following is None:
                    return
                number, layer, backward = following, 0, False
            self._start(Where(stage, number, layer))

    # --- gradients ---

    def _finish_returns(self) -> None:
        self._end_return()
        self._finish_sums()

    def _end_return(self) -> None:
        if self._returning is not None:
            where, self._returning = self._returning, None
            self._call("add", where)
            if "gradients are added twice" in self.faults:
                self._call("add", where)
            if self.moves(where):
                self._summing.add(where.layer)

    def _finish_sums(self) -> None:
        self._call("finish sums")
        self._summing.clear()


def passes(kind: str, micro_batches: Sequence[int], num_layers: int) -> list[Visit]:
    """The visits of some micro-batches.

    log-prob: forward only. update: forward and backward. recompute: the backward pass begins with the whole forward
    pass again. by layer: with that of every layer. in flight: all forward passes come first.
    """
    stage = "log-prob" if kind == "log-prob" else "update"
    forward, again, backward = (
        {m: [Visit(Where(stage, m, layer), direction) for layer in layers] for m in micro_batches}
        for direction, layers in (
            ("F", range(num_layers)), ("A", range(num_layers)), ("B", range(num_layers - 1, -1, -1))
        )
    )  # fmt: skip
    found: list[Visit] = []
    if kind == "in flight":
        found = [visit for m in micro_batches for visit in forward[m]]
        return found + [visit for m in micro_batches for visit in backward[m]]
    for m in micro_batches:
        found += forward[m]
        if kind == "recompute":
            found += again[m]
        if kind == "by layer":
            found += [visit for pair in zip(reversed(again[m]), backward[m], strict=True) for visit in pair]
        elif kind != "log-prob":
            found += backward[m]
    return found
