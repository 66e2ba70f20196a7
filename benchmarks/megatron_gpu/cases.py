"""Shapes of models, and the cases to measure. No torch.

Symbols: E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and the size of its step."""

    hidden: int
    expert_ffn: int
    num_experts: int
    top_k: int
    num_layers: int = 2
    """all of them MoE layers"""
    sequence: int = 1024
    """tokens of a sequence"""
    sequences: int = 4
    """sequences of a rank's micro-batch"""
    micro_batches: int = 4
    """micro-batches per optimizer step"""
    heads: int = 8
    head_width: int = 64
    """width of attention heads; narrower than the model's, because here links are slow, not attention"""
    vocabulary: int = 1024
    skew: float = 0.847
    """popularity skew of the routing; 0.847 is what `fit_knobs` finds in a recording of gpt-oss-20b"""

    @property
    def tokens(self) -> int:
        return self.sequence * self.sequences

    @property
    def expert_bytes(self) -> int:
        return 6 * self.hidden * self.expert_ffn

    def words(self) -> str:
        return (
            f"hidden {self.hidden}, expert FFN {self.expert_ffn}, {self.num_experts} experts, top {self.top_k}, "
            f"{self.num_layers} layers, {self.tokens} tokens per rank and micro-batch, {self.micro_batches} of them"
        )


SHAPES = {
    "gpt-oss-20b": Shape(hidden=2880, expert_ffn=2880, num_experts=32, top_k=4),
    "qwen3-30b": Shape(hidden=2048, expert_ffn=768, num_experts=128, top_k=8, skew=1.6),
    "small": Shape(
        hidden=512, expert_ffn=512, num_experts=16, top_k=2, sequence=256, sequences=2, vocabulary=256, skew=1.0
    ),
    "tiny": Shape(
        hidden=32, expert_ffn=48, num_experts=8, top_k=2, sequence=16, sequences=2, heads=2, head_width=8,
        vocabulary=32, skew=1.0,
    ),
}  # fmt: skip
"""by name; the first two are published models with fewer layers"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train, measured or checked."""

    name: str
    shape: str
    """name of a shape"""
    kind: str = "gpt"
    """gpt: GPTModel, DDP and DistributedOptimizer. layer: one MoELayer, with torch's Adam"""
    dtype: str = "bfloat16"
    experts: str = "grouped"
    """grouped: our Triton kernels in Megatron's layer. sequential: Megatron's SequentialMLP"""
    links: str = "ipc"
    """how Megatron's all-to-all dispatcher moves tokens: ipc, or nccl (its own, here through sockets)"""
    recompute: bool = False
    """full activation recompute"""
    fused: bool = False
    """weight gradients are added to float32 main_grad where they are computed"""
    timed: bool = True
    """whether steps are timed; if not, only losses are compared"""
    check_steps: int = 7
    """optimizer steps whose losses are compared"""
    repeats: int = 6
    """timed steps of each contender"""
    control: bool = False
    """train a third time with gradients of copies dropped; its losses must differ"""
    options: dict[str, Any] = field(default_factory=dict)
    """fields of MegatronSetting, in addition to the command's"""


CHECK: dict[str, Any] = {"shape": "small", "dtype": "float32", "timed": False, "links": "nccl"}
CASES = (
    Case(name="check-float32", control=True, **CHECK),
    Case(name="gpt-fused", shape="gpt-oss-20b", fused=True),
    Case(name="gpt-fused-recompute", shape="gpt-oss-20b", fused=True, recompute=True),
    Case(name="layer", shape="gpt-oss-20b", kind="layer"),
    Case(name="check-float32-recompute", recompute=True, **CHECK),
    Case(name="check-float32-layer", kind="layer", control=True, **CHECK),
    Case(name="check-float32-sequential", experts="sequential", **CHECK),
    Case(name="gpt", shape="gpt-oss-20b"),
    Case(name="gpt-fused-nccl", shape="gpt-oss-20b", fused=True, links="nccl", check_steps=2, repeats=3),
    Case(name="gpt-sequential", shape="gpt-oss-20b", experts="sequential", check_steps=2, repeats=4),
    Case(name="gpt-fused-qwen3", shape="qwen3-30b", fused=True, check_steps=2, repeats=4),
)
"""in running order, the most informative first"""


def cases_named(names: list[str]) -> list[Case]:
    """The named cases in the order of `CASES`; all without names."""
    known = [case.name for case in CASES]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no case is named {unknown[0]!r}; use some of {', '.join(known)}")
    return [case for case in CASES if not names or case.name in names]


def cases_of(cases: list[Case], *, tiny: bool, device: str, links: str | None) -> list[Case]:
    """Cases adapted to the machine: tiny shapes if asked for, links through GPU memory only on GPUs."""
    if device == "cpu":
        links = "nccl"
    changed = [replace(case, links=links or case.links) for case in cases]
    return [replace(case, shape="tiny", repeats=2) for case in changed] if tiny else changed
