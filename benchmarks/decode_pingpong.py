"""Ping-pong of real decode layers: attention and experts on shares of one GPU, against the formula and one whole GPU.

    nvidia-cuda-mps-control -d
    python -m benchmarks.decode_pingpong [FOLDER] [--share 50] [--models a,b] [--batches 64,256] [--contexts 1024,8192]
    python -m benchmarks.decode_pingpong FOLDER --tiny       # on a CPU: checks that it runs, not how fast

One process decodes with an attention layer (that of `probes.measure_decode`), another computes all experts. Each has
its share of the GPU's multiprocessors under MPS; both share its memory. Rows travel through the engine's M2N. The
router's choice is copied to the host, as in the engine, but rows follow a fixed random choice, so that every layer has
the same load. All layers use the same weights, which are larger than the cache.

Symbols: m micro-batches in flight, of `batch` sequences each; T_a, T_e, T_c, T_f as in `benchmarks.pingpong`. T_a and
T_e are the GPU's own times of both parts (events), medians within one iteration, because the parts share memory;
`alone` is the time of a part without the other. Colocated: the same layers for m micro-batches at once, one part after
the other, on the whole GPU, without transfers; `law` is the decode laws' prediction of it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.probes.decode_fit import attention_predicted, experts_predicted
from benchmarks.probes.measure_decode import Attention, Bench, Work, expert_products, fastest_scores, small
from benchmarks.suite import Row, Setting, Suite, environment, plain, write_results
from equilibra.core.model import MoEModel, model_named
from equilibra.cost.decode import decode_law
from equilibra.cost.presets import prices_named
from equilibra.rollout.ends import Ends
from equilibra.rollout.m2n import MeshShape, Message, Pairs, SharedMesh
from equilibra.rollout.memory import Memory

MOST = 4
"""micro-batches in flight"""
WARM_UP = 2
WORKER_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model under one load."""

    model: MoEModel
    batch: int
    context: int
    layers: int
    repeats: int
    tiny: bool

    @property
    def bench(self) -> Bench:
        if self.tiny:
            return Bench(device=torch.device("cpu"), dtype=torch.float32, repeats=3)
        return Bench(device=torch.device("cuda", 0), dtype=torch.bfloat16, repeats=7)

    def shape(self) -> MeshShape:
        return MeshShape(
            senders=1, receivers=1, slots=MOST, tokens=self.batch, top_k=self.model.top_k, width=self.model.hidden,
            dtype=self.bench.dtype,
        )  # fmt: skip

    def chosen(self, batch: int) -> NDArray[np.int32]:
        """[tokens, top_k] experts."""
        random = np.random.default_rng(batch).random((batch, self.model.num_experts))
        return np.argsort(random, axis=1)[:, : self.model.top_k].astype(np.int32)

    def pairs(self) -> Pairs:
        expert_P = self.chosen(self.batch).ravel()
        place_P = np.argsort(expert_P, kind="stable")
        return Pairs(
            layer=0, row_P=(place_P // self.model.top_k).astype(np.int32), expert_P=expert_P[place_P],
            place_P=place_P.astype(np.int32),
        )  # fmt: skip


class Spans:
    """Microseconds of pieces of work on the device, or of the host where there is none."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._pairs = device, list[tuple[Any, Any]]()

    def around(self, work: Work) -> None:
        first = self._now()
        work()
        self._pairs.append((first, self._now()))

    def _now(self) -> Any:  # noqa: ANN401
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def take(self) -> list[float]:
        pairs, self._pairs = self._pairs, []
        if self.device.type != "cuda":
            return [(last - first) * 1e6 for first, last in pairs]
        torch.cuda.current_stream(self.device).synchronize()
        return [first.elapsed_time(last) * 1e3 for first, last in pairs]


# --- layers ---


def attention_work(case: Case, batch: int, tray_PD: Tensor | None) -> tuple[Work, Tensor, Tensor]:
    """A layer's attention after the sum of the previous experts; also the tokens it sends and the router's choice."""
    model, bench = case.model, case.bench
    tokens = batch * case.context * model.cache_heads * (model.attention_width // model.num_heads)
    caches = torch.empty(2 * tokens, device=bench.device, dtype=bench.dtype)
    for part in caches.chunk(64):
        part.normal_(0, 0.5)
    layer = Attention.made(model, bench, caches, batch, case.context)
    kind, _ = fastest_scores(layer, bench)
    choice = torch.zeros(batch, model.top_k, device=bench.device, dtype=torch.int64)
    weights = torch.full((batch, model.top_k, 1), 1 / model.top_k, device=bench.device, dtype=bench.dtype)

    def work() -> None:
        if tray_PD is not None:
            rows = tray_PD[: batch * model.top_k].view(batch, model.top_k, -1)
            layer.hidden.add_((rows * weights).sum(1), alpha=1e-3)
        choice.copy_(layer.layer(kind)[1])

    return bench.graphed(work), layer.hidden, choice


def expert_work(case: Case, batch: int) -> tuple[Callable[[Tensor], Tensor], NDArray[np.int64]]:
    """Results of rows sorted by expert, and the tokens of these rows."""
    model, bench = case.model, case.bench
    chosen = case.chosen(batch)
    order = np.argsort(chosen.ravel(), kind="stable")
    sizes = np.bincount(chosen.ravel(), minlength=model.num_experts)
    products = expert_products(model, bench, sizes)
    rows = bench.randn(int(sizes.sum()), model.hidden)
    took = {name: bench.clock(partial(run, rows))["us"] for name, run in products.items()}
    return products[min(took, key=lambda name: took[name])], order // model.top_k


# --- processes ---


def _expert(case: Case, ends: Ends, pipe: Connection) -> None:
    bench, receiver = case.bench, ends.receiver(0, case.bench.device)
    pipe.send(receiver.handle())
    receiver.connect(pipe.recv())
    products, token_P = expert_work(case, case.batch)
    token = torch.from_numpy(token_P).to(bench.device)
    results: dict[int, tuple[Work, Tensor]] = {}

    def of_slot(message: Message) -> tuple[Work, Tensor]:
        """A graph that reads the slot's box, which stays where it is."""
        if message.slot not in results:
            out = torch.zeros(token.numel(), case.model.hidden, device=bench.device, dtype=bench.dtype)
            work = bench.graphed(lambda: out.copy_(products(message.rows_ND.index_select(0, token))))
            results[message.slot] = work, out
        return results[message.slot]

    rows = bench.randn(case.batch, case.model.hidden)
    pipe.send(bench.clock(lambda: products(rows.index_select(0, token)))["us"])
    spans, replies = Spans(bench.device), Spans(bench.device)
    while True:
        mark = receiver.mark()
        for message in receiver.ready()[:1]:
            work, out = of_slot(message)
            spans.around(work)
            replies.around(partial(receiver.reply, message, out))
            mark = -1
        if mark < 0:
            continue
        if pipe.poll():
            if pipe.recv() == "end":
                return
            pipe.send((spans.take(), replies.take()))
        else:
            receiver.wait(mark, 0.05)


def _attention(case: Case, ends: Ends, pipe: Connection) -> None:
    bench, sender = case.bench, ends.sender(0, case.bench.device)
    pipe.send(sender.handle())
    sender.connect(pipe.recv())
    slots = [attention_work(case, case.batch, sender.tray(slot)) for slot in range(MOST)]
    pipe.send(bench.clock(slots[0][0], graph=False)["us"])
    pairs, every, spans = case.pairs(), np.arange(case.batch), Spans(bench.device)
    host = torch.empty(case.batch, case.model.top_k, dtype=torch.int64, pin_memory=bench.device.type == "cuda")

    def go_on(slot: int) -> float:
        work, hidden, choice = slots[slot]
        spans.around(work)
        host.copy_(choice, non_blocking=True)
        if bench.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        sent = perf_counter()
        sender.send(0, slot, hidden, every, pairs)
        return sent

    def iteration(m: int) -> tuple[float, list[float]]:
        left, sent, trips = [case.layers] * m, [0.0] * m, list[float]()
        start = perf_counter()
        for slot in range(m):
            sent[slot] = go_on(slot)
        while any(left):
            mark, moved = sender.mark(), False
            for slot in range(m):
                if left[slot] and sender.arrived(slot):
                    trips.append((perf_counter() - sent[slot]) * 1e6)
                    left[slot] -= 1
                    moved = True
                    if left[slot]:
                        sent[slot] = go_on(slot)
            if not moved:
                sender.wait(mark, 1.0)
        return (perf_counter() - start) * 1e6, trips

    while (asked := pipe.recv()) != "end":
        found = []
        for _ in range(WARM_UP + case.repeats):
            micros, trips = iteration(asked)
            found.append((micros, spans.take(), trips))
        pipe.send(found)


def _colocated(case: Case, _ends: None, pipe: Connection) -> None:
    """Attention and experts of m micro-batches at once."""
    pipe.send([_one_batch(case, m * case.batch) for m in range(1, MOST + 1)])


def _one_batch(case: Case, batch: int) -> tuple[float, float]:
    """Microseconds of a layer's attention and of its experts."""
    bench = case.bench
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    work, hidden, _ = attention_work(case, batch, None)
    products, token_P = expert_work(case, batch)
    token = torch.from_numpy(token_P).to(bench.device)
    weights = torch.rand(token.numel(), 1, device=bench.device, dtype=bench.dtype)

    def experts() -> Tensor:
        rows = products(hidden.index_select(0, token)) * weights
        return torch.zeros_like(hidden).index_add_(0, token, rows)

    return bench.clock(work, graph=False)["us"], bench.clock(experts)["us"]


def _main(function: Callable[..., None], case: Case, ends: Ends | None, pipe: Connection, share: int) -> None:
    os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(share)  # before CUDA starts
    torch.set_num_threads(1)
    if not case.tiny:
        torch.cuda.set_device(0)
    with suppress(EOFError), torch.no_grad():  # EOFError: the end
        function(case, ends, pipe)
    pipe.close()
    os._exit(0)


# --- a case ---


def measure(case: Case, share: int) -> list[Row]:
    """Iterations of 1 to 4 micro-batches, and the same work colocated. share: of attention, in percent."""
    context = multiprocessing.get_context("spawn")

    def started(function: Callable[..., None], ends: Ends | None, of_gpu: int) -> tuple[Connection, BaseProcess]:
        mine, theirs = context.Pipe()
        process = context.Process(target=_main, args=(function, case, ends, theirs, of_gpu), daemon=True)
        process.start()
        theirs.close()
        return mine, process

    pipe, process = started(_colocated, None, 100)
    alone = heard(pipe)
    process.join(WORKER_S)  # frees its memory
    shape = case.shape()
    memory = Memory.create(SharedMesh.num_bytes(shape, on_device=not case.tiny))
    both = [
        started(_attention, Ends(shape, memory.where), share),
        started(_expert, Ends(shape, memory.where), 100 - share),
    ]
    pipes = [pipe for pipe, _ in both]
    handles = [heard(pipe) for pipe in pipes]
    for pipe in pipes:
        pipe.send(handles)
    alone_us = [heard(pipe) for pipe in pipes]
    rows: list[Row] = []
    transfer = 0.0
    for m in range(1, MOST + 1):
        pipes[0].send(m)
        runs: list[Any] = heard(pipes[0])
        pipes[1].send("spans")
        of_experts, of_replies = heard(pipes[1])
        best = min(range(WARM_UP, len(runs)), key=lambda number: runs[number][0])
        micros, of_attention, trips = runs[best]
        each = m * case.layers
        attention = median(of_attention)
        expert = median(of_experts[best * each : (best + 1) * each])
        reply = median(of_replies[best * each : (best + 1) * each])
        if m == 1:
            transfer = (median(trips) - expert) / 2
        slower = max(attention, expert)
        holds = m * slower >= 2 * (slower + transfer)
        way = attention + expert + 2 * transfer
        expected = way + slower * (each - 1) if holds else case.layers * way
        rows.append({
            "model": case.model.name, "batch": case.batch, "context": case.context, "share": share, "m": m,
            "T_a us": attention, "alone T_a": alone_us[0], "T_e us": expert, "alone T_e": alone_us[1],
            "T_c us": transfer, "reply us": reply, "hidden": "yes" if holds else "no",
            "measured us per layer": micros / case.layers, "expected / measured": expected / micros,
            "tokens per s, over m = 1": m * rows[0]["measured us per layer"] * case.layers / micros if rows else 1.0,
            **_of_colocated(case, m, alone[m - 1]),
            "ping-pong over colocated": sum(alone[m - 1]) * case.layers / micros,
        })  # fmt: skip
    for pipe, process in both:
        pipe.send("end")
        process.join(WORKER_S)
    return rows


def _of_colocated(case: Case, m: int, took: tuple[float, float]) -> Row:
    model, batch, law = case.model, m * case.batch, decode_law(prices_named("h200"))
    active = len(np.unique(case.chosen(batch)))
    attention = attention_predicted(law, model, batch=batch, context=case.context)
    experts = experts_predicted(law, model, active=active, rows=batch * model.top_k)
    return {"colocated us": sum(took), "of it attention": took[0], "law: attention": attention,
            "of it experts": took[1], "law: experts": experts}  # fmt: skip


def heard(pipe: Connection) -> Any:  # noqa: ANN401
    """The next message of a process; SystemExit if there is none for a minute."""
    if not pipe.poll(WORKER_S):
        raise SystemExit(f"a process has said nothing for {WORKER_S:g} s")
    return pipe.recv()


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="benchmarks/results", type=Path)
    parser.add_argument("--share", default=50, type=int, help="percent of the GPU for attention")
    parser.add_argument("--models", default="qwen3-30b-a3b,gpt-oss-20b")
    parser.add_argument("--batches", default="64,256,1024", help="sequences of a micro-batch")
    parser.add_argument("--contexts", default="1024,8192")
    parser.add_argument("--layers", default=16, type=int)
    parser.add_argument("--repeats", default=8, type=int)
    parser.add_argument("--budget", default=240.0, type=float, help="seconds after which no case starts")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    loads = list(product(map(int, asked.batches.split(",")), map(int, asked.contexts.split(","))))
    cases = [
        Case(model=small(model_named(name)) if asked.tiny else model_named(name), batch=4 if asked.tiny else batch,
             context=16 if asked.tiny else context, layers=asked.layers, repeats=asked.repeats, tiny=asked.tiny)
        for batch, context in (loads[:1] if asked.tiny else loads) for name in asked.models.split(",")
    ]  # fmt: skip
    begun, rows = perf_counter(), list[Row]()

    def section(_setting: Setting) -> list[Row]:
        return rows

    suite = Suite(
        name="decode_pingpong", title="Ping-pong of decode layers", sections={"one GPU": section},
        intro="Attention on one share of a GPU, experts on the other, m micro-batches of `batch` sequences in flight, "
        "against the formula (T_a + T_e + 2 T_c) + T_f (m L - 1), and against both on the whole GPU without "
        "transfers.",
        titles={"one GPU": "Shares of one GPU"},
    )  # fmt: skip
    for case in cases:
        if perf_counter() - begun > asked.budget:
            print(f"left out, the budget is spent: {case.model.name} {case.batch} x {case.context}", flush=True)
            continue
        print(f"{case.model.name}, {case.batch} sequences of {case.context} ...", flush=True)
        try:
            rows += measure(case, asked.share)
        except (EOFError, OSError, SystemExit) as error:
            print(f"failed: {error!r}", flush=True)
            continue
        command = "python -m benchmarks.decode_pingpong " + " ".join(sys.argv[1:])
        found = {"rows": plain(rows), "command": command.strip(), "measured_on": environment()}
        write_results(suite, {"sections": {"one GPU": found}}, asked.folder)


if __name__ == "__main__":
    main()
