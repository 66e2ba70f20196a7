"""Kernels that draw synthetic routing and synthetic loads.

Symbols: T tokens, S sequences, L layers, K experts per token, E experts. Each token of a (sequence, layer) draws K
experts without replacement by weight: what top-k does to router scores with Gumbel noise.

SplitMix64, seeded with a hash of (seed, purpose, sequence or group, layer), makes the result independent of the order
of drawing. Draws use an alias table; a draw that hits a taken expert is repeated, and after `TRIES` draws per expert
the rest is scanned. `draw_loads` draws the load of a sequence without its tokens: exact for short sequences, within
about 2 % in the mean load of an expert for long ones.
"""

from __future__ import annotations

import math

import numpy as np

from equilibra.core.kernel import kernel

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LOW_32 = np.uint64(0xFFFFFFFF)
GROUP, NOISE, TOKENS = 1, 2, 3
TRIES = 8
SCALE_53 = 1.0 / (1 << 53)


@kernel
def mix(z):  # type: ignore[no-untyped-def]
    """SplitMix64's finaliser: 64 bits in, 64 well-mixed bits out."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@kernel
def stream(seed, purpose, item, layer):  # type: ignore[no-untyped-def]
    """Initial state of a random stream."""
    state = mix(np.uint64(seed) + GOLDEN)
    state = mix(state + np.uint64(purpose) * GOLDEN)
    state = mix(state + np.uint64(item) * GOLDEN)
    return mix(state + np.uint64(layer) * GOLDEN)


@kernel
def add_normals(out, scale, state):  # type: ignore[no-untyped-def]
    """Add scale * N(0, 1) to each element (Box-Muller)."""
    for i in range(0, len(out), 2):
        state += GOLDEN
        first = ((mix(state) >> np.uint64(11)) + np.uint64(1)) * SCALE_53
        state += GOLDEN
        angle = 2.0 * math.pi * ((mix(state) >> np.uint64(11)) * SCALE_53)
        radius = scale * math.sqrt(-2.0 * math.log(first))
        out[i] += radius * math.cos(angle)
        if i + 1 < len(out):
            out[i + 1] += radius * math.sin(angle)


@kernel
def fill_weights(weight, log_popularity, group_scale, noise_scale, seed, group, sequence, layer):  # type: ignore[no-untyped-def]
    """Expert weights of one sequence and layer, scaled so that the largest is 1."""
    weight[:] = log_popularity
    if group_scale > 0.0:
        add_normals(weight, group_scale, stream(seed, GROUP, group, layer))
    if noise_scale > 0.0:
        add_normals(weight, noise_scale, stream(seed, NOISE, sequence, layer))
    top = weight.max()
    for e in range(len(weight)):
        weight[e] = math.exp(weight[e] - top)


@kernel
def _tables(num_experts):  # type: ignore[no-untyped-def]
    """Weight, threshold, choice, share, scratch and taken of every expert, to draw from."""
    return (
        np.empty(num_experts), np.empty(num_experts, np.uint64), np.empty((num_experts, 2), np.int64),
        np.empty(num_experts), np.empty(num_experts, np.int64), np.zeros(num_experts, np.int64),
    )  # fmt: skip


@kernel
def fill_alias(tables):  # type: ignore[no-untyped-def]
    """Vose's alias table: column c gives choice[c, 1] = c below threshold[c], else choice[c, 0]."""
    weight, threshold, choice, share, work, _ = tables
    num_experts = len(weight)
    scale = num_experts / weight.sum()
    small, large = 0, num_experts
    for e in range(num_experts):
        share[e] = weight[e] * scale
        choice[e, 0] = choice[e, 1] = e
        threshold[e] = LOW_32 + np.uint64(1)
        if share[e] < 1.0:
            work[small] = e
            small += 1
        else:
            large -= 1
            work[large] = e
    while small > 0 and large < num_experts:
        small -= 1
        low, high = work[small], work[large]
        threshold[low] = np.uint64(share[low] * 4294967296.0)
        choice[low, 0] = high
        share[high] -= 1.0 - share[low]
        if share[high] < 1.0:
            large += 1
            work[small] = high
            small += 1


@kernel
def _draw_rest(weight, taken, mark, uniform):  # type: ignore[no-untyped-def]
    """One expert that is not taken, by weight."""
    total, last = 0.0, -1
    for e in range(len(weight)):
        if taken[e] != mark:
            total += weight[e]
            last = e
    left = uniform * total
    for e in range(len(weight)):
        if taken[e] != mark:
            left -= weight[e]
            if left < 0.0:
                return e
    return last


