"""Ping-pong between one attention and one expert process, against its formula.

python -m benchmarks.pingpong [FOLDER] [--layers L] [--attention-us X] [--expert-us X] [--work products|waits]
writes FOLDER/pingpong.json and .md

Symbols: T_a, T_e compute of one micro-batch and layer on each side, T_c one-way transfer, T_f = max(T_a, T_e), L
layers, m micro-batches in flight. An iteration of m micro-batches takes (T_a + T_e + 2 T_c) + T_f (m L - 1) if
transfers are hidden, which needs m T_f >= 2 (T_f + T_c); otherwise the latency of one micro-batch sets the pace:
L (T_a + T_e + 2 T_c).

The transport is the engine's own. Compute is matrix products (`products`) or sleeping (`waits`, where cores are few) of
the requested length. The shortest repeat counts, because other programs only add time. T_a and T_e are medians within
that repeat, because two busy cores are slower than one; T_c is measured at m = 1, where nothing overlaps.

On CPUs a side itself copies rows and signals (`sending`, `answering`) and computes nothing meanwhile. So the reachable
pace is the larger of T_a + sending and T_e + answering: `with messages`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.suite import Row, Setting, Suite, environment, plain, write_results
from equilibra.rollout.ends import Ends, Sender
from equilibra.rollout.m2n import MeshShape, Pairs, SharedMesh
from equilibra.rollout.memory import Memory

MOST = 4
CPU = torch.device("cpu")
WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured."""

    layers: int
    attention_us: float
    expert_us: float
    rows: int
    width: int
    work: str
    repeats: int


class Iteration(NamedTuple):
    """An iteration seen from the attention side, in seconds."""

    seconds: float
    spent: list[tuple[float, float]]
    """seconds of work and of sending, for every micro-batch and layer"""
    trips: list[float]
    """seconds from the end of work until its results are back"""


def work_of(kind: str, micros: float) -> Callable[[], None]:
    """A function that takes this long on this machine."""
    if kind == "waits":
        return lambda: sleep(micros * 1e-6)
    left = torch.rand(64, 64)
    torch.mm(left, left)
    samples = []
    for _ in range(50):
        start = perf_counter()
        for _ in range(20):
            torch.mm(left, left)
        samples.append((perf_counter() - start) / 20)
    count = max(1, round(micros * 1e-6 / min(samples)))

    def products() -> None:
        for _ in range(count):
            torch.mm(left, left)

    return products


def _expert(case: Case, ends: Ends, pipe: Connection) -> None:
    torch.set_num_threads(1)
    receiver, work = ends.receiver(0, CPU), work_of(case.work, case.expert_us)
    pipe.send("ready")
    spent: list[tuple[float, float]] = []
    while True:
        mark = receiver.mark()
        looked = perf_counter()
        messages = receiver.ready()
        for message in messages[:1]:
            start = perf_counter()
            work()
            done = perf_counter()
            receiver.reply(message, message.rows_ND)
            spent.append((done - start, start - looked + perf_counter() - done))
        if not messages:
            if pipe.poll():
                pipe.recv()
                pipe.send(spent)
                spent = []
            else:
                receiver.wait(mark, 0.05)


def _attention(case: Case, ends: Ends, pipe: Connection) -> None:
    torch.set_num_threads(1)
    sender, work = ends.sender(0, CPU), work_of(case.work, case.attention_us)
    pipe.send("ready")
    while True:
        asked: int = pipe.recv()
        pipe.send([_iteration(case, sender, asked, work) for _ in range(WARM_UP + case.repeats)])


def _iteration(case: Case, sender: Sender, m: int, work: Callable[[], None]) -> Iteration:
    hidden, every = torch.rand(case.rows, case.width), np.arange(case.rows)
    number = every.astype(np.int32)
    pairs = Pairs(layer=0, row_P=number, expert_P=number, place_P=number)
    left, sent, spent, trips = [case.layers] * m, [0.0] * m, list[tuple[float, float]](), list[float]()

    def go_on(slot: int) -> None:
        began = perf_counter()
        work()
        sent[slot] = perf_counter()
        sender.send(0, slot, hidden, every, pairs)
        spent.append((sent[slot] - began, perf_counter() - sent[slot]))

    start = perf_counter()
    for slot in range(m):
        go_on(slot)
    while any(left):
        mark, moved = sender.mark(), False
        for slot in range(m):
            if left[slot] and sender.arrived(slot):
                trips.append(perf_counter() - sent[slot])
                left[slot] -= 1
                moved = True
                if left[slot]:
                    go_on(slot)
        if not moved:
            sender.wait(mark, 1.0)
    return Iteration(perf_counter() - start, spent, trips)


