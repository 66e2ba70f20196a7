"""What an MoE layer computes: shapes, router and experts, independent of placement."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from equilibra.core.checks import check_whole
from equilibra.core.errors import InputError
from equilibra.execute.kernels import Activation

__all__ = ["Activation", "GroupScore", "MoESpec", "RouterSpec", "Score"]


class Score(StrEnum):
    """How router logits become scores."""

    SOFTMAX = "softmax"
    """over all experts: Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V2; with `normalise` also gpt-oss"""
    SIGMOID = "sigmoid"
    """per expert: DeepSeek-V3"""


class GroupScore(StrEnum):
    """How group-limited routing ranks groups of experts."""

    MAX = "max"
    """by its best expert: DeepSeek-V2"""
    TOP2 = "top2"
    """by the sum of its two best experts: DeepSeek-V3"""


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How tokens are routed to experts."""

    score: Score = Score.SOFTMAX
    normalise: bool = True
    """divide the weights of the chosen experts by their sum"""
    scale: float = 1.0
    """factor on the weights"""
    bias: bool = False
    """whether the linear map to logits has a bias"""
    selection_bias: bool = False
    """whether a bias without gradient is added to the scores for choosing experts, not for weighting them"""
    num_groups: int = 1
    """groups of consecutive experts"""
    top_groups: int = 1
    """groups a token may choose experts from"""
    group_score: GroupScore = GroupScore.TOP2

    def __post_init__(self) -> None:
        if not 1 <= self.top_groups <= self.num_groups:
            raise InputError(f"top_groups must be from 1 to num_groups ({self.num_groups}), not {self.top_groups}")


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """Shapes and functions of one MoE layer."""

    hidden: int
    """width of a token"""
    expert_ffn: int
    """inner width of one expert"""
    num_experts: int
    """routed experts"""
    top_k: int
    """experts per token"""
    router: RouterSpec = field(default_factory=RouterSpec)
    activation: Activation = Activation.SWIGLU
    expert_bias: bool = False
    """whether both matrices of an expert have biases"""
    shared_ffn: int = 0
    """inner width of the shared expert that every token passes; 0: none"""

    def __post_init__(self) -> None:
        for name in ("hidden", "expert_ffn", "num_experts", "top_k"):
            check_whole(name, getattr(self, name), low=1, high=None)
        groups = self.router.num_groups
        if self.num_experts % groups:
            raise InputError(f"{self.num_experts} experts cannot be {groups} equal groups")
        choice = self.num_experts // groups * self.router.top_groups
        if self.top_k > choice:
            raise InputError(f"a token cannot choose {self.top_k} of {choice} experts; lower top_k to {choice}")

    def part_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one expert's parameters by name, in the order of the flat form."""
        shapes: dict[str, tuple[int, ...]] = {"gate_up": (2 * self.expert_ffn, self.hidden)}
        if self.expert_bias:
            shapes["gate_up_bias"] = (2 * self.expert_ffn,)
        shapes["down"] = (self.hidden, self.expert_ffn)
        if self.expert_bias:
            shapes["down_bias"] = (self.hidden,)
        return shapes
