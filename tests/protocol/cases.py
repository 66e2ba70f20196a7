"""Small worlds: who copies what from whom, what is run, and the system of all ranks that follows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.protocol.calls import Call, Calls, Event, passes
from tests.protocol.engines import Copy, DeviceRank, Plan
from tests.protocol.host_engines import CollectiveRank, HostRank
from tests.protocol.model import System

ENGINES = ("collective", "host thread", "host", "ipc", "in place")
RUNS = (
    "log-prob",
    "update",
    "recompute",
    "by layer",
    "in flight",
    "both stages",
    "two steps",
    "mini-batches",
    "epochs",
    "log-prob twice",
)
PLANS: dict[str, dict[int, tuple[Copy, ...]]] = {
    "none": {2: (), 3: ()},
    "one way": {2: ((0, 1),), 3: ((0, 1),)},
    "both ways": {2: ((0, 1), (1, 0)), 3: ((0, 1), (1, 0))},
    "chain": {3: ((0, 1), (1, 2))},
    "all to one": {3: ((1, 0), (2, 0))},
    "one to all": {3: ((0, 1), (0, 2))},
    "ring": {3: ((0, 1), (1, 2), (2, 0))},
}
"""by number of ranks: (origin, holder) of every copy"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A world and what is run in it."""

    engine: str
    plan: str
    run: str
    num_ranks: int = 2
    num_layers: int = 2
    depth: int = 1
    turning: bool = False
    """whether copies go the other way round in every second layer and micro-batch"""
    rendezvous: bool = True
    slow_host: bool = False
    faults: frozenset[str] = frozenset()
    device_rank: type[DeviceRank] = DeviceRank
    """what answers the calls of device paths"""

    def plan_of(self) -> Plan:
        copies = PLANS[self.plan][self.num_ranks]
        turned = tuple((holder, origin) for origin, holder in copies)
        return Plan(num_ranks=self.num_ranks, num_layers=self.num_layers, copies={
            (m, layer): turned if self.turning and (m + layer) % 2 else copies
            for m in range(2) for layer in range(self.num_layers)
        })  # fmt: skip

    def events(self) -> list[Event]:
        """Always of the same form: a plan is armed, its passes run, gradients come home, weights change."""
        step: list[Event] = ["home", "change", "forget", "offer"]
        if self.run == "log-prob":
            return ["offer", *passes("log-prob", [0, 1], self.num_layers), "home"]
        if self.run == "both stages":
            return ["offer", *passes("log-prob", [0], self.num_layers), *passes("update", [0], self.num_layers), *step]
        if self.run == "log-prob twice":  # with other weights
            once = passes("log-prob", [0], self.num_layers)
            return ["offer", *once, *step, *once, "home", "change"]
        if self.run in {"two steps", "epochs"}:
            once = passes("update", [0, 1] if self.run == "two steps" else [0], self.num_layers)
            return ["offer", *once, *step, *once, *step[:2]]
        if self.run == "mini-batches":  # an optimizer step for each micro-batch
            first, second = (passes("update", [m], self.num_layers) for m in range(2))
            return ["offer", *first, *step, *second, *step[:2]]
        return ["offer", *passes(self.run, [0, 1], self.num_layers), *step[:2]]

    def calls(self) -> list[Call]:
        plan = self.plan_of()
        split = self.run == "mini-batches" and "copies are fetched across the optimizer" not in self.faults
        last = 0 if self.run in {"both stages", "epochs", "log-prob twice"} else 1

        def after(stage: str, micro_batch: int) -> int | None:
            return None if micro_batch == last or (split and stage == "update") else micro_batch + 1

        return Calls(
            num_layers=self.num_layers, depth=self.depth, moves=lambda where: bool(plan.of(where)), after=after,
            faults=self.faults,
        ).run(self.events())  # fmt: skip

    def system(self) -> System:
        system, plan, calls = System(slow_host=self.slow_host), self.plan_of(), self.calls()
        for rank in range(self.num_ranks):
            of_rank = {
                "system": system,
                "plan": plan,
                "rank": rank,
                "rendezvous": self.rendezvous,
                "faults": self.faults,
            }
            if self.engine == "collective":
                CollectiveRank(**of_rank).run(calls)
            elif self.engine == "host thread":
                HostRank(**of_rank).run(calls)
            else:
                self.device_rank(**of_rank, path=self.engine).run(calls)
        system.operations = {agent: operations for agent, operations in system.operations.items() if operations}
        return system


def every_case(engine: str, num_ranks: int) -> Iterator[Case]:
    """All plans and runs of an engine; with two ranks also nothing fetched ahead, and two layers ahead."""
    settings = [(1, False, True), (1, True, False), (0, False, False), (2, True, True)][: 4 if num_ranks == 2 else 2]
    for plan in (plan for plan, of_ranks in PLANS.items() if num_ranks in of_ranks):
        for run in RUNS:
            for depth, turning, rendezvous in settings:
                yield Case(
                    engine=engine, plan=plan, run=run, num_ranks=num_ranks, depth=depth, turning=turning,
                    rendezvous=rendezvous,
                )  # fmt: skip
