"""Rollout engines: whatever turns prompts into answers and says which experts every token went to.

An engine has weights of its own: after every update it is given the new ones by their published names, in logical
order, whatever the placement of the trainer is. The embedded one is `integrations.hf.Replica`; those of
`integrations.sglang` and `integrations.vllm` implement the same protocol.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["UNKNOWN", "Engine", "Generation", "Request", "seed_of"]

UNKNOWN = -1
"""version of weights that the run did not hand over"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One answer to begin, or to go on with."""

    tokens: NDArray[np.int64]
    """[N] prompt, and the answer so far"""
    noise: NDArray[np.float64]
    """one number in [0, 1) for each token to come: the same noise gives the same answer, whatever the batch is"""

    @property
    def max_new(self) -> int:
        """Tokens that may be generated."""
        return int(self.noise.size)

    def unanswered(self, shape: tuple[int, int]) -> Generation:
        """No token was asked for: nothing is generated, and no routing known. shape: MoE layers, experts per token."""
        experts = np.full((self.tokens.size - 1, *shape), -1, np.int32)
        return Generation(tokens=np.zeros(0, np.int64), logprobs=np.zeros(0), experts=experts, ended=False)


def seed_of(request: Request) -> int:
    """31 bits for engines that take a seed: the same noise gives the same one."""
    return int.from_bytes(hashlib.sha256(request.noise.tobytes()).digest()[:4], "big") >> 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Generation:
    """What was generated for a request."""

    tokens: NDArray[np.int64]
    """[A] new tokens, with the one that ends the answer if it came"""
    logprobs: NDArray[np.float64]
    """[A] log-probability of each, under the temperature it was drawn with"""
    experts: NDArray[np.int32]
    """[N + A - 1, L, K] experts of every token that was processed, -1 where the engine does not know; the last token
    is never processed"""
    ended: bool
    """whether the token that ends an answer came"""
    version: int | None = None
    """of the weights that the engine says it answered with, `UNKNOWN` if it is none of ours; None: it does not say"""


class Engine(Protocol):
    """Prompts in, answers with routing out."""

    @property
    def roundoff(self) -> float:
        """Unit roundoff of its products."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Take new weights, and answer with their version from now on.

        All ranks call it together; every engine must read the stream to its end.
        """

    def generate(self, requests: Sequence[Request], *, temperature: float) -> list[Generation]:
        """Answer all requests; temperature 0 takes the likeliest token."""
