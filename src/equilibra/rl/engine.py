"""The protocol of rollout engines: prompts in, answers out, with the experts of every token.

An engine has its own weights. After every update it gets the new ones under their published names, in logical order,
whatever the trainer's placement. The embedded engine is `integrations.hf.Replica`; `integrations.sglang` and
`integrations.vllm` have the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

UNKNOWN = -1
"""version of weights that did not come from this run"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One answer to start or to continue."""

    tokens: NDArray[np.int64]
    """[N] prompt and the answer so far"""
    noise: NDArray[np.float64]
    """one number in [0, 1) per token to generate: the same noise gives the same answer in any batch"""

    @property
    def max_new(self) -> int:
        return int(self.noise.size)

    def unanswered(self, shape: tuple[int, int]) -> Generation:
        """The empty generation for a request of no tokens. shape: MoE layers, experts per token."""
        experts = np.full((self.tokens.size - 1, *shape), -1, np.int32)
        return Generation(tokens=np.zeros(0, np.int64), logprobs=np.zeros(0), experts=experts, ended=False)


def seed_of(request: Request) -> int:
    """A 31-bit seed for engines that take one; a function of the noise."""
    return int.from_bytes(hashlib.sha256(request.noise.tobytes()).digest()[:4], "big") >> 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Generation:
    """The answer to a request."""

    tokens: NDArray[np.int64]
    """[A] new tokens, with the end-of-text token if it was generated"""
    logprobs: NDArray[np.float64]
    """[A] log-probability of each at the sampling temperature"""
    experts: NDArray[np.int32]
    """[N + A - 1, L, K] experts of all tokens but the last, which is never processed; -1: unknown"""
    ended: bool
    """whether the end-of-text token was generated"""
    version: int | None = None
    """version of the weights that the engine reports, `UNKNOWN` if not from this run; None: not reported"""


class Engine(Protocol):
    """Generates answers and reports their routing."""

    @property
    def roundoff(self) -> float:
        """Unit roundoff of the engine's products."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Collective: load new weights. Every engine must read the stream to its end."""

    def generate(self, requests: Sequence[Request], *, temperature: float) -> list[Generation]:
        """Answer all requests; temperature 0 is greedy."""
