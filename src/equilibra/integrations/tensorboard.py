"""Write a run's metrics for TensorBoard with its own record writer, without torch or TensorFlow.

Each start of the program writes a new file. Its first event tells TensorBoard to drop that step and later ones from
earlier files, so a resumed run shows as one curve.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

from equilibra.core.atomic import cannot
from equilibra.rl.observe import Observer

BALANCE = ("imbalance_static", "imbalance", "copies", "moves", "exposed", "tokens_without_routing")
"""metrics of the balancer"""


class TensorBoard(Observer):
    """An observer that writes every metric as a scalar. The tag's part before the slash is TensorBoard's group."""

    def __init__(self, folder: Path) -> None:
        """Create the folder and the file only with the first metric."""
        self.folder = folder
        self._writer: RecordWriter | None = None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write(step, {f"{_group(name)}/{name}": value for name, value in metrics.items()})

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write(step, {f"evaluation/{name}": value for name, value in metrics.items()})

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        try:
            if self._writer is None:
                self._writer = self._begin(step)
            scalars = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in values.items()]
            self._put(self._writer, Event(step=step, summary=Summary(value=scalars)))
        except OSError as error:
            raise cannot("write", self.folder, error) from error

    def _begin(self, step: int) -> RecordWriter:
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 1000}.{socket.gethostname()}.{os.getpid()}"
        writer = RecordWriter((self.folder / name).open("xb"))
        self._put(writer, Event(file_version="brain.Event:2"))
        self._put(writer, Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        return writer

    @staticmethod
    def _put(writer: RecordWriter, event: Event) -> None:
        event.wall_time = time.time()
        writer.write(event.SerializeToString())
        writer.flush()


def _group(name: str) -> str:
    if name.startswith("seconds"):
        return "time"
    return "balance" if name in BALANCE else "train"
