"""Seeded faults: each breaks one rule of the protocol, and the model must find it in the case that it is given."""

from __future__ import annotations

from dataclasses import dataclass

from tests.protocol.cases import Case


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is broken, and what must be found."""

    rules: tuple[str, ...]
    engine: str
    plan: str
    run: str
    found: str
    """words of the failure"""
    num_ranks: int = 2
    num_layers: int = 2
    turning: bool = False
    depth: int = 1
    rendezvous: bool = False

    def case(self, *, seeded: bool = True) -> Case:
        return Case(
            engine=self.engine, plan=self.plan, run=self.run, num_ranks=self.num_ranks,
            num_layers=self.num_layers, turning=self.turning, depth=self.depth, rendezvous=self.rendezvous,
            faults=frozenset(self.rules if seeded else ()),
        )  # fmt: skip


FAULTS = [
    Fault(rules=("a bank waits for the list before",), engine="ipc", plan="one way", run="update", found="race"),
    Fault(rules=("a bank waits for the list before",), engine="host", plan="one way", run="update", found="race"),
    Fault(rules=("no wait for taken",), engine="in place", plan="one way", run="update", found="race"),
    Fault(rules=("one bank of gradients",), engine="ipc", plan="one way", run="update", found="race"),
    Fault(rules=("one bank of gradients",), engine="host thread", plan="one way", run="update", found="race"),
    Fault(rules=("no barrier after publishing",), engine="host", plan="one way", run="log-prob", found="race"),
    Fault(rules=("no barrier after publishing",), engine="host thread", plan="one way", run="log-prob", found="race"),
    Fault(
        rules=("no barrier before publishing", "no finish_reads"),
        engine="host", plan="one way", run="log-prob twice", found="race",
    ),
    Fault(rules=("no finish_reads",), engine="ipc", plan="one way", run="log-prob twice", found="race"),
    Fault(
        rules=("a fetch does not wait for the compute stream",),
        engine="ipc", plan="one way", run="log-prob", found="race",
    ),
    Fault(rules=("compute does not wait for copies",), engine="host", plan="one way", run="log-prob", found="race"),
    Fault(rules=("taken before the add in place",), engine="in place", plan="one way", run="update", found="race"),
    Fault(rules=("taken before gradients are pulled",), engine="ipc", plan="one way", run="update", found="race"),
    Fault(rules=("given before gradients are computed",), engine="ipc", plan="one way", run="update", found="race"),
    Fault(
        rules=("given before gradients are computed",),
        engine="host thread", plan="one way", run="update", found="race",
    ),
    Fault(rules=("no wait for given",), engine="in place", plan="one way", run="update", found="race"),
    Fault(rules=("no wait for given",), engine="collective", plan="one way", run="update", found="race"),
    Fault(rules=("sums do not wait for the compute stream",), engine="ipc", plan="one way", run="update", found="race"),
    Fault(
        rules=("no finish_sums before a layer's next use",),
        engine="ipc", plan="one way", run="update", num_layers=1, found="race",
    ),
    Fault(rules=("no finish_sums",), engine="ipc", plan="one way", run="update", found="race"),
    Fault(rules=("only ranks that serve say taken",), engine="ipc", plan="one way", run="update", found="deadlock"),
    Fault(rules=("gradients are added twice",), engine="host thread", plan="one way", run="update", found="gradient"),
    Fault(
        rules=("a bank is found by its layer alone",),
        engine="ipc", plan="one way", turning=True, run="in flight", found="slot",
    ),
    Fault(
        rules=("the visit that ran last goes backward",),
        engine="ipc", plan="one way", run="in flight", found="rows",
    ),
    Fault(
        rules=("copies are kept when weights change", "copies are fetched across the optimizer"),
        engine="host", plan="one way", run="mini-batches", found="slot",
    ),
    Fault(
        rules=("copies are kept when weights change",),
        engine="collective", plan="one way", run="epochs", found="slot",
    ),
    Fault(rules=("weights are not published again",), engine="ipc", plan="one way", run="two steps", found="refused"),
    Fault(
        rules=("weights are not published again", "no check of versions"),
        engine="ipc", plan="one way", run="two steps", found="race",
    ),
    Fault(
        rules=("weights are not published again", "no check of versions"),
        engine="host", plan="one way", run="two steps", found="published",
    ),
    Fault(
        rules=("one buffer for all lists",),
        engine="collective", plan="one way", run="log-prob", depth=2, found="race",
    ),
]  # fmt: skip
