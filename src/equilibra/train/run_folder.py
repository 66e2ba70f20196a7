"""The folder of a run, and the lock that keeps a second one out.

    RUN/config.toml      everything the run was told
    RUN/metrics.jsonl    a line per step and per evaluation
    RUN/log.txt          the same, to read
    RUN/tensorboard/     the same, for TensorBoard
    RUN/output/          what each rank wrote to stdout and stderr: warnings, and the traceback if it failed
    RUN/checkpoints/     to resume from
    RUN/step.run         the measured last step, for the report
    RUN/report.html      the report

A run is never overwritten; a folder in which no step was done yet holds nothing to lose and is taken again. The lock is
the operating system's (flock): it is held as long as any process of the run lives, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from time import monotonic, sleep

from equilibra.core.atomic import atomic_file, cannot
from equilibra.core.errors import InputError
from equilibra.train.config import TrainConfig
from equilibra.train.config_files import load_config, toml_text

__all__ = ["FolderLock", "RunFolder", "begin_run", "default_output", "reopen_run"]

PATIENCE_S = 15.0
"""for ranks of a killed run to end themselves"""
WORTHLESS = {"config.toml", "log.txt", ".lock", "output", "tensorboard", "start"}
"""what a run that did no step leaves"""


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Where the parts of a run are."""

    path: Path
    """the folder"""

    @property
    def config(self) -> Path:
        """Everything the run was told."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """A line per step and per evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        """The same, to read."""
        return self.path / "log.txt"

    @property
    def tensorboard(self) -> Path:
        """The same, for TensorBoard."""
        return self.path / "tensorboard"

    @property
    def output(self) -> Path:
        """What ranks wrote to stdout and stderr."""
        return self.path / "output"

    @property
    def checkpoints(self) -> Path:
        """Written by the worker."""
        return self.path / "checkpoints"

    @property
    def step_run(self) -> Path:
        """The measured last step, written by the worker."""
        return self.path / "step.run"

    @property
    def report(self) -> Path:
        """The page."""
        return self.path / "report.html"

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is something to resume from."""
        folders = self.checkpoints.glob("policy/step-*")
        return any(folder.is_dir() and not folder.suffix.startswith((".part", ".aside")) for folder in folders)

    def write_config(self, config: TrainConfig) -> None:
        """Echo the complete configuration."""
        with atomic_file(self.config, overwrite=True) as part:
            part.write_text(toml_text(config), encoding="utf-8")

    def discard_if_worthless(self) -> None:
        """Take away a folder in which nothing was done."""
        if self.is_worthless:
            shutil.rmtree(self.path, ignore_errors=True)

    @property
    def is_worthless(self) -> bool:
        """Whether nothing was done in the folder."""
        empty = {name for name in ("checkpoints", "metrics.jsonl") if not _has_entries(self.path / name)}
        return {entry.name for entry in self.path.iterdir()} <= WORTHLESS | empty


class FolderLock:
    """Held from when it is made until it is closed, or until every process that has its file is gone."""

    def __init__(self, folder: RunFolder, *, patience_s: float = PATIENCE_S) -> None:
        """Take the lock; one whose owner is gone is waited for, as its ranks are about to end."""
        path = folder.path / ".lock"
        try:
            self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise cannot("write", path, error) from error
        end = monotonic() + patience_s
        while not self._taken():
            owner = os.pread(self.file, 200, 0).decode(errors="replace").strip()
            if _is_alive(owner) or monotonic() > end:
                os.close(self.file)
                raise InputError(f"{folder.path} is in use by another run ({owner}): wait for it, or end it first")
            sleep(0.1)
        with suppress(OSError):  # the words are for people; a full disk is found by what matters
            os.ftruncate(self.file, 0)
            os.pwrite(self.file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _taken(self) -> bool:
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
        return True

    def close(self) -> None:
        """Give it back, for this process."""
        os.close(self.file)


def _is_alive(owner: str) -> bool:
    """Whether the process that wrote itself into a lock runs, as far as can be known."""
    words = owner.split()
    if len(words) != 4 or not words[1].isdecimal() or words[3] != socket.gethostname():
        return False
    try:
        os.kill(int(words[1]), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def begin_run(output: Path, config: TrainConfig) -> tuple[RunFolder, FolderLock]:
    """Make the folder of a new run."""
    folder = RunFolder(path=output)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"cannot write {output}: it is a file; give the name of a folder") from None
    except OSError as error:
        raise cannot("write", output, error) from error
    lock = FolderLock(folder, patience_s=0)
    try:
        _check_unused(folder)
        folder.write_config(config)
        folder.output.mkdir(exist_ok=True)
    except OSError as error:
        lock.close()
        raise cannot("write", output, error) from error
    except InputError:
        lock.close()
        raise
    return folder, lock


def _check_unused(folder: RunFolder) -> None:
    if folder.is_worthless:
        folder.log.unlink(missing_ok=True)
        return
    if folder.config.is_file():
        todo = f"continue it with equilibra train --resume {folder.path}, or give another --output"
        raise InputError(f"cannot write {folder.path}: it holds a run; {todo}")
    raise InputError(f"cannot write {folder.path}: it exists and is not empty; give another --output")


def _has_entries(path: Path) -> bool:
    """Whether a folder has entries, or a file bytes."""
    if path.is_dir():
        return any(path.iterdir())
    return path.exists() and path.stat().st_size > 0


def reopen_run(path: Path) -> tuple[RunFolder, TrainConfig]:
    """The folder of an earlier run, and what it was told."""
    folder = RunFolder(path=path)
    if not folder.config.is_file():
        raise InputError(f"cannot resume {path}: it holds no config.toml, so it is no run of equilibra train")
    return folder, load_config(folder.config)


def default_output(now: datetime, runs: Path = Path("runs")) -> Path:
    """A folder that does not exist, named after date and time."""
    stamp = f"{now:%Y-%m-%d-%H.%M.%S}"
    names = (stamp if number == 1 else f"{stamp}-{number}" for number in range(1, 1000))
    return next(runs / name for name in names if not (runs / name).exists())
