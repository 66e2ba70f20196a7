"""M2N against collectives: round trips of rows between M senders and N receivers.

python -m benchmarks.m2n [FOLDER] [--shapes 1x1,2x2] [--sizes 65536,1048576] [--device cpu|cuda] [--repeats N]
writes FOLDER/m2n.json and .md

In a round trip every sender sends a message of this size to every receiver, and gets as much back from each. Compared:

    m2n          one-sided writes, signals (`equilibra.rollout.m2n`, on GPUs `ends`)
    all_to_all   all_to_all_single over all processes, there and back
    p2p          batch_isend_irecv, there and back

Collectives are gloo on CPUs and NCCL on GPUs, where processes may share one GPU. Time is that of sender 0, from its
first call to the last result; repeats start together. `with a core`: minus the longest time that one of the processes
was ready but had no core, as the kernel counts it: with fewer cores than processes, p99 is the scheduler's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.suite import Row, Setting, Suite, environment, plain, write_results
from equilibra.rollout.ends import Ends, Receiver, Sender
from equilibra.rollout.m2n import MeshShape, Pairs, SharedMesh
from equilibra.rollout.memory import Memory, Where

WIDTH = 4096
"""values of a row: 16 KiB in float32"""
METHODS = ("m2n", "all_to_all", "p2p")
WARM_UP = 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """One group of processes."""

    senders: int
    receivers: int
    sizes: tuple[int, ...]
    repeats: int
    device: str

    @property
    def processes(self) -> int:
        return self.senders + self.receivers


def mesh_of(case: Case, rows: int) -> MeshShape:
    """Buffers for messages of this many rows; a tray has room for the results of every receiver."""
    return MeshShape(
        senders=case.senders, receivers=case.receivers, slots=1, tokens=rows, top_k=case.receivers, width=WIDTH,
        dtype=torch.float32,
    )  # fmt: skip


def waited_s() -> float:
    """Seconds this thread was ready to run but had no core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9


def rows_of(size: int) -> int:
    """Rows of a message."""
    return max(1, size // (4 * WIDTH))


class _Process:
    """One rank of a case."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.is_sender = rank < case.senders
        self.device = torch.device(case.device, 0) if case.device == "cuda" else torch.device("cpu")
        self.others = (
            list(range(case.senders, case.processes)) if self.is_sender else list(range(case.senders))
        )  # fmt: skip

    def timed(self, trip: Callable[[], None]) -> list[tuple[float, float]]:
        """Seconds of every repeat, and those this process waited for a core."""
        found = []
        for _ in range(WARM_UP + self.case.repeats):
            self.synchronize()
            dist.barrier()
            waited, start = waited_s(), perf_counter()
            trip()
            self.synchronize()
            found.append((perf_counter() - start, waited_s() - waited))
        return found[WARM_UP:]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    # --- methods: each returns what makes one round trip ---

    def m2n(self, rows: int, where: Where) -> Callable[[], None]:
        case, ends = self.case, Ends(mesh_of(self.case, rows), where)
        end: Sender | Receiver
        if self.is_sender:
            end = sender = ends.sender(self.rank, self.device)
        else:
            end = receiver = ends.receiver(self.rank - case.senders, self.device)
        handles: list[Any] = [None] * case.processes
        dist.all_gather_object(handles, end.handle())
        end.connect(handles)
        hidden, every = torch.rand(rows, WIDTH, device=self.device), np.arange(rows)
        number, first = every.astype(np.int32), {"trip": True}

        def there() -> None:
            for other in range(case.receivers):
                pairs = Pairs(layer=0, row_P=number, expert_P=number * 0, place_P=number + other * rows)
                sender.send(other, 0, hidden, every, pairs)
            while True:
                mark = sender.mark()
                if sender.arrived(0):
                    break
                sender.wait(mark, 1.0)
            if first.pop("trip", None):
                back_RND = sender.tray(0)[: rows * case.receivers].view(case.receivers, rows, WIDTH)
                assert all(torch.equal(rows_ND, hidden) for rows_ND in back_RND), "rows came back wrong"

        def back() -> None:
            answered = 0
            while answered < case.senders:
                mark = receiver.mark()
                messages = receiver.ready()
                for message in messages:
                    receiver.reply(message, message.rows_ND)
                answered += len(messages)
                if not messages:
                    receiver.wait(mark, 1.0)

        return there if self.is_sender else back

    def all_to_all(self, rows: int, _where: Where) -> Callable[[], None]:
        out = torch.rand(rows * len(self.others), WIDTH, device=self.device)
        into = torch.empty_like(out)
        full = [rows if rank in self.others else 0 for rank in range(self.case.processes)]
        none, nothing = [0] * self.case.processes, out[:0]

        def trip() -> None:
            if self.is_sender:
                dist.all_to_all_single(nothing, out, none, full)
                dist.all_to_all_single(into, nothing, full, none)
            else:
                dist.all_to_all_single(into, nothing, full, none)
                dist.all_to_all_single(nothing, into, none, full)

        return trip

    def p2p(self, rows: int, _where: Where) -> Callable[[], None]:
        out = {other: torch.rand(rows, WIDTH, device=self.device) for other in self.others}
        into = {other: torch.empty(rows, WIDTH, device=self.device) for other in self.others}

        def batch(call: Callable[..., Any], tensors: dict[int, Tensor]) -> None:
            for work in dist.batch_isend_irecv([dist.P2POp(call, one, other) for other, one in tensors.items()]):
                work.wait()

        def trip() -> None:
            if self.is_sender:
                batch(dist.isend, out)
                batch(dist.irecv, into)
            else:
                batch(dist.irecv, into)
                batch(dist.isend, into)

        return trip


def _main(case: Case, rank: int, store: str, pipe: Connection, memories: dict[int, Where]) -> None:
    if case.device == "cuda":
        os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        torch.cuda.set_device(0)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if case.device == "cuda" else "gloo", init_method=f"file://{store}", rank=rank,
        world_size=case.processes, timeout=timedelta(seconds=300),
    )  # fmt: skip
    process, found = _Process(case, rank), []
    for size in case.sizes:
        for method in METHODS:
            trip = getattr(process, method)(rows_of(size), memories[size])
            found.append({"bytes": size, "method": method, "times": process.timed(trip)})
    pipe.send(found)
    dist.barrier()
    os._exit(0)


def run_case(case: Case) -> list[Row]:
    """Start the processes; returns the rows of sender 0."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.m2n"])
    store = str(Path(tempfile.mkdtemp(prefix="equilibra-m2n-")) / "store")
    made = {
        size: Memory.create(SharedMesh.num_bytes(mesh_of(case, rows_of(size)), on_device=case.device == "cuda"))
        for size in case.sizes
    }
    where = {size: memory.where for size, memory in made.items()}
    pairs = [context.Pipe(duplex=False) for _ in range(case.processes)]
    processes = [
        context.Process(target=_main, args=(case, rank, store, theirs, where), daemon=True)
        for rank, (_, theirs) in enumerate(pairs)
    ]
    for process in processes:
        process.start()
    for _, theirs in pairs:
        theirs.close()
    said = [mine.recv() for mine, _ in pairs]
    for process in processes:
        process.join(30)
    return [_row(case, of_ranks) for of_ranks in zip(*said, strict=True)]


