"""Lengths of the sequences that are decoded at once: mean, deviation and limit of their contexts.

A long answer stays in the batch longer, so at any moment long answers are over-represented and each is at an even
chance anywhere in its length. For prompts of p tokens and answers of a tokens, both random, the context of a sequence
found in the batch has

    mean      E[a p] / E[a] + E[a²] / 2 E[a]            second moment  E[a (p² + p a + a²/3)] / E[a]

A batch that is always full sees these, not the mean answer: with a long tail they are several times it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from equilibra.core.atomic import cannot
from equilibra.core.checks import check_number
from equilibra.core.errors import InputError

__all__ = ["Context", "context_of_file", "context_of_lengths", "lognormal_context"]

SAMPLES = 4096


@dataclass(frozen=True, kw_only=True)
class Context:
    """Tokens that a sequence in the batch has in the cache."""

    mean: float
    """over sequences and time"""
    deviation: float = 0.0
    """standard deviation of one sequence"""
    longest: float = 0.0
    """longest sequence, prompt and answer; 0: the mean"""
    mean_answer: float = 0.0
    """tokens of an answer, over answers; 0: unknown"""
    longest_answer: float = 0.0
    """tokens of the longest answer; 0: unknown"""

    def __post_init__(self) -> None:
        check_number("context", self.mean, low=1, high=1e8)
        for name in ("deviation", "longest", "mean_answer", "longest_answer"):
            check_number(f"context: {name}", getattr(self, name), high=1e9)
        if self.longest == 0:
            object.__setattr__(self, "longest", self.mean)


def context_of_lengths(answers: ArrayLike, prompts: ArrayLike = 0.0) -> Context:
    """The context in a batch that is kept full with such answers, in tokens, to such prompts (each, or one number)."""
    a, p = np.broadcast_arrays(np.asarray(answers, np.float64), np.asarray(prompts, np.float64))
    if a.ndim != 1 or a.size == 0 or not np.isfinite(a).all() or a.min() < 1 or p.min() < 0 or a.max() + p.max() > 1e8:
        raise InputError("lengths must be a list of answers of 1 to 100 million tokens, and prompts of 0 or more")
    total = a.sum()
    mean = float((a * (p + a / 2)).sum() / total)
    square = float((a * (p * p + p * a + a * a / 3)).sum() / total)
    return Context(
        mean=mean, deviation=float(np.sqrt(max(square - mean * mean, 0.0))), longest=float((a + p).max()),
        mean_answer=float(a.mean()), longest_answer=float(a.max()),
    )  # fmt: skip


def lognormal_context(*, prompt: float, median: float, sigma: float, limit: float | None = None) -> Context:
    """Answers with a lognormal length, cut at a limit: a recipe's long tail."""
    from statistics import NormalDist  # noqa: PLC0415 - only here

    check_number("median answer", median, low=1, high=1e8)
    check_number("sigma", sigma, high=4)
    check_number("prompt", prompt, high=1e8)
    if limit is not None:
        check_number("answer limit", limit, low=1)
    normal = NormalDist()
    steps = [normal.inv_cdf((i + 0.5) / SAMPLES) for i in range(SAMPLES)]
    answers = np.minimum(median * np.exp(sigma * np.array(steps)), inf if limit is None else limit)
    return context_of_lengths(np.maximum(answers, 1.0), prompt)


def context_of_file(path: Path, prompt: float | None = None) -> Context:
    """Lengths from JSON: a list of answers, {"answers": [...], "prompts": [...] or n}, or
    {"percentiles": {"50": n, ...}, "prompts": n} of answers, straight between the given ones. prompt: of files without.
    """
    try:
        said = json.loads(path.read_text())
    except OSError as error:
        raise cannot("read", path, error) from error
    except ValueError as error:
        raise InputError(f"cannot read {path}: not valid JSON ({error})") from error
    said = {"answers": said} if isinstance(said, list) else said
    if not isinstance(said, dict) or said.keys() - {"prompts"} not in ({"answers"}, {"percentiles"}):
        raise InputError(
            f"{path}: give a list of answer lengths, or an object with answers or percentiles, and prompts"
        )
    if prompt is not None and "prompts" in said:
        raise InputError(f"{path} has prompts: give no other")
    try:
        answers = said["answers"] if "answers" in said else _between(said["percentiles"])
        return context_of_lengths(answers, said.get("prompts", prompt or 0.0))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: lengths must be numbers ({error})") from error


def _between(length_of_share: dict[str, float]) -> NDArray[np.float64]:
    """Answers with these percentiles."""
    shares, lengths = np.array(sorted((float(k), float(v)) for k, v in length_of_share.items())).reshape(-1, 2).T
    if not (shares.size and shares[0] >= 0 and shares[-1] <= 100 and (np.diff(lengths) >= 0).all()):
        raise InputError("percentiles must be lengths that do not fall from 0 to 100")
    answers: NDArray[np.float64] = np.interp((np.arange(SAMPLES) + 0.5) * 100 / SAMPLES, shares, lengths)
    return answers
