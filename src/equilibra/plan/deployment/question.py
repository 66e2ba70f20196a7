"""The question that a search of deployments answers, and the plan it finds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from equilibra.core.checks import check_choice, check_number, check_whole
from equilibra.core.errors import InputError
from equilibra.core.model import MoEModel
from equilibra.cost.decode import Context, DecodeLaw, check_decodes, decode_law
from equilibra.cost.prices import Prices

MEMORY_SHARE = 0.9
"""share of device memory for weights and caches; the rest is for activations and the runtime"""
OBJECTIVES = ("gpu", "cost")


@dataclass(frozen=True, kw_only=True)
class Side:
    """Hardware of attention or of experts, and its decode law."""

    prices: Prices
    law: DecodeLaw
    cost_per_hour: float
    """of a rank, in any one unit; 0: unknown"""

    @classmethod
    def of(cls, prices: Prices, *, of_h200: DecodeLaw | None = None, cost_per_hour: float | None = None) -> Side:
        """A side with these prices; its law follows from the ratios of its rates to the H200's."""
        cost = prices.cost_per_hour if cost_per_hour is None else cost_per_hour
        check_number("cost per hour", cost)
        return cls(prices=prices, law=decode_law(prices, of_h200), cost_per_hour=cost)

    @property
    def room_bytes(self) -> float:
        return MEMORY_SHARE * self.prices.memory_bytes


@dataclass(frozen=True, kw_only=True)
class Question:
    """Which deployment decodes the most tokens within the latency?"""

    model: MoEModel
    attention: Side
    experts: Side
    context: Context
    latency_us: float
    """longest time between two tokens of a sequence"""
    max_ranks: int = 64
    """ranks of one deployment, both sides together"""
    max_micro_batches: int = 4
    imbalance: float = 1.0
    """rows of the fullest expert node over the mean"""
    overlap: bool = True
    """colocated groups may overlap two micro-batches"""
    objective: str = "gpu"
    """tokens per second and rank (gpu), or per cost"""

    def __post_init__(self) -> None:
        check_decodes(self.model)
        check_number("latency", self.latency_us * 1e-3, above=0.0)
        check_whole("ranks", self.max_ranks, low=1, high=65_536)
        check_whole("micro-batches", self.max_micro_batches, low=1, high=16)
        check_number("imbalance", self.imbalance, low=1, high=self.model.num_experts)
        check_choice("objective", self.objective, OBJECTIVES)
        if self.objective == "cost" and not (self.attention.cost_per_hour and self.experts.cost_per_hour):
            unknown = self.experts if self.attention.cost_per_hour else self.attention
            raise InputError(
                f"hardware {unknown.prices.name} has no known cost per hour: give --attention-cost and --expert-cost, "
                "in one unit, or optimise throughput per GPU"
            )

    @property
    def one_hardware(self) -> bool:
        return self.attention.prices == self.experts.prices


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A deployment and its predicted times; T_a, T_e and T_c are of one micro-batch and layer."""

    kind: str
    """disaggregated or colocated"""
    hardware: tuple[str, str]
    """that of attention and that of experts"""
    attention_nodes: int
    attention_tensor: int
    """tensor-parallel ranks of an attention node"""
    expert_nodes: int
    expert_tensor: int
    """tensor-parallel ranks of an expert node"""
    micro_batches: int
    batch: int
    """sequences of one micro-batch on one attention node"""
    ranks: int
    cost_per_hour: float
    t_a_us: float
    t_e_us: float
    t_c_us: float
    outer_us: float
    """dense layers and output head of a micro-batch"""
    latency_us: float
    """between two tokens of a sequence"""
    memory_bytes: tuple[float, float]
    """of a rank of attention and of experts; colocated ranks hold both"""

    @property
    def sequences(self) -> int:
        """Sequences decoded at once."""
        return self.batch * self.micro_batches * self.attention_nodes

    @property
    def tokens_per_s(self) -> float:
        return self.sequences * 1e6 / self.latency_us

    @property
    def tokens_per_s_and_rank(self) -> float:
        return self.tokens_per_s / self.ranks

    @property
    def tokens_per_cost(self) -> float:
        """Tokens per unit of cost; 0 if a cost is unknown."""
        return self.tokens_per_s * 3600 / self.cost_per_hour if self.cost_per_hour else 0.0

    def value(self, objective: str) -> float:
        return self.tokens_per_cost if objective == "cost" else self.tokens_per_s_and_rank

    def to_json(self) -> dict[str, Any]:
        names = ("sequences", "tokens_per_s", "tokens_per_s_and_rank", "tokens_per_cost")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}
