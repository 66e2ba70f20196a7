"""Requests to rollout engines, their answers with the experts of every token, and the samples that training takes.

Symbols: N tokens of a request, P prompt tokens, A answer tokens so far, L MoE layers, K experts per token.

An engine has its own weights. After every update it gets the new ones under their published names, in logical order,
whatever the trainer's placement. The embedded engine is `integrations.hf.Replica`; `integrations.sglang` and
`integrations.vllm` have the others.

An answer may grow over several windows of generation (T-PPO), each with its own version of the weights: one segment per
window. The engine processes all tokens but the last, so P + A - 1 tokens have routing and are inputs of training; the
last is only a target.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import InputError

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """What one window of generation added to an answer."""

    version: int
    """optimizer steps behind the weights that generated it"""
    start: int
    """first answer token of the segment"""
    end: int
    """one past its last answer token"""
    first_row: int
    """index in prompt + answer of the first row of `experts`"""
    experts: NDArray[np.int32]
    """[rows, L, K] experts of the tokens processed in this window, -1 where unknown; the newest segment covers all
    tokens, older ones keep only their own"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One answer, possibly unfinished."""

    problem: int
    """number of the problem in its task"""
    group: int
    """equal for all samples of a step with the same prompt"""
    number: int
    """number of the answer within its group"""
    prompt: NDArray[np.int64]
    """[P] token ids"""
    answer: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """[A] token ids, with the end-of-text token if generated"""
    logprobs: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0, np.float64))
    """[A] the engine's log-probability of each answer token"""
    segments: tuple[Segment, ...] = ()
    """in order; they cover the answer"""
    finished: bool = False
    """whether the answer ended or reached the length limit"""
    reward: float = 0.0

    def __post_init__(self) -> None:
        ends = [0, *(segment.end for segment in self.segments)]
        starts = [*(segment.start for segment in self.segments), self.answer.size]
        if ends != starts or self.logprobs.shape != self.answer.shape or self.prompt.size == 0:
            raise InputError(
                f"{self.prompt.size} + {self.answer.size} tokens have {self.logprobs.size} log-probabilities "
                f"and segments that end at {ends[1:]}: each answer token needs one, and segments must cover the answer"
            )

    @property
    def tokens(self) -> NDArray[np.int64]:
        """[P + A] prompt and answer."""
        return np.concatenate([self.prompt, self.answer])

    @property
    def num_rows(self) -> int:
        """Tokens that the model processes: all but the last."""
        return self.prompt.size + self.answer.size - 1

    @property
    def experts(self) -> NDArray[np.int32]:
        """[P + A - 1, L, K] routing to replay: that of the newest window."""
        return self.segments[-1].experts

    @property
    def fresh(self) -> int:
        """First answer token of the newest segment."""
        return self.segments[-1].start if self.segments else 0

    def grown(
        self, *, answer: NDArray[np.int64], logprobs: NDArray[np.float64], experts: NDArray[np.int32], version: int,
        finished: bool,
    ) -> Sample:  # fmt: skip
        """The sample with one more window; older segments keep only their own tokens' routing."""
        start, end = self.answer.size, self.answer.size + answer.size
        rows = self.prompt.size + end - 1
        if len(experts) != rows:
            raise InputError(f"a sample of {rows + 1} tokens needs routing of {rows} tokens, not of {len(experts)}")
        older = list(self.segments)
        if older:
            last, first_row = older[-1], 0 if len(older) == 1 else self.prompt.size + older[-1].start - 1
            older[-1] = replace(last, first_row=first_row, experts=last.experts[first_row - last.first_row :])
        newest = Segment(version=version, start=start, end=end, first_row=0, experts=experts)
        return replace(
            self,
            answer=np.concatenate([self.answer, answer]),
            logprobs=np.concatenate([self.logprobs, logprobs]),
            segments=(*older, newest),
            finished=finished,
        )