@kernel
def draw_tokens(ids_TK, tables, first_mark, state):  # type: ignore[no-untyped-def]
    """K different experts for each token; token t marks its experts in `taken` with first_mark + t."""
    weight, threshold, choice, _, _, taken = tables
    num_tokens, top_k = ids_TK.shape
    num_experts = np.uint64(len(weight))
    for t in range(num_tokens):
        mark = first_mark + t
        drawn, tries = 0, 0
        while drawn < top_k and tries < TRIES * top_k:
            state += GOLDEN
            z = mix(state)
            column = ((z >> np.uint64(32)) * num_experts) >> np.uint64(32)
            below = ((z & LOW_32) - threshold[column]) >> np.uint64(63)  # sign bit: a branch would be mispredicted
            e = choice[column, below]
            ids_TK[t, drawn] = e  # overwritten by the next draw if e was taken
            drawn += taken[e] != mark
            taken[e] = mark
            tries += 1
        while drawn < top_k:
            state += GOLDEN
            e = _draw_rest(weight, taken, mark, (mix(state) >> np.uint64(11)) * SCALE_53)
            ids_TK[t, drawn] = e
            taken[e] = mark
            drawn += 1


@kernel
def draw_ids(  # type: ignore[no-untyped-def]
    ids, offsets, first_sequence, last_sequence, group_of_sequence, log_popularity_LE, group_scale, noise_scale, seed
):
    """Fill the ids of sequences first_sequence to last_sequence."""
    num_layers = ids.shape[1]
    num_experts = log_popularity_LE.shape[1]
    tables = _tables(num_experts)
    weight = tables[0]
    mark = 1
    for s in range(first_sequence, last_sequence):
        for layer in range(num_layers):
            log_popularity = log_popularity_LE[layer]
            fill_weights(weight, log_popularity, group_scale, noise_scale, seed, group_of_sequence[s], s, layer)
            fill_alias(tables)
            state = stream(seed, TOKENS, s, layer)
            start, stop = offsets[s], offsets[s + 1]
            draw_tokens(ids[start:stop, layer], tables, mark, state)
            mark += stop - start


EXACT_DRAWS_PER_EXPERT = 16
RARE = 8.0


@kernel
def draw_loads(  # type: ignore[no-untyped-def]
    tokens_SLE, length_of_sequence, group_of_sequence, log_popularity_LE, group_scale, noise_scale, seed, top_k
):
    """Fill the loads of all sequences; short sequences are drawn token by token."""
    num_sequences, num_layers, num_experts = tokens_SLE.shape
    tables = _tables(num_experts)
    weight, share = tables[0], tables[3]
    ids_TK = np.empty((EXACT_DRAWS_PER_EXPERT * num_experts // top_k, top_k), np.uint16)
    mark = 1
    for s in range(num_sequences):
        length = length_of_sequence[s]
        for layer in range(num_layers):
            log_popularity, counts = log_popularity_LE[layer], tokens_SLE[s, layer]
            fill_weights(weight, log_popularity, group_scale, noise_scale, seed, group_of_sequence[s], s, layer)
            state = stream(seed, TOKENS, s, layer)
            if length * top_k > EXACT_DRAWS_PER_EXPERT * num_experts:
                _fill_inclusion(weight, share, top_k)
                _draw_counts(counts, share, length, top_k, weight, state)
                continue
            fill_alias(tables)
            draw_tokens(ids_TK[:length], tables, mark, state)
            mark += length
            counts[:] = 0
            for e in ids_TK[:length].flat:
                counts[e] += 1


@kernel
def _fill_inclusion(weight, inclusion, top_k):  # type: ignore[no-untyped-def]
    """Probability that an expert is among the K drawn: 1 - exp(-c * weight), with c such that the sum is K.

    Weighted draws without replacement are a race of exponential clocks that stops at the K-th; c is its typical
    stopping time (for K = 1 the probability is exact). The sum is concave in c, so Newton's method rises to c.
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
def _draw_counts(counts, inclusion, length, top_k, real, state):  # type: ignore[no-untyped-def]
    """Tokens of each expert among `length` tokens; they add up to length * K.

    Rare experts are Poisson. The others are normal with binomial mean and variance, conditioned on the total, which
    gives the covariance of draws of K. `real` is scratch.
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
    while left != 0:  # the rounding error goes to common experts, or to all if those are full
        step = 1 if left > 0 else -1
        common = length * inclusion[turn] >= RARE or visits > 2 * num_experts
        if common and 0 <= counts[turn] + step <= length:
            counts[turn] += step
            left -= step
        visits += 1
        turn = (turn + 1) % num_experts
