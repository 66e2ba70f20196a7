"""The MoE model, as far as balancing it goes: shapes, and from them bytes and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass

from equilibra.core.errors import InputError

__all__ = ["MODELS", "MoEModel", "model_named"]


@dataclass(frozen=True, kw_only=True)
class MoEModel:
    """Shapes of the MoE layers; experts are SwiGLU blocks of three matrices hidden x expert_ffn."""

    name: str
    """lower case, as in the command line"""
    num_layers: int
    """MoE layers (dense layers do not count)"""
    hidden: int
    """width of a token"""
    expert_ffn: int
    """inner width of one expert"""
    num_experts: int
    """routed experts per layer"""
    top_k: int
    """experts each token goes to"""
    weight_bytes: int = 2
    """bytes of one weight while training (bf16)"""
    gradient_bytes: int = 4
    """bytes of one accumulated gradient (fp32)"""
    state_bytes: int = 12
    """bytes of optimizer state per weight: fp32 master and two moments"""

    def __post_init__(self) -> None:
        for field in ("num_layers", "hidden", "expert_ffn", "num_experts", "top_k", "weight_bytes"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise InputError(f"model {self.name}: {field} must be a whole number above 0, not {value!r}")
        if self.top_k > self.num_experts:
            raise InputError(f"model {self.name}: top-{self.top_k} of {self.num_experts} experts is impossible")

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.expert_ffn

    @property
    def expert_bytes(self) -> int:
        """What a copy of one expert weighs."""
        return self.expert_parameters * self.weight_bytes

    @property
    def expert_gradient_bytes(self) -> int:
        """What returns home from a copy."""
        return self.expert_parameters * self.gradient_bytes

    @property
    def expert_home_bytes(self) -> int:
        """What moves when an expert moves home: weights and optimizer state."""
        return self.expert_parameters * (self.weight_bytes + self.state_bytes)


def _model(name: str, layers: int, hidden: int, ffn: int, experts: int, top_k: int) -> MoEModel:
    return MoEModel(name=name, num_layers=layers, hidden=hidden, expert_ffn=ffn, num_experts=experts, top_k=top_k)


# The shapes are those of the models' published configurations.
MODELS: dict[str, MoEModel] = {
    model.name: model
    for model in (
        _model("qwen3-30b-a3b", 48, 2048, 768, 128, 8),
        _model("qwen3-235b-a22b", 94, 4096, 1536, 128, 8),
        _model("deepseek-v3", 58, 7168, 2048, 256, 8),
        _model("kimi-k2", 60, 7168, 2048, 384, 8),
        _model("glm-4.5-air", 45, 4096, 1408, 128, 8),
        _model("gpt-oss-20b", 24, 2880, 2880, 32, 4),
        _model("gpt-oss-120b", 36, 2880, 2880, 128, 4),
        _model("olmoe", 16, 2048, 1024, 64, 8),
        _model("moonlight", 26, 2048, 1408, 64, 6),
        _model("qwen3-next", 48, 2048, 512, 512, 10),
    )
}


def model_named(name: str) -> MoEModel:
    """The preset of that name; an error that lists the names otherwise."""
    try:
        return MODELS[name]
    except KeyError:
        raise InputError(f"no model is named {name!r}; use one of {', '.join(MODELS)}") from None
