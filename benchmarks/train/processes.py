"""The two processes of the training bench: those of the runtime bench, with a model folder of their own each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.runtime import processes
from benchmarks.train.setting import TrainSetting

if TYPE_CHECKING:
    from equilibra.execute.group import ExpertGroup

__all__ = ["run_on_ranks"]


def run_on_ranks(setting: TrainSetting, tell: Callable[[str], None]) -> dict[str, Any]:
    """What rank 0 measured."""
    return processes.run_on_ranks(_measure, (setting,), tell, timeout_s=setting.timeout_s)


def _measure(setting: TrainSetting, group: ExpertGroup, tell: Callable[[str], None]) -> dict[str, Any]:
    from benchmarks.train.model import write_model_folder  # noqa: PLC0415 - only ranks need torch
    from benchmarks.train.rank import measure  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="equilibra-bench-") as folder:
        write_model_folder(setting, Path(folder))
        return measure(setting, Path(folder), group, tell)
