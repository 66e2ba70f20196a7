"""The model that a rollout was recorded of, and how another one differs from it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from equilibra.core.errors import InputError

__all__ = ["ModelShape"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What samples depend on: whoever agrees in all of this can train on them."""

    family: str
    """transformers' model_type"""
    num_layers: int
    """MoE layers"""
    num_experts: int
    """of a layer"""
    top_k: int
    """experts per token"""
    vocabulary: int
    """token ids are below it"""
    tokenizer: str
    """digest of the tokenizer: with another one ids mean other words"""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, wanted = getattr(self, field.name), "text" if field.type == "str" else "a whole number above 0"
            right = isinstance(value, str) if field.type == "str" else type(value) is int and value > 0
            if not right:
                raise InputError(f"{field.name} of a recorded model must be {wanted}, not {value!r:.60}")
        if self.top_k > self.num_experts:
            raise InputError(f"{self.top_k} experts per token need at least as many experts, not {self.num_experts}")

    def differences(self, yours: ModelShape) -> list[str]:
        """In words, each to be read after "a model"."""
        found = []
        if self.family != yours.family:
            found.append(f"of the family {self.family!r}, yours is of {yours.family!r}")
        words = {
            "num_layers": "MoE layers", "num_experts": "experts", "top_k": "experts per token",
            "vocabulary": "token ids",
        }  # fmt: skip
        for name, word in words.items():
            recorded, own = getattr(self, name), getattr(yours, name)
            if recorded != own:
                found.append(f"with {recorded} {word}, yours has {own}")
        if self.tokenizer != yours.tokenizer:
            found.append(f"with the tokenizer {self.tokenizer:.12}, yours is {yours.tokenizer:.12}")
        return found
