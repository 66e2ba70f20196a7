"""Synthetic RL routing of any size, as skewed as a real recording, and the fit of its knobs to one.

Symbols: S sequences, L layers, K experts per token, E experts. A step has `num_prompts` prompts with
`answers_per_prompt` consecutive answers each. The log-weight of an expert for one sequence is

    popularity_skew * A[layer, expert]                                 any text
    + sequence_noise * (sqrt(c) * G[prompt, layer, expert]             this prompt
                        + sqrt(1 - c) * N[sequence, layer, expert])    this answer

with A, G, N standard normal and c = group_correlation. Each token draws K different experts by weight. Popularity
drifts from step to step, A' = sqrt(1 - drift^2) * A + drift * (new normals), so its spread stays the same; prompts are
always new. Lengths are log-normal, cut at `max_length`. The same arguments always give the same trace.

`fit_knobs` inverts this by moments. Let pi be the probability that a token of a sequence goes to an expert. Counts of
real sequences give unbiased means of pi * pi' (over experts, layers and pairs of tokens) for

    two tokens of one sequence            -> M_sequence: all variance,        correlation 1
    two sequences of one prompt group     -> M_group:    popularity + group,  correlation r_group
    two sequences of different groups     -> M_batch:    popularity alone,    correlation r_batch

Log-weights are normal with standard deviation s, and drawing K of E turns log-weight x into pi = 1 - exp(-c e^x), with
c such that the mean is K / E. So M = E[pi(s z) pi(s z')] / (K / E)^2 for correlated normals z, z': a two-dimensional
integral (Gauss-Hermite) that grows with s and with the correlation. Solve it for s, then for both correlations. All
pairs of tokens count the same, so long sequences count more, as they do in a load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import check_number, check_whole
from equilibra.core.errors import InputError
from equilibra.core.load import SequenceLoad
from equilibra.trace.count import micro_batches_in_file_order, sequence_loads
from equilibra.trace.routing import Recording, RoutingPiece, RoutingTrace, id_dtype, tokens_per_piece
from equilibra.trace.sampling import draw_ids, draw_loads

POPULARITY, LENGTHS, ROUTING = 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class SynthKnobs:
    """Skew, correlation and lengths of synthetic routing."""

    popularity_skew: float = 0.7
    """standard deviation of log-popularity over the experts of a layer; 0: uniform"""
    sequence_noise: float = 0.8
    """standard deviation of a sequence's log-weights around popularity; 0: all sequences alike"""
    group_correlation: float = 0.4
    """correlation of this noise between two answers to one prompt, 0 to 1"""
    drift: float = 0.1
    """share of popularity that is new after one step, 0 (frozen) to 1 (forgotten)"""
    median_length: float = 2048.0
    """median tokens per sequence"""
    length_tail: float = 0.8
    """standard deviation of log-length; 0: all of one length"""
    max_length: int = 16_384
    """tokens at which a sequence is cut"""

    def __post_init__(self) -> None:
        limits = {
            "popularity_skew": (0.0, 20.0), "sequence_noise": (0.0, 20.0), "group_correlation": (0.0, 1.0),
            "drift": (0.0, 1.0), "median_length": (1.0, 1e9), "length_tail": (0.0, 10.0), "max_length": (1, 10**9),
        }  # fmt: skip
        for name, (least, most) in limits.items():
            check_number(name, getattr(self, name), low=least, high=most)


@dataclass(frozen=True, kw_only=True)
class SynthShape:
    """Size of a synthetic step, and the shape of its model."""

    num_prompts: int
    answers_per_prompt: int
    num_layers: int
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        for name in ("num_prompts", "answers_per_prompt", "num_layers", "top_k"):
            check_whole(name, getattr(self, name), low=1, high=10**7)
        if self.num_sequences > 10**7:
            raise InputError(f"{self.num_sequences} sequences are too many: use at most 10000000")
        id_dtype(self.num_experts)
        if self.top_k > self.num_experts:
            raise InputError(f"{self.top_k} experts per token need at least as many experts, not {self.num_experts}")

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.answers_per_prompt

    def group_of_sequence(self) -> NDArray[np.int64]:
        """[S] the prompt of each answer."""
        return np.arange(self.num_sequences) // self.answers_per_prompt


