"""Fill: flash copies and splits of every micro-batch of one layer, under a choice of homes and standing copies.

Symbols: M micro-batches, R ranks, C standing copies of the layer, F its flash copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibra.core.plan import Stage
from equilibra.plan.layer import Choice, LayerProblem
from equilibra.plan.micro_batch import (
    EXPERT,
    NO_EXCHANGE,
    ORIGIN,
    TARGET,
    TRIES,
    CopyCosts,
    balance_micro_batches,
    scratch_for,
)

__all__ = ["LayerCopies", "fill", "no_copies", "real_cost_us"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCopies:
    """Flash copies of one layer by micro-batch, and the tokens all its copies serve."""

    num_of_micro_batch: NDArray[np.int64]
    """[M]"""
    expert: NDArray[np.int32]
    """[F]"""
    rank: NDArray[np.int32]
    """[F]"""
    origin: NDArray[np.int32]
    """[F]"""
    tokens_FR: NDArray[np.int32]
    """[F, R]"""
    standing_tokens_CMR: NDArray[np.int32]
    """[C, M, R]"""


def no_copies(problem: LayerProblem) -> LayerCopies:
    """A layer without copies: every token is served at home."""
    num_micro_batches, num_ranks = problem.load.num_micro_batches, problem.cluster.num_ranks
    none = np.zeros(0, np.int32)
    return LayerCopies(
        num_of_micro_batch=np.zeros(num_micro_batches, np.int64), expert=none, rank=none, origin=none,
        tokens_FR=np.zeros((0, num_ranks), np.int32),
        standing_tokens_CMR=np.zeros((0, num_micro_batches, num_ranks), np.int32),
    )  # fmt: skip


def fill(
    problem: LayerProblem,
    choice: Choice,
    standing_rank: NDArray[np.integer],
    *,
    min_tokens: int,
    hold_rows: int = 0,
    serve_rows: int = 0,
    row_slack: float = NO_EXCHANGE,
) -> LayerCopies:
    """Balance every micro-batch; standing_rank [C] is the rank of each standing copy.

    hold_rows, serve_rows: cost of a copy, see `replicate`. row_slack: see `across`.
    """
    load, cluster, means = problem.load, problem.cluster, problem.means
    scratch = scratch_for(cluster, choice.home_of_expert, means.spare_slots, choice.standing_expert, standing_rank)
    standing_MCR = np.zeros((load.num_micro_batches, choice.standing_expert.size, cluster.num_ranks), np.int32)
    flash = balance_micro_batches(
        load.tokens_MLER, problem.layer, scratch, cluster, means.spare_slots,
        CopyCosts(means.tolerance, hold_rows, serve_rows, min_tokens, TRIES), row_slack, standing_MCR,
    )  # fmt: skip
    return LayerCopies(
        num_of_micro_batch=np.diff(flash.first_of_micro_batch),
        expert=flash.copies[EXPERT].astype(np.int32),
        rank=flash.copies[TARGET].astype(np.int32),
        origin=flash.copies[ORIGIN].astype(np.int32),
        tokens_FR=flash.tokens_FR.copy(),
        standing_tokens_CMR=np.ascontiguousarray(standing_MCR.transpose(1, 0, 2)),
    )


def real_cost_us(
    problem: LayerProblem, choice: Choice, standing_rank: NDArray[np.integer], copies: dict[Stage, LayerCopies]
) -> float:
    """Cost of a choice by its actual rank loads instead of node loads.

    In each stage it counts the slowest rank with the copies it holds and serves, and the exposed part of the busiest
    link's flash copies: a small share, or all that exceeds the time of the layer.
    """
    rates, num_ranks = problem.rates, problem.cluster.num_ranks
    cost_us = choice.traffic_us + choice.moving_us
    for stage in Stage:
        part = copies[stage]
        rows_MR = _rank_rows(problem, choice, standing_rank, part)
        first = np.repeat(np.arange(len(rows_MR)) * num_ranks, part.num_of_micro_batch)
        received = np.bincount(first + part.rank, minlength=rows_MR.size)
        sent = np.bincount(first + part.origin, minlength=rows_MR.size)
        busiest = np.maximum(received, sent).reshape(-1, num_ranks).max(axis=1)
        held_us = (received + _standing_held(part, standing_rank, num_ranks)) * rates.hold_us[stage]
        copies_MR = (held_us + sent * rates.serve_us[stage]).reshape(-1, num_ranks)
        rows_us = (rows_MR * rates.row_us[stage] + copies_MR).max(axis=1)
        gap_us = rows_us + rates.gap_us[stage] + rows_MR.mean(axis=1) * rates.gap_row_us[stage]
        too_long_us = busiest * rates.link_us[stage] - gap_us
        exposed_us = np.maximum(busiest * rates.exposed_share * rates.flash_copy_us[stage], too_long_us)
        cost_us += float(rows_us.sum() + exposed_us.sum())
    return cost_us


def _standing_held(copies: LayerCopies, standing_rank: NDArray[np.integer], num_ranks: int) -> NDArray[np.int64]:
    """[M * R] standing copies with rows that each rank holds."""
    copy, micro_batch = np.nonzero(copies.standing_tokens_CMR.any(axis=2))
    cells = micro_batch * num_ranks + standing_rank[copy]
    return np.bincount(cells, minlength=copies.num_of_micro_batch.size * num_ranks)


def _rank_rows(
    problem: LayerProblem, choice: Choice, standing_rank: NDArray[np.integer], copies: LayerCopies
) -> NDArray[np.int64]:
    """[M, R] pairs that each rank computes."""
    num_micro_batches, num_ranks = problem.load.num_micro_batches, problem.cluster.num_ranks
    home, first_M1 = choice.home_of_expert, np.arange(num_micro_batches)[:, None] * num_ranks
    rows = np.zeros(num_micro_batches * num_ranks, np.int64)
    np.add.at(rows, first_M1 + home, problem.load_EM.T)
    served_MC = copies.standing_tokens_CMR.sum(axis=2, dtype=np.int64).T
    np.subtract.at(rows, first_M1 + home[choice.standing_expert], served_MC)
    np.add.at(rows, first_M1 + standing_rank, served_MC)
    first = np.repeat(first_M1[:, 0], copies.num_of_micro_batch)
    served = copies.tokens_FR.sum(axis=1, dtype=np.int64)
    np.subtract.at(rows, first + home[copies.expert], served)
    np.add.at(rows, first + copies.rank, served)
    return rows.reshape(num_micro_batches, num_ranks)