def _main(function: Callable[..., None], case: Case, ends: Ends, pipe: Connection, core: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})
    with suppress(EOFError):  # the end
        function(case, ends, pipe)


def measure(case: Case) -> list[Row]:
    """Iterations of 1 to 4 micro-batches."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.pingpong"])
    shape = MeshShape(
        senders=1, receivers=1, slots=MOST, tokens=case.rows, top_k=1, width=case.width, dtype=torch.float32
    )
    memory = Memory.create(SharedMesh.num_bytes(shape))
    pipes = []
    for core, function in enumerate((_attention, _expert)):
        mine, theirs = context.Pipe()
        process = context.Process(
            target=_main, args=(function, case, Ends(shape, memory.where), theirs, core), daemon=True
        )
        process.start()
        theirs.close()
        mine.recv()
        pipes.append(mine)
    rows: list[Row] = []
    transfer = 0.0
    for m in range(1, MOST + 1):
        pipes[0].send(m)
        runs: list[Iteration] = pipes[0].recv()
        pipes[1].send(None)
        of_experts: list[tuple[float, float]] = pipes[1].recv()
        best = min(range(WARM_UP, len(runs)), key=lambda number: runs[number].seconds)
        run, each = runs[best], m * case.layers
        attention, sending = np.median(run.spent, axis=0)
        expert, answering = np.median(of_experts[best * each : (best + 1) * each], axis=0)
        if m == 1:
            transfer = (median(run.trips) - expert) / 2
        slower, busy = max(attention, expert), max(attention + sending, expert + answering)
        holds = m * slower >= 2 * (slower + transfer)
        way = attention + expert + 2 * transfer
        expected = way + slower * (m * case.layers - 1) if holds else case.layers * way
        reachable = max(expected, way + busy * (m * case.layers - 1) if m > 1 else expected)
        rows.append({
            "m": m, "T_a us": attention * 1e6, "T_e us": expert * 1e6, "T_c us": transfer * 1e6,
            "sending us": sending * 1e6, "answering us": answering * 1e6, "hidden": "yes" if holds else "no",
            "measured ms": run.seconds * 1e3, "expected ms": expected * 1e3,
            "expected / measured": expected / run.seconds, "with messages / measured": reachable / run.seconds,
            "micro-batches per s, over m = 1": m * rows[0]["measured ms"] / run.seconds / 1e3 if rows else 1.0,
        })  # fmt: skip
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="benchmarks/results", type=Path)
    parser.add_argument("--layers", default=16, type=int)
    parser.add_argument("--attention-us", default=2000.0, type=float)
    parser.add_argument("--expert-us", default=2000.0, type=float)
    parser.add_argument("--rows", default=32, type=int)
    parser.add_argument("--width", default=2048, type=int)
    parser.add_argument("--work", choices=("products", "waits"), default="products")
    parser.add_argument("--repeats", default=20, type=int)
    asked = vars(parser.parse_args())
    folder: Path = asked.pop("folder")
    case = Case(**asked)

    def section(_setting: Setting) -> list[Row]:
        return measure(case)

    suite = Suite(
        name="pingpong", title="Ping-pong", sections={"products": section, "waits": section},
        intro="Iterations of m micro-batches over L layers between one attention and one expert process, against the "
        "formula (T_a + T_e + 2 T_c) + T_f (m L - 1).",
        titles={"products": "Compute is matrix products", "waits": "Compute is sleeping"},
    )  # fmt: skip
    given = f"--layers {case.layers} --attention-us {case.attention_us:g} --expert-us {case.expert_us:g}"
    command = f"python -m benchmarks.pingpong {given} --rows {case.rows} --work {case.work}"
    done = {
        "rows": plain(section(Setting(traces=None))),
        "command": command,
        "measured_on": environment() | {"load": os.getloadavg()[0]},
    }
    write_results(suite, {"sections": {case.work: done}}, folder)


if __name__ == "__main__":
    main()
