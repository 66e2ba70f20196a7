"""Settings of the training bench: sizes of the model and of a step, checked before any process starts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite

from benchmarks.runtime.case import CLUSTER
from equilibra.core.errors import InputError

STATIC, EQUILIBRA, MOVES, BALANCED = "static", "equilibra", "equilibra-moves", "balanced"
NAMES = (STATIC, EQUILIBRA, MOVES, BALANCED)
PLANNED = (EQUILIBRA, MOVES)
"""contenders that are balanced by a plan"""
STAGES = ("rollout", "reward", "plan", "move", "logprob", "advantages", "update", "weights")
PARTS = ("counts", "planner", "move", "arm", "send")
"""parts of the stages plan and move"""
MOST = 1 << 20
"""limit of every number; more is a typing error"""
MOST_BYTES = 12 << 30
"""limit for all contenders on both ranks"""
PROMPT_TOKENS = 96
"""longest prompt"""


@dataclass(frozen=True, kw_only=True)
class TrainSetting:
    """One model, one kind of step."""

    hidden: int = 256
    """width of a token; a multiple of 64"""
    ffn: int = 1024
    """inner width of an expert"""
    layers: int = 4
    """MoE layers"""
    experts: int = 16
    """experts per layer; half of them are at home on each rank"""
    top_k: int = 4
    """experts of a token"""
    skew: float = 0.35
    """how far scores of the favoured experts are above those of the others, in units of the scores' own spread"""
    prompts: int = 12
    """problems of a step, on both ranks together"""
    answers: int = 8
    """answers to each problem"""
    answer_tokens: int = 128
    """longest answer"""
    mini_batches: int = 2
    """optimizer steps of a step"""
    tokens_per_rank: int = 1024
    """token budget of a rank's part of a micro-batch"""
    spare_slots: int = 2
    """flash copies a rank can hold"""
    path: str = "collective"
    """how flash copies travel"""
    repeats: int = 5
    """timed rounds of all contenders"""
    patience: int = 60
    """seconds for waiting until other programs are quiet and running disturbed steps again"""
    seed: int = 0
    """seed of weights, answers and rewards"""
    timeout_s: float = 300.0
    """seconds after which a silent rank is lost"""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            least = 0 if one.name in ("seed", "patience", "skew") else 1
            if isinstance(value, (int, float)) and not (isfinite(value) and least <= value <= MOST):
                raise InputError(f"{one.name} must be from {least} to {MOST}, not {value}")
        self._check_model()
        self._check_step()

    def _check_model(self) -> None:
        if self.hidden % 64:
            raise InputError(f"the hidden width must be a multiple of 64, the width of a head, not {self.hidden}")
        CLUSTER.experts_per_rank(self.experts)
        if self.top_k > self.experts:
            raise InputError(f"{self.top_k} different experts of {self.experts} cannot be chosen for a token")
        if self.model_bytes > MOST_BYTES:
            raise InputError(
                f"{self.layers} layers of {self.experts} experts of {self.hidden} x {self.ffn} need "
                f"{self.model_bytes / 2**30:.0f} GiB on both ranks, {MOST_BYTES >> 30} are allowed: use smaller "
                "--hidden, --ffn, --experts or --layers"
            )

    def _check_step(self) -> None:
        ranks = CLUSTER.num_ranks
        if self.prompts < max(self.mini_batches, ranks):
            raise InputError(
                f"{self.prompts} prompts are too few for {self.mini_batches} mini-batches on {ranks} ranks: use at "
                f"least {max(self.mini_batches, ranks)}"
            )
        if self.answers < 2:
            raise InputError("one answer to a prompt cannot be compared with others: use 2 answers or more")
        longest = PROMPT_TOKENS + self.answer_tokens
        if longest > self.tokens_per_rank:
            raise InputError(
                f"--tokens-per-rank {self.tokens_per_rank} cannot hold a sequence of {PROMPT_TOKENS} + "
                f"{self.answer_tokens} tokens: use at least {longest}, or shorter answers"
            )

    @property
    def model_bytes(self) -> int:
        """Bytes of all experts on both ranks (weights, gradients, two moments) and of two engines' weights."""
        experts = self.layers * self.experts * 3 * self.hidden * self.ffn * 4
        return experts * (len(NAMES) * 4 + CLUSTER.num_ranks)


QUICK: dict[str, int] = {
    "hidden": 64, "ffn": 64, "layers": 2, "experts": 8, "prompts": 4, "answers": 2, "answer_tokens": 16,
    "tokens_per_rank": 128, "repeats": 2, "patience": 1,
}  # fmt: skip
"""a small setting, to see that it runs; not for reporting"""
