"""Ping-pong between one attention and one expert process against its formula.

python -m benchmarks.pingpong [FOLDER] [--layers L] [--attention-us X] [--expert-us X] [--work products|waits]
writes FOLDER/pingpong.json and .md

Symbols: T_a, T_e compute of one micro-batch and layer on each side, T_c one-way transfer, T_f = max(T_a, T_e), L
layers, m micro-batches in flight. An iteration of m micro-batches takes (T_a + T_e + 2 T_c) + T_f (m L - 1) if
transfers are hidden, which needs m T_f >= 2 (T_f + T_c); otherwise a micro-batch's own way sets the pace:
L (T_a + T_e + 2 T_c).

The transport is the engine's own; compute is matrix products (`products`) or sleeping (`waits`, where cores are few),
as long as asked. T_a, T_e and T_c are measured with m = 1, where nothing overlaps. Of all repeats the shortest counts:
whatever else runs on the machine only adds.
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

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.suite import Row, Setting, Suite, environment, plain, write_results
from equilibra.rollout.ends import Ends
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


def work_of(kind: str, micros: float) -> Callable[[], None]:
    """Something that takes so long on this machine."""
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
    spent: list[float] = []
    while True:
        mark = receiver.mark()
        messages = receiver.ready()
        for message in messages[:1]:
            start = perf_counter()
            work()
            spent.append(perf_counter() - start)
            receiver.reply(message, message.rows_ND)
        if not messages:
            if pipe.poll():
                pipe.recv()
                pipe.send(min(spent))
                spent = []
            else:
                receiver.wait(mark, 0.05)


def _attention(case: Case, ends: Ends, pipe: Connection) -> None:
    torch.set_num_threads(1)
    sender, work = ends.sender(0, CPU), work_of(case.work, case.attention_us)
    hidden, every = torch.rand(case.rows, case.width), np.arange(case.rows)
    pairs = Pairs(
        layer=0, row_P=every.astype(np.int32), expert_P=every.astype(np.int32), place_P=every.astype(np.int32)
    )
    pipe.send("ready")
    while True:
        asked: int = pipe.recv()
        runs = [_iteration(case, sender, asked, work, hidden, every, pairs) for _ in range(WARM_UP + case.repeats)]
        kept = runs[WARM_UP:]
        pipe.send(tuple(min(one[i] for one in kept) for i in range(3)))


def _iteration(
    case: Case, sender: object, m: int, work: Callable[[], None], hidden: torch.Tensor, every: NDArray[np.int64],
    pairs: Pairs,
) -> tuple[float, float, float]:  # fmt: skip
    """Seconds of an iteration of m micro-batches, of a work, and of a round trip."""
    left, sent, works, trips = [case.layers] * m, [0.0] * m, [], []
    start = perf_counter()
    for slot in range(m):
        began = perf_counter()
        work()
        works.append(perf_counter() - began)
        sender.send(0, slot, hidden, every, pairs)  # type: ignore[attr-defined]
        sent[slot] = perf_counter()
    while any(left):
        mark = sender.mark()  # type: ignore[attr-defined]
        moved = False
        for slot in range(m):
            if left[slot] and sender.arrived(slot):  # type: ignore[attr-defined]
                trips.append(perf_counter() - sent[slot])
                left[slot] -= 1
                moved = True
                if left[slot]:
                    began = perf_counter()
                    work()
                    works.append(perf_counter() - began)
                    sender.send(0, slot, hidden, every, pairs)  # type: ignore[attr-defined]
                    sent[slot] = perf_counter()
        if not moved:
            sender.wait(mark, 1.0)  # type: ignore[attr-defined]
    return perf_counter() - start, median(works), median(trips)


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
    attention, expert, transfer = 0.0, 0.0, 0.0
    for m in range(1, MOST + 1):
        pipes[0].send(m)
        seconds, work, trip = pipes[0].recv()
        pipes[1].send(None)
        spent = pipes[1].recv()
        if m == 1:
            attention, expert, transfer = work, spent, (trip - spent) / 2
        slower = max(attention, expert)
        holds = m * slower >= 2 * (slower + transfer)
        way = attention + expert + 2 * transfer
        expected = way + slower * (m * case.layers - 1) if holds else case.layers * way
        rows.append({
            "m": m, "T_a us": attention * 1e6, "T_e us": expert * 1e6, "T_c us": transfer * 1e6,
            "hidden": "yes" if holds else "no", "measured ms": seconds * 1e3, "expected ms": expected * 1e3,
            "expected / measured": expected / seconds,
            "micro-batches per s, over m = 1": m * rows[0]["measured ms"] / seconds / 1e3 if rows else 1.0,
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
