"""Names of the training bench: contenders and stages."""

from __future__ import annotations

__all__ = ["BALANCED", "EQUILIBRA", "NAMES", "PARTS", "STAGES", "STATIC"]

STATIC, EQUILIBRA, BALANCED = "static", "equilibra", "balanced"
NAMES = (STATIC, EQUILIBRA, BALANCED)
STAGES = ("rollout", "reward", "plan", "move", "recompute", "advantages", "update", "weights")
PARTS = ("counts", "planner", "move", "arm", "send")
"""of plan and move"""
