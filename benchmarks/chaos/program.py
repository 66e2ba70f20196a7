"""The training program, started repeatedly from one process that has everything loaded.

`equilibra train` runs in a fork of this process, and its ranks are forked from a server that this process started, just
as from the server that the program would start. Only the loading of libraries is skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from benchmarks.chaos.cases import TIMEOUT_S, Case
from benchmarks.chaos.worker import FILLER, fill_disk, limit_files
from equilibra.cli import train as train_command
from equilibra.cli.main import main
from equilibra.core.atomic import atomic_file
from equilibra.train import processes

POLL_S = 0.005
IN_TIME_S = 2 * TIMEOUT_S + processes.GRACE_S + 2 * processes.TERMINATE_S
"""most seconds from an injection to the end: both timeouts, and what the program adds to them"""
SLACK_S = 60.0
"""extra seconds for a run on a busy machine before it counts as hung"""
AT_STAGE_S = 0.05
"""most seconds from the begin of a stage to the act"""
SLOWED_S, RUNS_S, STANDS_S = 4.0, 0.025, 0.075


def start_server() -> None:
    """Start the process that all ranks are forked from."""
    root = Path(__file__).resolve().parents[2]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
    os.environ |= {
        "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "PYTHONHASHSEED": "0", "GLOO_SOCKET_IFNAME": "lo",
        "MKL_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1",
    }  # fmt: skip
    forkserver.set_forkserver_preload(
        [
            "equilibra.train.rank",
            "equilibra.train.worker",
            "equilibra.train.preload",
            "equilibra.plan.baselines",
            "benchmarks.chaos.worker",
        ]
    )
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    forkserver.ensure_running()
    for number, handler in before.items():
        signal.signal(number, handler)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a program ended."""

    code: int | None
    """exit code, negative for a signal; None: it did not end in time and was killed"""
    seconds: float
    after_s: float | None
    """seconds from the injection to the end; None: nothing was injected"""
    text: str
    """its output"""
    notes: dict[int, list[dict[str, Any]]] = field(repr=False)
    """notes of all ranks"""
    leftovers: list[str]
    """processes and shared memory left behind"""

    @property
    def saved(self) -> int:
        """Steps whose checkpoint was complete: rank 0 continued afterwards."""
        done, last = 0, None
        for note in self.notes.get(0, []):
            if note["kind"] in ("stage", "end"):
                if last is not None and last["name"] == "checkpoint":
                    done = last["step"] + 1
                last = note if note["kind"] == "stage" else None
        return done


class Lane:
    """Runs one program after another in a folder: `disk` holds the run, `control` the notes and the order."""

    def __init__(self, folder: Path) -> None:
        self.disk, self.control = folder / "disk", folder / "control"
        self.disk.mkdir(parents=True, exist_ok=True)
        self.run = self.disk / "run"

    def clear(self) -> None:
        for path in self.disk.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def train(self, arguments: Sequence[str], case: Case | None = None, usual_s: float = 0.0) -> Ended:
        """Run `equilibra train` with an injection until it ends or counts as hung."""
        (self.disk / FILLER).unlink(missing_ok=True)
        shutil.rmtree(self.control, ignore_errors=True)
        self.control.mkdir(parents=True)
        with atomic_file(self.control / "order.json") as part:
            part.write_text(json.dumps(_order(case)))
        began = monotonic()
        pid = _forked(arguments, self.control / "printed.txt")
        injection = Injection(case, self, pid, began, usual_s)
        code: int | None = None
        while code is None and not injection.is_late(monotonic()):
            sleep(POLL_S)
            injection.tick()
            ended, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else None
        end = monotonic()
        if code is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        notes = self.notes()
        at = injection.at
        return Ended(
            code=code, seconds=end - began, after_s=None if at is None else end - at, notes=notes,
            text=(self.control / "printed.txt").read_text(errors="replace"), leftovers=self._leftovers(notes),
        )  # fmt: skip

    def notes(self) -> dict[int, list[dict[str, Any]]]:
        """Notes of the ranks so far, without an unfinished last line."""
        found = {}
        for file in self.control.glob("rank-*.jsonl"):
            lines = file.read_bytes().split(b"\n")[:-1]
            found[int(file.stem.partition("-")[2])] = [json.loads(line) for line in lines]
        return found

    def _leftovers(self, notes: dict[int, list[dict[str, Any]]]) -> list[str]:
        pids = [note["pid"] for said in notes.values() for note in said if note["kind"] == "begin"]
        end = monotonic() + 5
        while (alive := [pid for pid in pids if _is_alive(pid)]) and monotonic() < end:
            sleep(0.05)
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
        segments = list(Path("/dev/shm").glob("equilibra-*"))
        for path in segments:
            path.unlink(missing_ok=True)
        return [f"process {pid}" for pid in alive] + [f"shared memory {path.name}" for path in segments]


