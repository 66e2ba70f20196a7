"""Agents that share memory, and every order in which their operations can run.

An agent (a host thread, a stream of a GPU) runs its operations one after another. An operation may begin when others
have come far enough: so many operations of an agent are done, or a signal has reached a value. One that touches memory
begins and ends in two steps, so that two of them can overlap; all others are one step.

A state is how many steps every agent has done. Nothing that may begin can be prevented by others (what is waited for
only grows), which has three consequences:

    races       Two accesses of a cell, one of them a write, that no wait orders are both under way in some state.
                `explore` looks at every state, so it sees them.
    values      Without races all accesses of a cell are ordered, so every run reads the same values: `values_of` runs
                once. `explore_values` keeps memory in the state and so does not rely on this; tests compare both.
    shortest    The shortest run into a failure is what its operations wait for, and what those wait for, and no more.

Every step raises one counter by one. So states after n steps come from those after n - 1 alone: a level at a time is
in memory, packed into 64 bits, and duplicates are only inside a level.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import combinations
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Cell = Hashable
NEVER = 1 << 30


class Done(NamedTuple):
    """So many operations of an agent are done."""

    agent: str
    count: int


class Reached(NamedTuple):
    """A signal has reached a value."""

    signal: Hashable
    value: int


Guard = Done | Reached


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of an agent."""

    what: str
    guards: frozenset[Guard]
    reads: tuple[tuple[Cell, object], ...] = ()
    """cells and what must be in them"""
    writes: tuple[tuple[Cell, object], ...] = ()
    adds: tuple[tuple[Cell, object], ...] = ()
    """cells, which hold tuples, and what is appended"""
    gives: Reached | None = None
    """a signal that is set"""

    @property
    def num_steps(self) -> int:
        return 2 if self.reads or self.writes or self.adds else 1

    def conflicts(self, other: Operation) -> bool:
        changed, others = ({cell for cell, _ in (*op.writes, *op.adds)} for op in (self, other))
        read, others_read = ({cell for cell, _ in op.reads} for op in (self, other))
        return bool(changed & (others | others_read) or others & read)


class System:
    """Operations by agent, in the order in which they are queued."""

    def __init__(self, *, slow_host: bool = False) -> None:
        self.operations: dict[str, list[Operation]] = {}
        self.start: dict[Cell, object] = {}
        """memory at first"""
        self.slow_host = slow_host
        """whether queueing is a step of the host: else a host queues at once whatever it can, which allows more"""
        self._pending: dict[str, set[Guard]] = {}

    def now(self, agent: str) -> set[Guard]:
        """All that the agent was given so far."""
        return {Done(agent, len(self.operations.setdefault(agent, [])))} | self._pending.setdefault(agent, set())

    def wait(self, agent: str, *guards: Guard) -> None:
        """What the agent is given from now on waits."""
        self._pending.setdefault(agent, set()).update(guards)

    def add(self, agent: str, what: str, *, host: str | None = None, **accesses: object) -> None:
        """An operation, queued by a host if there is one."""
        if host is not None and self.slow_host:
            self.add(host, f"queue: {what}")
        guards = self._pending.pop(agent, set()) | (self.now(host) if host is not None else set())
        guards = {guard for guard in guards if isinstance(guard, Reached) or (guard.agent != agent and guard.count)}
        operation = Operation(what=what, guards=frozenset(guards), **accesses)  # type: ignore[arg-type]
        self.operations.setdefault(agent, []).append(operation)


class Step(NamedTuple):
    agent: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What goes wrong, and the shortest run into it."""

    what: str
    run: list[Step]

    def __str__(self) -> str:
        width = max((len(step.agent) for step in self.run), default=0)
        return "\n".join([*(f"{step.agent:{width}}  {step.what}" for step in self.run), f"=> {self.what}"])


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a search found."""

    states: int
    runs: float
    """orders in which all operations can run"""
    depth: int
    """steps of a run; where a race or a deadlock was found, until then"""
    seconds: float
    failure: Failure | None = None


