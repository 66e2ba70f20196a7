"""Faults that a run makes on purpose, each in a step of its own, so that the comparisons must notice them.

EQUILIBRA_TEST_FAULTS names them with their steps: `gradients=1,stale=2`.
"""

from __future__ import annotations

import os

__all__ = ["GRADIENTS", "SHIFTED", "STALE", "happens", "planned"]

GRADIENTS = "gradients"
"""gradients of copies are dropped"""
STALE = "stale"
"""vLLM samples from the experts before the last update"""
SHIFTED = "shifted"
"""every layer replays the routing of the layer before it"""


def planned() -> dict[str, int]:
    """Faults of this run with their steps."""
    named = [one.split("=") for one in os.environ.get("EQUILIBRA_TEST_FAULTS", "").split(",") if one]
    return {fault: int(step) for fault, step in named}


def happens(fault: str, *, step: int) -> bool:
    return planned().get(fault) == step
