"""The folder of a run, and the lock that keeps other runs out.

    RUN/config.toml      the complete configuration
    RUN/metrics.jsonl    one line per step and evaluation
    RUN/log.txt          the same for people
    RUN/tensorboard/     the same for TensorBoard
    RUN/output/          stdout and stderr of each rank: warnings, tracebacks
    RUN/checkpoints/     to resume from
    RUN/step.run         the measured last step, for the report
    RUN/report.html      the report

A run is never overwritten, but a folder without a finished step may be used again. The lock (flock) is held as long as
any process of the run lives.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from time import monotonic, sleep

from equilibra.core.atomic import atomic_file, cannot
from equilibra.core.errors import InputError
from equilibra.train.config import TrainConfig
from equilibra.train.config_files import load_config, toml_text

PATIENCE_S = 15.0
"""seconds to wait for the ranks of a killed run to end"""
WORTHLESS = {"config.toml", "log.txt", ".lock", "output", "tensorboard", "start"}
"""entries of a run that finished no step"""


class RunFolder:
    """Paths of a run's files."""

    def __init__(self, *, path: Path) -> None:
        self.path, self.config, self.metrics = path, path / "config.toml", path / "metrics.jsonl"
        self.log, self.tensorboard = path / "log.txt", path / "tensorboard"
        self.output, self.checkpoints = path / "output", path / "checkpoints"

    @property
    def has_checkpoint(self) -> bool:
        folders = self.checkpoints.glob("policy/step-*")
        return any(folder.is_dir() and not folder.suffix.startswith((".part", ".aside")) for folder in folders)

    def write_config(self, config: TrainConfig) -> None:
        with atomic_file(self.config, overwrite=True) as part:
            part.write_text(toml_text(config), encoding="utf-8")

    def discard_if_worthless(self) -> None:
        if self.is_worthless:
            shutil.rmtree(self.path, ignore_errors=True)

    @property
    def is_worthless(self) -> bool:
        """Whether no step was finished in the folder."""
        empty = {name for name in ("checkpoints", "metrics.jsonl") if not _has_entries(self.path / name)}
        return {entry.name for entry in self.path.iterdir()} <= WORTHLESS | empty


class FolderLock:
    """Held from construction until closed, or until every process with its file has ended."""

    def __init__(self, folder: RunFolder, *, patience_s: float = PATIENCE_S) -> None:
        """Take the lock; if its owner has died, wait for the ranks that still hold it."""
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
        with suppress(OSError):  # only informs people
            os.ftruncate(self.file, 0)
            os.pwrite(self.file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _taken(self) -> bool:
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # any other error: a file system without locks
            return not isinstance(error, BlockingIOError)
        return True

    def close(self) -> None:
        os.close(self.file)


def _is_alive(owner: str) -> bool:
    """Whether the process named in a lock still runs on this host."""
    words = owner.split()
    if len(words) != 4 or not words[1].isdecimal() or words[3] != socket.gethostname():
        return False
    try:
        os.kill(int(words[1]), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def begin_run(output: Path, config: TrainConfig) -> tuple[RunFolder, FolderLock]:
    """Create and lock the folder of a new run."""
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
    """Whether a folder has entries or a file has bytes."""
    if path.is_dir():
        return any(path.iterdir())
    return path.exists() and path.stat().st_size > 0


def reopen_run(path: Path) -> tuple[RunFolder, TrainConfig]:
    """The folder and configuration of an earlier run."""
    folder = RunFolder(path=path)
    if not folder.config.is_file():
        raise InputError(f"cannot resume {path}: not a folder of equilibra train (no config.toml)")
    return folder, load_config(folder.config)


def default_output(now: datetime, runs: Path = Path("runs")) -> Path:
    """A new folder name from date and time."""
    stamp = f"{now:%Y-%m-%d-%H.%M.%S}"
    names = (stamp if number == 1 else f"{stamp}-{number}" for number in range(1, 1000))
    return next(runs / name for name in names if not (runs / name).exists())
