"""What the executor of one rank really asks of its engine, recorded call by call, and whether the model asks the same.

`Journal` wraps engines and a few methods; nothing of the executor changes. Events (visits, plans, weights) go into one
list, calls of the engine into another. The model makes its calls from the events alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tests.protocol.calls import Armed, Call, Calls, Event, Visit, Where

from equilibra.core.plan import Stage
from equilibra.events.schema import Direction
from equilibra.execute.copies.copies import Copies
from equilibra.execute.runtime import Runtime

STAGES = {Stage.LOGPROB: "log-prob", Stage.UPDATE: "update"}
DIRECTIONS = {Direction.FORWARD: "F", Direction.FORWARD_AGAIN: "A", Direction.BACKWARD: "B"}
ASKED = {"publish", "fetch", "arrive", "gradient slots", "give back", "add", "finish sums", "finish reads"}
"""calls of an engine; the model also says what is computed in between"""


class Journal:
    """Of one rank."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.calls: list[Call] = []
        self.stale = 0
        """fetches of another version than was published last"""

    def watch(self, runtime: Runtime) -> None:
        """Record from now on; before a plan is armed for the first time."""
        home, instances = runtime.bring_gradients_home, runtime.instances

        def bring_home() -> None:
            if runtime._copies is not None and runtime.armed is not None:
                self.events.append("home")
            home()

        def visited(key: Any, direction: Direction) -> Any:
            if runtime._copies_of(key) is not None:
                self.events.append(Visit(named(key), DIRECTIONS[direction]))
            return instances(key, direction)

        runtime.bring_gradients_home, runtime.instances = bring_home, visited

    def watch_copies(self, copies: Copies) -> None:
        """The rank's copies, and the engines that they make."""
        arm, forget, offer, engine = copies.arm, copies.forget, copies.offer, copies._engine

        def armed(plan: Any) -> None:
            arm(plan)
            self.events.append(Armed(moves_of(plan, copies.group), after_of(plan)))

        def forgotten() -> None:
            if copies._engines:  # before the first plan there is nothing to forget
                self.events.append("forget")
            forget()

        def offered(version: int) -> None:
            self.events.append(version)
            offer(version)

        copies.arm, copies.forget, copies.offer = armed, forgotten, offered
        copies._engine = lambda path: Watched(engine(path), self, copies)

    def wanted(self, runtime: Runtime) -> list[Call]:
        """The model's calls for the same events."""
        model = Calls(
            num_layers=len(runtime.weights), depth=runtime.setting.prefetch_depth, moves=lambda _: False,
            after=lambda *_: None,
        )  # fmt: skip
        return [call for call in model.run(self.events) if call.what in ASKED]


class Watched:
    """An engine whose calls are written down."""

    def __init__(self, engine: Any, journal: Journal, copies: Copies) -> None:
        self._engine, self._journal, self._copies = engine, journal, copies
        banks = copies._slots._banks
        self._bank = {bank.rows_SP.untyped_storage().data_ptr(): number for number, bank in enumerate(banks)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "source":
            self._engine.source = value
        else:
            super().__setattr__(name, value)

    def _note(self, what: str, where: Where | None = None, number: int = -1) -> None:
        self._journal.calls.append(Call(what, where, number))

    def _where(self, copies: Any) -> Where:
        return named(next(where for where, known in self._copies.lists.items() if known is copies))

    def publish(self, version: int, copied: Any) -> None:
        self._note("publish", number=version)
        self._engine.publish(version, copied)

    def fetch(self, copies: Any, version: int, slots_nP: Any) -> Any:
        where, bank = self._where(copies), self._bank[slots_nP.untyped_storage().data_ptr()]
        self._note("fetch", where, bank)
        published = next(call.number for call in reversed(self._journal.calls) if call.what == "publish")
        self._journal.stale += version != published
        return Waited(self._engine.fetch(copies, version, slots_nP), lambda: self._note("arrive", where, bank))

    def gradient_slots(self, copies: Any) -> Any:
        self._note("gradient slots", self._where(copies))
        return self._engine.gradient_slots(copies)

    def give_back(self, copies: Any) -> Any:
        where = self._where(copies)
        self._note("give back", where)
        return Waited(self._engine.give_back(copies), lambda: self._note("add", where))

    def finish_sums(self) -> None:
        self._note("finish sums")
        self._engine.finish_sums()

    def finish_reads(self) -> None:
        self._note("finish reads")
        self._engine.finish_reads()


class Waited:
    """Something under way whose end is written down."""

    def __init__(self, pending: Any, note: Callable[[], None]) -> None:
        self._pending, self._note = pending, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pending, name)

    def wait(self) -> None:
        self._note()
        self._pending.wait()


def named(where: Any) -> Where:
    return Where(STAGES[where.stage], where.micro_batch, where.layer)


def moves_of(armed: Any, group: Any) -> Callable[[Where], bool]:
    """Whether the rank's node copies anything for a visit: from the plan's arrays."""
    plan, per_node = armed.plan, group.cluster.ranks_per_node

    def moves(where: Where) -> bool:
        part = plan.stages[Stage.LOGPROB if where.stage == "log-prob" else Stage.UPDATE]
        problem = where.layer * plan.num_micro_batches + where.micro_batch
        ranks = part.rank[part.first_of_problem[problem] : part.first_of_problem[problem + 1]]
        return bool(np.isin(group.node, ranks // per_node))

    return moves


def after_of(armed: Any) -> Callable[[str, int], int | None]:
    """The next micro-batch of the group; in the update one of the same optimizer step."""
    numbers, mini = armed.micro_batches, armed.plan.schedule.mini_batch_of_micro_batch

    def after(stage: str, micro_batch: int) -> int | None:
        rest = [number for number in numbers if number > micro_batch][:1]
        if not rest or (stage == "update" and mini is not None and mini[rest[0]] != mini[micro_batch]):
            return None
        return rest[0]

    return after
