"""What a bench run has at hand, and what several sections share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equilibra.core.load import SequenceLoad
from equilibra.core.plan import Stage, StepPlan
from equilibra.trace.count import sequence_loads
from equilibra.trace.open import load_trace

__all__ = ["LARGE", "MIDDLE", "SMALL", "Row", "Setting", "flash_per_layer", "sequences_of"]

Row = dict[str, Any]
SMALL, MIDDLE, LARGE = 2048, 8192, 32_768


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a bench run has at hand."""

    traces: Path | None
    """folder with routing recordings; sections that need it are left out without it"""
    quick: bool = False
    """few repeats: to see that everything runs, not to report"""


def sequences_of(setting: Setting, name: str) -> SequenceLoad:
    """Loads of the sequences of a recording."""
    assert setting.traces is not None
    return sequence_loads(load_trace(setting.traces / f"{name}.npz"))


def flash_per_layer(plan: StepPlan) -> float:
    """Flash copies per layer and micro-batch."""
    return plan.stages[Stage.UPDATE].num_copies / plan.num_layers / plan.num_micro_batches
