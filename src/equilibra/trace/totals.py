"""Kernels that draw the load of a sequence as totals, without its tokens.

Symbols: S sequences, L layers, K experts per token, E experts. Weights are those of `sampling.py`, and so is
the distribution, up to what the functions below say: exact for short sequences, within about 2 % in the mean
load of an expert for long ones.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from equilibra.core.kernel import kernel
from equilibra.trace.sampling import (
    GOLDEN,
    SCALE_53,
    TOKENS,
    add_normals,
    draw_tokens,
    fill_alias,
    fill_weights,
    mix,
    stream,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["draw_loads"]

EXACT_DRAWS_PER_EXPERT = 16
RARE = 8.0


@kernel
def draw_loads(
    tokens_SLE: NDArray[np.int32],
    length_of_sequence: NDArray[np.int64],
    first_sequence: int,
    last_sequence: int,
    group_of_sequence: NDArray[np.int64],
    log_popularity_LE: NDArray[np.float64],
    group_scale: float,
    noise_scale: float,
    seed: int,
    top_k: int,
) -> None:
    """Fill the loads of sequences first_sequence to last_sequence; only short ones token by token."""
    _, num_layers, num_experts = tokens_SLE.shape
    weight, share = np.empty(num_experts), np.empty(num_experts)
    threshold = np.empty(num_experts, np.uint64)
    choice, work = np.empty((num_experts, 2), np.int64), np.empty(num_experts, np.int64)
    taken = np.zeros(num_experts, np.int64)
    ids_TK = np.empty((EXACT_DRAWS_PER_EXPERT * num_experts // top_k, top_k), np.uint16)
    mark = 1
    for s in range(first_sequence, last_sequence):
        length = length_of_sequence[s]
        for layer in range(num_layers):
            log_popularity, counts = log_popularity_LE[layer], tokens_SLE[s, layer]
            fill_weights(weight, log_popularity, group_scale, noise_scale, seed, group_of_sequence[s], s, layer)
            state = stream(seed, TOKENS, s, layer)
            if length * top_k > EXACT_DRAWS_PER_EXPERT * num_experts:
                _fill_inclusion(weight, share, top_k)
                _draw_counts(counts, share, length, top_k, weight, state)
                continue
            fill_alias(weight, threshold, choice, share, work)
            draw_tokens(ids_TK[:length], weight, threshold, choice, taken, mark, state)
            mark += length
            counts[:] = 0
            for e in ids_TK[:length].flat:
                counts[e] += 1


@kernel
def _fill_inclusion(weight: NDArray[np.float64], inclusion: NDArray[np.float64], top_k: int) -> None:
    """Probability that an expert is among the K drawn: 1 - exp(-c * weight), with c such that the sum is K.

    Weighted draws without replacement are a race of exponential clocks, stopped at the K-th; c is the time it
    stops, taken as its typical value (for K = 1 the probability is known exactly). Newton's method rises to c
    from below, since the sum is concave in c.
    """
    clock = top_k / weight.sum()
    if top_k == 1:
        inclusion[:] = weight * clock
        return
    for _ in range(100):
        total, slope = 0.0, 0.0
        for e in range(len(weight)):
            left = math.exp(-clock * weight[e])
            inclusion[e] = 1.0 - left
            total += 1.0 - left
            slope += weight[e] * left
        if top_k - total < 1e-9 * top_k or slope < 1e-300:
            return
        clock += (top_k - total) / slope


@kernel
def _draw_counts(
    counts: NDArray[np.int32],
    inclusion: NDArray[np.float64],
    length: int,
    top_k: int,
    real: NDArray[np.float64],
    state: Any,  # noqa: ANN401 - numba uint64
) -> None:
    """Tokens of each expert among `length` tokens: they add up to length * K.

    Rare experts are Poisson. The others are normal, with the mean and variance of `length` independent draws of yes
    or no, conditioned on the total, which gives them the covariance of draws of K. `real` is scratch.
    """
    num_experts = len(inclusion)
    real[:] = 0.0
    add_normals(real, 1.0, state)
    state = mix(state)
    variance, excess = 0.0, 0.0
    for e in range(num_experts):
        mean = length * inclusion[e]
        if mean < RARE:
            product, number = 1.0, -1
            while product > math.exp(-mean):
                state += GOLDEN
                product *= ((mix(state) >> np.uint64(11)) + np.uint64(1)) * SCALE_53
                number += 1
            real[e] = number
        else:
            spread = mean * (1.0 - inclusion[e])
            real[e] = mean + math.sqrt(spread) * real[e]
            variance += spread
        excess += real[e]
    excess -= length * top_k
    left = length * top_k
    for e in range(num_experts):
        mean = length * inclusion[e]
        if mean >= RARE and variance > 0.0:
            real[e] -= excess * mean * (1.0 - inclusion[e]) / variance
        counts[e] = min(length, max(0, math.floor(real[e] + 0.5)))
        left -= counts[e]
    turn = np.int64(mix(state + GOLDEN) % np.uint64(num_experts))
    visits = 0
    while left != 0:  # rounding is settled among the common experts, and among all if those are full
        step = 1 if left > 0 else -1
        common = length * inclusion[turn] >= RARE or visits > 2 * num_experts
        if common and 0 <= counts[turn] + step <= length:
            counts[turn] += step
            left -= step
        visits += 1
        turn = (turn + 1) % num_experts
