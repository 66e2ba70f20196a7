"""The training program's worker, with an order for this rank.

Beside the run's disk is a folder `control`. Ranks write to it who they are, when a checkpoint was complete and what
they did; `order.json` says which rank does what to itself, and at which stage.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from equilibra.cost.rates import Rates
from equilibra.execute.copies import segment
from equilibra.execute.steps import balancer
from equilibra.plan.planner import PlannerSetting
from equilibra.rl.observe import Observer
from equilibra.train.config import TrainConfig
from equilibra.train.worker import run_worker

FILLER = "filler"
LIMIT_BYTES = 1


def fill_disk(disk: Path) -> None:
    """Fill the disk of the run."""
    file = os.open(disk / FILLER, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for size in (1 << 20, 1 << 12, 1):
        try:
            while os.write(file, bytes(size)):
                pass
        except OSError:
            continue
    os.close(file)


def limit_files(pid: int) -> None:
    """Limit files of a process to one byte, so that its writes fail."""
    hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))


def run(
    config: TrainConfig, folder: Path, *, resume: bool, observer: Any, cut: Callable[[int], None], **others: Any  # noqa: ANN401
) -> None:  # fmt: skip
    """One rank of a run in CONTROL/../disk/run."""
    control, rank = folder.parents[1] / "control", int(os.environ["RANK"])
    note = Notes(control, rank)
    note("begin", pid=os.getpid())
    order = json.loads((control / "order.json").read_text())

    def first(step: int) -> None:
        note("first", step=step)
        cut(step)

    PlannerSetting.rates_of = lambda *_, **__: Rates.free()  # type: ignore[method-assign]  # else nothing pays here
    mine = order if order.get("rank") == rank and order.get("stage") else None
    watched = Watched(observer, note, None if mine is None else Order(mine, note, folder.parent))
    run_worker(config, folder, resume=resume, observer=watched, cut=first, **others)
    note("end")


class Notes:
    """Writes lines to control/rank-N.jsonl: kind, time, and more."""

    def __init__(self, control: Path, rank: int) -> None:
        self.file = os.open(control / f"rank-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def __call__(self, kind: str, **values: object) -> None:
        """Write a note; on a rank that can no longer write, do nothing."""
        with suppress(OSError):
            os.write(self.file, json.dumps({"kind": kind, "at": time.monotonic(), **values}).encode() + b"\n")


class Order:
    """Performs the injection once, when its stage comes."""

    def __init__(self, order: dict[str, Any], note: Notes, disk: Path) -> None:
        self.order, self.note, self.disk, self.done = order, note, disk, False
        if order["stage"] == "migrate":
            balancer.migrate = self._around(balancer.migrate)  # type: ignore[attr-defined]
        elif order["stage"] == "segment":
            segment.create_segment = self._around(segment.create_segment)

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        calls = iter(range(1 << 30))

        def called(*values: Any, **named: Any) -> Any:  # noqa: ANN401
            if next(calls) >= (self.order["step"] if self.order["stage"] == "migrate" else 0):
                self.begin()
            result = function(*values, **named)
            if self.order["stage"] == "segment":
                self.act()  # between making and sharing
            return result

        return called

    def at(self, name: str, step: int) -> None:
        if (name, step) == (self.order["stage"], self.order["step"]):
            self.begin()

    def begin(self) -> None:
        """Act after the order's delay, counted from now."""
        if self.order["stage"] != "segment":
            delay = threading.Timer(self.order["delay_s"], self.act)
            delay.daemon = True
            delay.start()

    def act(self) -> None:
        if self.done:
            return
        self.done, kind = True, self.order["injection"]
        self.note("injected", pid=os.getpid())
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind in ("stop", "pause", "slow"):
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "full":
            fill_disk(self.disk)
        elif kind == "limit":
            limit_files(0)


class Watched(Observer):
    """The run's observer, which also reports stages to the order."""

    def __init__(self, observer: Any, note: Notes, order: Order | None) -> None:  # noqa: ANN401
        self.observer, self.tell, self.order = observer, note, order

    def stage(self, name: str, *, step: int, done: int = 0, total: int = 0) -> None:
        self.tell("stage", name=name, step=step)
        self.observer.stage(name, step=step, done=done, total=total)
        if self.order is not None:
            self.order.at(name, step)

    def step(self, step: int, metrics: Any) -> None:  # noqa: ANN401
        self.observer.step(step, metrics)

    def evaluated(self, step: int, metrics: Any) -> None:  # noqa: ANN401
        self.observer.evaluated(step, metrics)

    def note(self, text: str) -> None:
        """A message of the run."""
        self.observer.note(text)