@dataclass(frozen=True, kw_only=True, eq=False)
class SyntheticRecording(Recording):
    """A recording that is generated while it is read, so that its size is not limited by memory."""

    size: SynthShape
    knobs: SynthKnobs
    seed: int
    step: int
    """steps of drift"""

    @property
    def shape(self) -> tuple[int, int, int]:
        return int(self.offsets[-1]), self.size.num_layers, self.size.top_k

    def pieces(self) -> Iterator[RoutingPiece]:
        dtype = id_dtype(self.num_experts)
        step = tokens_per_piece(self.num_layers * self.top_k * dtype.itemsize)
        popularity = _log_popularity(self.size, self.knobs, self.seed, self.step)
        seed, groups = _stream_seed(self.seed, self.step), self.size.group_of_sequence()
        bounds = micro_batches_in_file_order(self.length_of_sequence, step)
        for first, last in pairwise(bounds.tolist()):
            start, stop = int(self.offsets[first]), int(self.offsets[last])
            ids = np.empty((stop - start, self.num_layers, self.top_k), dtype=dtype)
            draw_ids(ids, self.offsets - start, first, last, groups, popularity, *_scales(self.knobs), seed)
            recorded = None if self.recorded is None else self.recorded[start:stop]
            yield RoutingPiece(first_token=start, ids=ids, recorded=recorded)


def synthetic_recording(
    size: SynthShape, knobs: SynthKnobs, *, seed: int = 0, step: int = 0, record_last_token: bool = True
) -> SyntheticRecording:
    """One step, generated while it is read; with record_last_token=False last tokens lack routing, as in rollouts."""
    offsets = np.concatenate([[0], np.cumsum(_lengths(size, knobs, seed, step))]).astype(np.int64)
    recorded = None
    if not record_last_token:
        recorded = np.ones(offsets[-1], dtype=np.bool_)
        recorded[offsets[1:] - 1] = False
    return SyntheticRecording(
        offsets=offsets,
        num_experts=size.num_experts,
        recorded=recorded,
        group_of_sequence=size.group_of_sequence(),
        size=size,
        knobs=knobs,
        seed=seed,
        step=step,
    )


def synthesize(
    size: SynthShape, knobs: SynthKnobs, *, seed: int = 0, step: int = 0, record_last_token: bool = True
) -> RoutingTrace:
    """One step in memory; see `synthetic_recording`."""
    return synthetic_recording(size, knobs, seed=seed, step=step, record_last_token=record_last_token).load()


def synthesize_loads(size: SynthShape, knobs: SynthKnobs, *, seed: int = 0, step: int = 0) -> SequenceLoad:
    """The loads of a step without its tokens; those of long sequences are drawn as totals."""
    lengths = _lengths(size, knobs, seed, step)
    tokens_SLE = np.empty((size.num_sequences, size.num_layers, size.num_experts), dtype=np.int32)
    popularity = _log_popularity(size, knobs, seed, step)
    groups, stream = size.group_of_sequence(), _stream_seed(seed, step)
    draw_loads(tokens_SLE, lengths, groups, popularity, *_scales(knobs), stream, size.top_k)
    return SequenceLoad(tokens_SLE=tokens_SLE, length_of_sequence=lengths)


def _scales(knobs: SynthKnobs) -> tuple[float, float]:
    """Standard deviations of G and N."""
    return (
        knobs.sequence_noise * math.sqrt(knobs.group_correlation),
        knobs.sequence_noise * math.sqrt(1.0 - knobs.group_correlation),
    )


def _generator(seed: int, *names: int) -> np.random.Generator:
    if seed < 0 or min(names) < 0:
        raise InputError(f"seed and step must not be negative, not {(seed, *names)}")
    return np.random.default_rng([seed, *names])


def _stream_seed(seed: int, step: int) -> int:
    return int(_generator(seed, ROUTING, step).integers(0, 2**62))


def _lengths(size: SynthShape, knobs: SynthKnobs, seed: int, step: int) -> NDArray[np.int64]:
    normals = _generator(seed, LENGTHS, step).standard_normal(size.num_sequences)
    lengths = np.rint(knobs.median_length * np.exp(knobs.length_tail * normals))
    return np.clip(lengths, 1, knobs.max_length).astype(np.int64)


def _log_popularity(size: SynthShape, knobs: SynthKnobs, seed: int, step: int) -> NDArray[np.float64]:
    """[L, E] popularity_skew * A after `step` steps of drift."""
    check_whole("step", step, low=0, high=100_000)
    grid = (size.num_layers, size.num_experts)
    popularity = _generator(seed, POPULARITY, 0).standard_normal(grid)
    for past in range(1, step + 1) if knobs.drift > 0 else ():
        new = _generator(seed, POPULARITY, past).standard_normal(grid)
        popularity = math.sqrt(1.0 - knobs.drift**2) * popularity + knobs.drift * new
    return knobs.popularity_skew * popularity


MAX_SPREAD = 6.0
NODES, NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
NODE_WEIGHTS = NODE_WEIGHTS / NODE_WEIGHTS.sum()