def _order(case: Case | None) -> dict[str, Any]:
    if case is None or not case.stage:
        return {}
    return {
        "injection": case.injection, "rank": case.rank, "stage": case.stage, "step": case.step,
        "delay_s": case.share * AT_STAGE_S,
    }  # fmt: skip


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _forked(arguments: Sequence[str], printed: Path) -> int:
    """Fork a process that runs `equilibra train`."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    pid = os.fork()
    if pid:
        os.close(file)
        return pid
    code = 70
    try:
        os.setsid()
        os.dup2(file, 1)
        os.dup2(file, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _nothing: Callable[[], None] = lambda: None  # noqa: E731
        forkserver.ensure_running = _nothing  # the server is a child of our parent, and runs
        forkserver._forkserver.ensure_running = _nothing  # type: ignore[method-assign]  # noqa: SLF001
        train_command.WORKER = "benchmarks.chaos.worker:run"
        code = main(["train", *arguments])
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - shows in the output, and is a defect
        traceback.print_exc()
    finally:
        os._exit(code)


class Injection:
    """Applies a case's injection to a running program."""

    def __init__(self, case: Case | None, lane: Lane, pid: int, began: float, usual_s: float) -> None:
        self.case, self.lane, self.program, self.began = case, lane, pid, began
        self.due = began + (case.share * usual_s if case is not None else 0.0)
        self.at: float | None = None
        self._victim, self._stands, self._next = 0, False, 0.0

    def is_late(self, now: float) -> bool:
        start = self.began if self.at is None else self.at
        paused = 0.0 if self.case is None else self.case.pause_s + SLOWED_S * (self.case.injection == "slow")
        return now > start + IN_TIME_S + SLACK_S + paused

    def tick(self) -> None:
        case, now = self.case, monotonic()
        if case is None:
            return
        if self.at is None:
            self._begin(case, now)
        elif case.injection == "pause" and self._stands and now > self.at + case.pause_s:
            self._signal(signal.SIGCONT)
        elif case.injection == "slow" and now > self._next and (self._stands or now < self.at + SLOWED_S):
            self._signal(signal.SIGCONT if self._stands else signal.SIGSTOP)
            self._next = now + (STANDS_S if self._stands else RUNS_S)

    def _begin(self, case: Case, now: float) -> None:
        if case.stage:  # the rank does it
            done = [note for note in self.lane.notes().get(case.rank, []) if note["kind"] == "injected"]
            if done:
                self.at, self._victim, self._stands = done[0]["at"], done[0]["pid"], True
            return
        if now < self.due:
            return
        if case.injection in ("term", "interrupt", "term-all"):
            everyone = [self._pid(rank) for rank in range(case.shape.world)] if case.injection == "term-all" else []
            number = signal.SIGINT if case.injection == "interrupt" else signal.SIGTERM
            for pid in [self.program, *(pid for pid in everyone if pid)]:
                _kill(pid, number)
            self.at = now
        elif case.injection == "full":
            fill_disk(self.lane.disk)
            self.at = now
        elif pid := self._pid(case.rank):
            self._victim, self.at = pid, now
            if case.injection == "limit":
                with suppress(ProcessLookupError):
                    limit_files(pid)
            else:
                self._signal(signal.SIGKILL if case.injection == "kill" else signal.SIGSTOP)

    def _pid(self, rank: int) -> int:
        return next((note["pid"] for note in self.lane.notes().get(rank, []) if note["kind"] == "begin"), 0)

    def _signal(self, number: signal.Signals) -> None:
        _kill(self._victim, number)
        self._stands = number == signal.SIGSTOP


def _kill(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