def _row(case: Case, of_ranks: tuple[dict[str, Any], ...]) -> Row:
    one = of_ranks[0]
    micros = np.array(one["times"])[:, 0] * 1e6
    waited = np.array([rank["times"] for rank in of_ranks])[:, :, 1].max(axis=0) * 1e6
    moved = 2 * rows_of(one["bytes"]) * 4 * WIDTH * case.receivers
    return {
        "M": case.senders, "N": case.receivers, "KiB": one["bytes"] / 1024, "method": one["method"],
        "median us": float(np.median(micros)), "p99 us": float(np.percentile(micros, 99)),
        "p99 with a core us": float(np.percentile(np.maximum(micros - waited, 0), 99)),
        "GB/s of sender": moved / float(np.median(micros)) / 1e3,
    }  # fmt: skip


def suite_of(cases: list[Case]) -> Suite:
    """The suite that measures these cases in one section."""

    def section(_setting: Setting) -> list[Row]:
        rows = []
        for case in cases:
            print(f"{case.senders}x{case.receivers} ...", flush=True)
            rows += run_case(case)
        return rows

    return Suite(
        name="m2n", title="M2N", sections={"cpu": section, "cuda": section},
        intro="Round trips between M senders and N receivers: one-sided writes with signals against collectives, per "
        "message size. Lower is better.",
        titles={"cpu": "Round trips, CPU (collectives: gloo)", "cuda": "Round trips, one GPU (collectives: NCCL)"},
        notes={"cuda": "NCCL goes through sockets here, because the processes share a GPU."},
    )  # fmt: skip


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="benchmarks/results", type=Path)
    parser.add_argument("--shapes", default="1x1,1x2,2x1,2x2")
    parser.add_argument("--sizes", default=",".join(str(2**n) for n in (16, 18, 20, 22, 24, 26)))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", default=200, type=int)
    asked = parser.parse_args()
    cases = [
        Case(senders=int(m), receivers=int(n), sizes=tuple(map(int, asked.sizes.split(","))), repeats=asked.repeats,
             device=asked.device)
        for m, n in (shape.split("x") for shape in asked.shapes.split(","))
    ]  # fmt: skip
    suite = suite_of(cases)
    rows = plain(suite.sections[asked.device](Setting(traces=None)))
    about = environment() | {"repeats": asked.repeats, "load": os.getloadavg()[0]}
    if asked.device == "cuda":
        about["gpu"] = torch.cuda.get_device_name(0)
    command = f"python -m benchmarks.m2n --device {asked.device} --shapes {asked.shapes}"
    section = {"rows": rows, "command": command, "measured_on": about}
    asked.folder.mkdir(parents=True, exist_ok=True)
    write_results(suite, {"sections": {asked.device: section}}, asked.folder)


if __name__ == "__main__":
    main()