class Compiled:
    """A system as numbers: for every step of an agent, the steps of all others that it needs."""

    def __init__(self, system: System) -> None:
        self.system, self.agents = system, list(system.operations)
        self.op_of_step = [
            [(op, last) for op in system.operations[agent] for last in [False, True][-op.num_steps :]]
            for agent in self.agents
        ]
        self.totals = [len(steps) for steps in self.op_of_step]
        number = {agent: at for at, agent in enumerate(self.agents)}
        ends = [np.cumsum([0, *(op.num_steps for op in system.operations[agent])]) for agent in self.agents]
        given: dict[Hashable, list[tuple[int, int, int]]] = {}
        for agent, operations in system.operations.items():
            for at, op in enumerate(operations):
                if op.gives is not None:
                    given.setdefault(op.gives.signal, []).append(
                        (op.gives.value, number[agent], int(ends[number[agent]][at + 1]))
                    )
        self.needs = [np.zeros((total, len(self.agents)), np.int64) for total in self.totals]
        for a, agent in enumerate(self.agents):
            for at, op in enumerate(system.operations[agent]):
                row = self.needs[a][ends[a][at]]
                for guard in op.guards:
                    if isinstance(guard, Done):
                        b, need = number[guard.agent], int(ends[number[guard.agent]][guard.count])
                    else:
                        enough = [
                            (who, step) for value, who, step in given.get(guard.signal, []) if value >= guard.value
                        ]
                        b, need = enough[0] if enough else (a, NEVER)
                    row[b] = max(row[b], need)

    def enabled(self, a: int, done: list[int]) -> bool:
        """Whether an agent can do its next step."""
        return done[a] < self.totals[a] and all(
            have >= need for have, need in zip(done, self.needs[a][done[a]], strict=True)
        )

    def may_go(self, a: int, done: list[NDArray[np.int32]]) -> NDArray[np.bool_]:
        """The same, of many states."""
        total, needs = self.totals[a], self.needs[a]
        ready: NDArray[np.bool_] = done[a] < total
        for b in np.flatnonzero(needs.any(axis=0)).tolist():
            ready &= done[b] >= needs[np.minimum(done[a], total - 1), b]
        return ready

    def least(self, wanted: dict[int, int]) -> list[int]:
        """The shortest run in which these agents have done so many steps."""
        done = [wanted.get(a, 0) for a in range(len(self.agents))]
        while True:
            needed = [
                max([done[b], *(int(self.needs[a][: done[a], b].max(initial=0)) for a in range(len(done)))])
                for b in range(len(done))
            ]
            if needed == done:
                return done
            done = [min(need, total) for need, total in zip(needed, self.totals, strict=True)]

    def run_to(
        self, last: list[int], choose: Callable[[list[int]], int] = min
    ) -> Iterator[tuple[int, Operation, bool]]:
        """Steps (agent, operation, whether it ends) of one run up to a state, or as far as it comes."""
        done = [0] * len(last)
        while ready := [a for a in range(len(done)) if done[a] < last[a] and self.enabled(a, done)]:
            a = choose(ready)
            yield a, *self.op_of_step[a][done[a]]
            done[a] += 1

    def shown(self, last: list[int]) -> list[Step]:
        words = {(1, True): "", (2, False): "begin ", (2, True): "end "}
        return [Step(self.agents[a], words[op.num_steps, end] + op.what) for a, op, end in self.run_to(last)]

    def race_tables(self) -> dict[tuple[int, int], NDArray[np.bool_]]:
        """By pair of agents: the steps done by both in which two operations that must not overlap are under way."""
        tables = {}
        for a, b in combinations(range(len(self.agents)), 2):
            table = np.zeros((self.totals[a] + 1, self.totals[b] + 1), np.bool_)
            ends = [
                [i for i, (op, last) in enumerate(self.op_of_step[x]) if last and op.num_steps == 2] for x in (a, b)
            ]
            for i in ends[0]:
                for j in ends[1]:
                    table[i, j] = self.op_of_step[a][i][0].conflicts(self.op_of_step[b][j][0])
            if table.any():
                tables[a, b] = table
        return tables


