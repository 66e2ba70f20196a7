"""Shapes of MoE models, and the parameters and bytes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from equilibra.core.checks import check_number, check_whole
from equilibra.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class MoEModel:
    """Shapes of the MoE layers; experts are SwiGLU blocks of three matrices hidden x expert_ffn."""

    name: str
    """lower case, as on the command line"""
    num_layers: int
    """MoE layers, without dense layers"""
    hidden: int
    """width of a token"""
    expert_ffn: int
    """inner width of one expert"""
    num_experts: int
    """routed experts per layer"""
    top_k: int
    """experts per token"""
    dense_parameters: int = 0
    """weights of a layer that every token uses: attention, router, shared experts; 0 means 4 hidden²"""
    attention_width: int = 0
    """attention heads x head size, mean of the query-key and value sides; 0 means hidden"""
    quadratic_share: float = 1.0
    """share of layers with full attention; the others cost only their projections"""
    outer_parameters: int = 0
    """weights outside the MoE layers that every token uses: dense layers and the output head"""
    embedding_parameters: int = 0
    """weights that are looked up, not multiplied"""
    num_dense_layers: int = 0
    """layers without experts, whose weights are among the outer ones"""
    num_heads: int = 0
    """query heads; 0: the attention is unknown, so decoding has no law"""
    cache_heads: int = 0
    """key-value heads that tensor parallelism can divide; 1: a latent, which every rank keeps whole"""
    cache_values: int = 0
    """numbers cached per token and layer: keys and values of all heads, or the latent"""
    score_width: int = 0
    """multiplications per query and cached token, mean of scores and values; of a latent, with absorbed projections"""
    window: int = 0
    """last tokens that layers without full attention cache; 0: unknown"""
    weight_bytes: int = 2
    """bytes of one weight while training (bf16)"""
    gradient_bytes: int = 4
    """bytes of one accumulated gradient (fp32)"""
    state_bytes: int = 12
    """bytes of optimizer state per weight: fp32 master and two moments"""

    def __post_init__(self) -> None:
        above_0 = ("num_layers", "hidden", "expert_ffn", "num_experts", "top_k", "weight_bytes")
        others = ("dense_parameters", "attention_width", "outer_parameters", "embedding_parameters", "gradient_bytes",
                  "state_bytes", "num_dense_layers", "num_heads", "cache_heads", "cache_values", "score_width",
                  "window")  # fmt: skip
        for name in (*above_0, *others):
            check_whole(f"model {self.name}: {name}", getattr(self, name), low=int(name in above_0), high=2**50 - 1)
        check_number(f"model {self.name}: quadratic_share", self.quadratic_share, high=1)
        if self.dense_parameters == 0:
            object.__setattr__(self, "dense_parameters", 4 * self.hidden**2)
        if self.attention_width == 0:
            object.__setattr__(self, "attention_width", self.hidden)
        if self.top_k > self.num_experts:
            raise InputError(f"model {self.name}: top-{self.top_k} of {self.num_experts} experts is impossible")

    @property
    def expert_parameters(self) -> int:
        return 3 * self.hidden * self.expert_ffn

    @property
    def expert_bytes(self) -> int:
        """Bytes of a copy: weights."""
        return self.expert_parameters * self.weight_bytes

    @property
    def expert_gradient_bytes(self) -> int:
        """Bytes that a copy returns home: gradients."""
        return self.expert_parameters * self.gradient_bytes

    @property
    def expert_home_bytes(self) -> int:
        """Bytes that a migration moves: weights and optimizer state."""
        return self.expert_parameters * (self.weight_bytes + self.state_bytes)


class Latent(NamedTuple):
    """Multi-head latent attention: low-rank keys and values, and queries too if query_rank is not 0."""

    query_rank: int
    heads: int
    rank: int = 512
    plain: int = 128
    rotary: int = 64
    value: int = 128

    def cached(self) -> dict[str, int]:
        """Fields of a model about its cache."""
        return {"num_heads": self.heads, "cache_heads": 1, "cache_values": self.rank + self.rotary,
                "score_width": self.heads * (2 * self.rank + self.rotary) // 2}  # fmt: skip

    def width(self) -> int:
        """Heads x head size, mean of the query-key and value sides."""
        return self.heads * (self.plain + self.rotary + self.value) // 2

    def parameters(self, hidden: int) -> int:
        query = self.heads * (self.plain + self.rotary)
        into = self.query_rank * (hidden + query) if self.query_rank else hidden * query
        latent = hidden * (self.rank + self.rotary) + self.rank * self.heads * (self.plain + self.value)
        return into + latent + self.heads * self.value * hidden


class Heads(NamedTuple):
    """Grouped-query attention: fewer key-value heads than query heads."""

    heads: int
    size: int
    key_value_heads: int

    def cached(self) -> dict[str, int]:
        """Fields of a model about its cache."""
        return {"num_heads": self.heads, "cache_heads": self.key_value_heads, "score_width": self.heads * self.size,
                "cache_values": 2 * self.key_value_heads * self.size}  # fmt: skip

    def width(self) -> int:
        return self.heads * self.size

    def parameters(self, hidden: int) -> int:
        return 2 * hidden * self.size * (self.heads + self.key_value_heads)


def moe_model(
    name: str,
    shape: tuple[int, int, int, int, int],
    attention: Heads | Latent,
    *,
    vocabulary: int,
    shared_ffn: int = 0,
    dense: tuple[int, int] = (0, 0),
    quadratic_share: float = 1.0,
    window: int = 0,
) -> MoEModel:
    """A model of shape (MoE layers, hidden, expert FFN, experts, top-k); dense is (layers, FFN)."""
    layers, hidden, ffn, experts, top_k = shape
    of_attention = attention.parameters(hidden)
    dense_layers, dense_ffn = dense
    return MoEModel(
        name=name, num_layers=layers, hidden=hidden, expert_ffn=ffn, num_experts=experts, top_k=top_k,
        dense_parameters=of_attention + 3 * hidden * shared_ffn + hidden * experts,
        attention_width=attention.width(), quadratic_share=quadratic_share,
        outer_parameters=dense_layers * (of_attention + 3 * hidden * dense_ffn) + vocabulary * hidden,
        embedding_parameters=vocabulary * hidden, num_dense_layers=dense_layers, window=window, **attention.cached(),
    )  # fmt: skip


# Shapes from the published configurations. Linear-attention layers (three of four in Qwen3-Next) and windowed layers
# (gpt-oss) count like full ones, except for the cost that is quadratic in length. The heads of the 317B model are not
# published: 64 and 8 make up its total.
MODELS: dict[str, MoEModel] = {
    model.name: model
    for model in (
        moe_model("qwen3-30b-a3b", (48, 2048, 768, 128, 8), Heads(32, 128, 4), vocabulary=151_936),
        moe_model("qwen3-235b-a22b", (94, 4096, 1536, 128, 8), Heads(64, 128, 4), vocabulary=151_936),
        moe_model("deepseek-v3", (58, 7168, 2048, 256, 8), Latent(1536, 128), vocabulary=129_280, shared_ffn=2048,
               dense=(3, 18_432)),
        moe_model("kimi-k2", (60, 7168, 2048, 384, 8), Latent(1536, 64), vocabulary=163_840, shared_ffn=2048,
               dense=(1, 18_432)),
        moe_model("glm-4.5-air", (45, 4096, 1408, 128, 8), Heads(96, 128, 8), vocabulary=151_552, shared_ffn=1408,
               dense=(1, 10_944)),
        moe_model("gpt-oss-20b", (24, 2880, 2880, 32, 4), Heads(64, 64, 8), vocabulary=201_088, quadratic_share=0.5,
               window=128),
        moe_model("gpt-oss-120b", (36, 2880, 2880, 128, 4), Heads(64, 64, 8), vocabulary=201_088, quadratic_share=0.5,
               window=128),
        moe_model("olmoe", (16, 2048, 1024, 64, 8), Heads(16, 128, 16), vocabulary=50_304),
        moe_model("moonlight", (26, 2048, 1408, 64, 6), Latent(0, 16), vocabulary=163_840, shared_ffn=2 * 1408,
               dense=(1, 11_264)),
        moe_model("qwen3-next", (48, 2048, 512, 512, 10), Heads(32, 128, 16), vocabulary=151_936, shared_ffn=512,
               quadratic_share=0.25),
        moe_model("mixtral-8x22b", (56, 6144, 16_384, 8, 2), Heads(48, 128, 8), vocabulary=32_000),
        moe_model("dbrx", (40, 6144, 10_752, 16, 4), Heads(48, 128, 8), vocabulary=100_352),
        moe_model("scaled-moe-317b", (48, 8192, 8192, 32, 4), Heads(64, 128, 8), vocabulary=32_000),
    )
}  # fmt: skip


def model_named(name: str) -> MoEModel:
    """The preset of that name; InputError lists the names if there is none."""
    try:
        return MODELS[name]
    except KeyError:
        raise InputError(f"no model is named {name!r}; use one of {', '.join(MODELS)}") from None
