"""Names of the training bench: contenders and stages."""

from __future__ import annotations

__all__ = ["BALANCED", "EQUILIBRA", "MOVES", "NAMES", "PARTS", "PLANNED", "STAGES", "STATIC"]

STATIC, EQUILIBRA, MOVES, BALANCED = "static", "equilibra", "equilibra-moves", "balanced"
NAMES = (STATIC, EQUILIBRA, MOVES, BALANCED)
PLANNED = (EQUILIBRA, MOVES)
"""those that are balanced by a plan"""
STAGES = ("rollout", "reward", "plan", "move", "logprob", "advantages", "update", "weights")
PARTS = ("counts", "planner", "move", "arm", "send")
"""of plan and move"""