def fit_knobs(recording: Recording, *, answers_per_prompt: int = 8, drift: float = 0.1) -> SynthKnobs:
    """Knobs with which `synthesize` makes routing as skewed and correlated as this recording.

    Without known prompt groups, runs of `answers_per_prompt` neighbours stand for them: recordings are often sorted by
    domain. One recording cannot show drift, so the caller gives it.
    """
    check_whole("answers_per_prompt", answers_per_prompt, low=1)
    groups = recording.group_of_sequence
    if groups is None:
        groups = np.arange(recording.num_sequences) // answers_per_prompt
    share = recording.top_k / recording.num_experts
    m_sequence, m_group, m_batch = _moments(recording, groups)
    spread = _solve(lambda s: _moment(s, 1.0, share), max(m_sequence, m_batch), MAX_SPREAD)
    r_batch = _solve(lambda r: _moment(spread, r, share), m_batch, 1.0)
    r_group = max(r_batch, _solve(lambda r: _moment(spread, r, share), m_group, 1.0))
    own = max(0.0, 1.0 - r_batch)
    lengths = recording.length_of_sequence
    return SynthKnobs(
        popularity_skew=spread * math.sqrt(r_batch),
        sequence_noise=spread * math.sqrt(own),
        group_correlation=(r_group - r_batch) / own if own > 1e-6 else 0.0,
        drift=drift,
        median_length=float(np.median(lengths)),
        length_tail=float(np.log(lengths).std()),
        max_length=int(lengths.max()),
    )


def _moments(recording: Recording, groups: NDArray[np.int64]) -> tuple[float, float, float]:
    """M_sequence, M_group and M_batch; a kind without pairs takes the next wider one."""
    loads = sequence_loads(recording).tokens_SLE.reshape(recording.num_sequences, -1).astype(np.float64)
    tokens = loads[:, : recording.num_experts].sum(axis=1) / recording.top_k
    _, group_number = np.unique(groups, return_inverse=True)
    group_loads = np.zeros((group_number.max() + 1, loads.shape[1]))
    np.add.at(group_loads, group_number, loads)
    group_tokens = np.bincount(group_number, weights=tokens)
    in_sequence = (loads**2).sum(), (tokens**2).sum()
    in_group = (group_loads**2).sum(), (group_tokens**2).sum()
    in_batch = (loads.sum(axis=0) ** 2).sum(), tokens.sum() ** 2
    if tokens.sum() < 2:
        raise InputError(f"cannot fit knobs to {tokens.sum():.0f} recorded tokens: at least 2 are needed")
    unit = (recording.top_k / recording.num_experts) ** 2 * loads.shape[1]

    def ratio(pairs: float, products: float, wider: float) -> float:
        return products / pairs / unit if pairs > 0 else wider

    everything = ratio(in_batch[1], in_batch[0], 1.0)
    m_batch = ratio(in_batch[1] - in_group[1], in_batch[0] - in_group[0], everything)
    m_group = ratio(in_group[1] - in_sequence[1], in_group[0] - in_sequence[0], m_batch)
    m_sequence = ratio(in_sequence[1] - tokens.sum(), in_sequence[0] - loads.sum(), m_batch)
    return m_sequence, m_group, m_batch


def _moment(spread: float, correlation: float, share: float) -> float:
    """E[pi(s z) pi(s z')] / share^2 for normals z, z' with this correlation."""
    clock = _clock(spread, share)
    own = math.sqrt(max(0.0, 1.0 - correlation**2))
    pi = 1.0 - np.exp(-clock * np.exp(spread * NODES))
    other = 1.0 - np.exp(-clock * np.exp(spread * (correlation * NODES[:, None] + own * NODES[None, :])))
    return float((NODE_WEIGHTS * pi) @ (other @ NODE_WEIGHTS)) / share**2


def _clock(spread: float, share: float) -> float:
    """The c for which the mean of 1 - exp(-c e^(spread z)) is `share`."""
    if share >= 1.0:
        return 1e9
    weights = np.exp(spread * NODES)

    def mean(log_clock: float) -> float:
        return float(NODE_WEIGHTS @ (1.0 - np.exp(-math.exp(log_clock) * weights)))

    return math.exp(_solve(mean, share, 60.0, least=-60.0))


def _solve(function: Callable[[float], float], value: float, most: float, *, least: float = 0.0) -> float:
    """The x from least to most at which a rising function reaches `value`, or the nearer end (bisection)."""
    for _ in range(60):
        middle = (least + most) / 2
        if function(middle) < value:
            least = middle
        else:
            most = middle
    return (least + most) / 2