def explore(system: System, *, most: int = 200_000_000) -> Report:
    """Every state that some order of operations reaches: races and deadlocks, then the values of one run."""
    began, compiled = perf_counter(), Compiled(system)
    totals, tables = compiled.totals, compiled.race_tables()
    widths = [total.bit_length() for total in totals]
    shifts = np.cumsum([0, *widths])[:-1].tolist()
    assert sum(widths) <= 64, "states do not fit into 64 bits"
    level, runs, states, failure = np.zeros(1, np.uint64), np.ones(1), 0, None
    for depth in range(sum(totals) + 1):
        states += level.size
        assert states <= most, f"more than {most} states"
        done = [
            ((level >> np.uint64(shift)) & np.uint64((1 << width) - 1)).astype(np.int32)
            for shift, width in zip(shifts, widths, strict=True)
        ]
        failure = _race_in(compiled, tables, done)
        ready = [compiled.may_go(a, done) for a in range(len(totals))]
        stuck = np.flatnonzero(~np.logical_or.reduce(ready))
        if failure is None and stuck.size and depth < sum(totals):
            failure = _deadlock(compiled, [int(part[stuck[0]]) for part in done])
        if failure is not None or depth == sum(totals):
            break
        reached = [level[may] + np.uint64(1 << shift) for may, shift in zip(ready, shifts, strict=True)]
        level, inverse = np.unique(np.concatenate(reached), return_inverse=True)
        runs = np.bincount(inverse, weights=np.concatenate([runs[may] for may in ready]))
    failure = failure or values_of(compiled)
    return Report(
        states=states, runs=float(runs.sum()), depth=depth, seconds=perf_counter() - began, failure=failure
    )  # fmt: skip


def _race_in(
    compiled: Compiled, tables: dict[tuple[int, int], NDArray[np.bool_]], done: list[NDArray[np.int32]]
) -> Failure | None:
    """Two operations under way that must not overlap, in any of many states."""
    for (a, b), table in tables.items():
        hit = np.flatnonzero(table[done[a], done[b]])
        if hit.size:
            return _race(compiled, a, b, [int(part[hit[0]]) for part in done])
    return None


def _race(compiled: Compiled, a: int, b: int, done: list[int]) -> Failure:
    one, two = (compiled.op_of_step[x][done[x]][0].what for x in (a, b))
    last = compiled.least({a: done[a], b: done[b]})
    return Failure(
        what=f"race: {compiled.agents[a]} ({one}) and {compiled.agents[b]} ({two})", run=compiled.shown(last)
    )


def _deadlock(compiled: Compiled, done: list[int]) -> Failure:
    waiting = [
        f"{agent} ({steps[at][0].what})"
        for agent, steps, at in zip(compiled.agents, compiled.op_of_step, done, strict=True)
        if at < len(steps)
    ]
    return Failure(what=f"deadlock: {', '.join(waiting)} wait for ever", run=compiled.shown(done))


class WrongValueError(Exception):
    """An operation found something else than it must."""


def _do(op: Operation, end: bool, memory: dict[Cell, object]) -> None:
    """One step on memory."""
    if end == (op.num_steps == 1):
        for cell, wanted in op.reads:
            if memory.get(cell) != wanted:
                raise WrongValueError(f"{op.what}: {cell} holds {memory.get(cell)}, not {wanted}")
    if end:
        memory.update(op.writes)
        for cell, value in op.adds:
            memory[cell] = (*memory.get(cell, ()), value)  # type: ignore[misc]


def values_of(compiled: Compiled, choose: Callable[[list[int]], int] = min) -> Failure | None:
    """Run once on values: what an operation reads must be what it is meant to read."""
    memory, done = dict(compiled.system.start), [0] * len(compiled.agents)
    for a, op, end in compiled.run_to(compiled.totals, choose):
        done[a] += 1
        try:
            _do(op, end, memory)
        except WrongValueError as wrong:
            return Failure(what=str(wrong), run=compiled.shown(compiled.least({a: done[a]})))
    return None


def explore_values(system: System) -> tuple[int, str | None]:
    """As `explore`, with memory in the state and a set of the states seen: nothing is argued, but it is slow.

    Returns the number of states, and what went wrong.
    """
    compiled = Compiled(system)
    tables = compiled.race_tables()
    first = ((0,) * len(compiled.agents), frozenset(system.start.items()))
    seen, waiting = {first}, deque([first])
    while waiting:
        now, memory = waiting.popleft()
        done = list(now)
        if any(table[done[a], done[b]] for (a, b), table in tables.items()):
            return len(seen), "race"
        ready = [a for a in range(len(done)) if compiled.enabled(a, done)]
        if not ready and done != compiled.totals:
            return len(seen), "deadlock"
        for a in ready:
            changed = dict(memory)
            try:
                _do(*compiled.op_of_step[a][done[a]], changed)
            except WrongValueError as wrong:
                return len(seen), str(wrong)
            reached = ((*now[:a], now[a] + 1, *now[a + 1 :]), frozenset(changed.items()))
            if reached not in seen:
                seen.add(reached)
                waiting.append(reached)
    return len(seen), None


def random_order(seed: int) -> Callable[[list[int]], int]:
    return random.Random(seed).choice
