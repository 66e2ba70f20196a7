"""Replayed routing: skewed as in a recording, or forced to balance. No torch.

Symbols: S steps, M micro-batches, R ranks, T tokens of a rank's micro-batch, L layers, K experts per token.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.cells import MIXED
from benchmarks.megatron_gpu.cases import Shape
from equilibra.core.load import imbalance
from equilibra.trace.synth import SynthShape, synthesize

LEAST = 1.45
"""imbalance of the routing that is chosen"""
SEEDS = 200
SAMPLE = 2
"""sequences per rank and micro-batch that seeds are tried on"""


def skewed_ids(shape: Shape, *, steps: int, num_ranks: int) -> NDArray[np.int32]:
    """[S, M, R, T, L, K] ids with the statistics of a recording, from the first seed that is imbalanced enough."""
    for seed in range(SEEDS):
        sample = replace(shape, sequences=min(SAMPLE, shape.sequences))
        if rank_imbalance(_ids(sample, 1, num_ranks, seed), shape.num_experts) >= LEAST:
            ids = _ids(shape, steps, num_ranks, seed)
            if rank_imbalance(ids, shape.num_experts) >= LEAST:
                return ids
    raise SystemExit(f"no seed below {SEEDS} gives imbalance {LEAST} with skew {shape.skew}: raise it")


def _ids(shape: Shape, steps: int, num_ranks: int, seed: int) -> NDArray[np.int32]:
    knobs = replace(
        MIXED, popularity_skew=shape.skew, median_length=float(shape.sequence), length_tail=0.0,
        max_length=shape.sequence,
    )  # fmt: skip
    size = SynthShape(
        num_prompts=steps * shape.micro_batches * num_ranks, answers_per_prompt=shape.sequences,
        num_layers=shape.num_layers, num_experts=shape.num_experts, top_k=shape.top_k,
    )  # fmt: skip
    ids = synthesize(size, knobs, seed=seed).ids
    return ids.reshape(steps, shape.micro_batches, num_ranks, shape.tokens, shape.num_layers, shape.top_k).astype(
        np.int32
    )


def balanced_ids(shape: Shape, *, steps: int, num_ranks: int) -> NDArray[np.int32]:
    """[S, M, R, T, L, K] ids in turn: every expert gets as many pairs from every rank."""
    ids_TK = np.arange(shape.tokens * shape.top_k, dtype=np.int32).reshape(shape.tokens, -1) % shape.num_experts
    every = (steps, shape.micro_batches, num_ranks, shape.num_layers, *ids_TK.shape)
    return np.ascontiguousarray(np.moveaxis(np.broadcast_to(ids_TK, every), 3, 4))


def rank_imbalance(ids: NDArray[np.int32], num_experts: int) -> float:
    """Slowest over mean rank with contiguous experts, mean over micro-batches and layers. ids: [S, M, R, T, L, K]."""
    num_ranks, num_layers = ids.shape[2], ids.shape[4]
    rank_of = ids // (num_experts // num_ranks)
    loads = [
        [np.bincount(of_micro_batch[:, :, layer].ravel(), minlength=num_ranks) for layer in range(num_layers)]
        for of_micro_batch in rank_of.reshape(-1, *ids.shape[2:])
    ]
    return float(imbalance(np.array(loads)).mean())
