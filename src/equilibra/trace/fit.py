"""Knobs of the synthetic generator from a real recording, by moments.

Symbols: S sequences, L layers, K experts per token, E experts. Let pi be the probability that a token of a
sequence goes to an expert. Counts of real sequences give, without bias, the mean of pi * pi' (over experts,
layers and pairs of tokens) for

    two tokens of one sequence            -> M_sequence: all variance,        correlation 1
    two sequences of one prompt group     -> M_group:    popularity + group,  correlation r_group
    two sequences of different groups     -> M_batch:    popularity alone,    correlation r_batch

In the generator log-weights are normal with total standard deviation s, and drawing K of E turns log-weight x
into pi = 1 - exp(-c e^x), with c such that the mean is K / E. So M = E[pi(s z) pi(s z')] / (K / E)^2 with
correlated normals z, z': a two-dimensional integral (Gauss-Hermite) that grows with s and with the
correlation. Solve it for s, then for both correlations, and read off the variances. Pairs of tokens all count
the same, so long sequences count more, as they do in a load.

Where prompt groups are not known, runs of `answers_per_prompt` neighbours stand for them: recordings are
often in the order of their domains, and neighbours share one. Drift cannot be seen in one recording; it stays
at what the caller says.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from equilibra.core.errors import InputError
from equilibra.trace.count import sequence_loads
from equilibra.trace.synth import SynthKnobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from equilibra.trace.routing import Recording

__all__ = ["fit_knobs"]

MAX_SPREAD = 6.0
NODES, NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
NODE_WEIGHTS = NODE_WEIGHTS / NODE_WEIGHTS.sum()


def fit_knobs(recording: Recording, *, answers_per_prompt: int = 8, drift: float = 0.1) -> SynthKnobs:
    """Knobs with which `synthesize` makes routing as skewed and as correlated as this recording."""
    if answers_per_prompt < 1:
        raise InputError(f"answers per prompt must be at least 1, not {answers_per_prompt}")
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
    """M_sequence, M_group, M_batch over (K / E)^2; a missing kind takes the next wider value."""
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
    """E[pi(s z) pi(s z')] / share^2 for normals z, z' of this correlation."""
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
    """The x from least to most at which a rising function reaches `value`, or the nearer end."""
    for _ in range(60):
        middle = (least + most) / 2
        if function(middle) < value:
            least = middle
        else:
            most = middle
    return (least + most) / 2
