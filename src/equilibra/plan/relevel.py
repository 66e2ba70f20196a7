"""Relevel: adjust the quotas of copies for transfers of other layers, once all copies are known.

Symbols: M micro-batches, L layers, E experts, R ranks, F flash copies, C standing copies, P = L * M problems.

While a layer computes, the flash copies of neighbour visits move, and gradients leave and are added at their homes.
Both cost ranks time that is unknown while a single visit is planned. So copies stay, quotas are levelled again with
these costs counted as rows, and copies left without tokens are dropped. (Choosing copies again was no better.)

Kernels compute rows in tiles; in two thirds of the work an instance's last tile costs as much as a full one. So shares
that fill tiles are sought around the level. Visits are ordered by micro-batch, then layer, and wrap around.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from equilibra.core.kernel import inlined, kernel
from equilibra.core.load import StepLoad
from equilibra.core.placement import Placement
from equilibra.core.plan import Stage, StagePlan, StandingCopies
from equilibra.cost.prices import MOST_ROWS
from equilibra.cost.rates import Rates
from equilibra.plan.level import level_nodes

THIRDS = 3
"""costs are counted in thirds of rows where tiles matter"""
_SWEEPS = 16


def relevel(
    part: StagePlan, load: StepLoad, placement: Placement, standing: StandingCopies, rates: Rates, stage: Stage
) -> StagePlan:
    """The stage with new quotas, if rates price transfers beside other layers and quotas do not even out traffic."""
    counts_traffic = rates.cross_row_us > 0 and placement.cluster.num_nodes > 1
    priced = rates.move_beside_us[stage] + rates.add_beside_us[stage] > 0
    if not priced or counts_traffic or part.num_copies == 0:
        return part
    needless = True
    while needless:
        tokens_FR, standing_CMR = part.tokens_FR.copy(), part.standing_tokens_CMR.copy()
        needless = _level(
            load.tokens_MLER, placement.home_of_expert, part.first_of_problem, part.expert, part.rank, standing.layer,
            standing.expert, standing.rank, base_rows(part, load, standing, rates, stage), rates.tile_rows, tokens_FR,
            standing_CMR,
        )  # fmt: skip
        part = _without_idle_copies(replace(part, tokens_FR=tokens_FR, standing_tokens_CMR=standing_CMR))
    return part


def _without_idle_copies(part: StagePlan) -> StagePlan:
    used = part.tokens_FR.any(axis=1)
    num_before = np.concatenate([[0], np.cumsum(used)])
    return replace(
        part, first_of_problem=num_before[part.first_of_problem], expert=part.expert[used], rank=part.rank[used],
        origin=part.origin[used], tokens_FR=part.tokens_FR[used],
    )  # fmt: skip


def base_rows(
    part: StagePlan, load: StepLoad, standing: StandingCopies, rates: Rates, stage: Stage
) -> NDArray[np.int64]:
    """[P, R] what copies of a visit and of its neighbours cost every rank besides their rows, as rows."""
    flash_PR, served_PR = part.on_links()
    held_PR = flash_PR + part.standing_in_use(standing)
    visit = np.arange(len(flash_PR)).reshape(load.num_micro_batches, load.num_layers).T.ravel()
    problem_of_visit = np.argsort(visit)
    after, before = (problem_of_visit[(visit + step) % visit.size] for step in (1, -1))
    moved_PR, added_PR = flash_PR[after], served_PR[after]
    if stage is Stage.UPDATE:
        moved_PR = 2 * moved_PR + flash_PR[before]  # weights forward and a gradient; weights backward
    else:
        added_PR = np.zeros_like(added_PR)
    us_PR = rates.hold_us[stage] * held_PR + rates.serve_us[stage] * served_PR
    us_PR += rates.move_beside_us[stage] * moved_PR + rates.add_beside_us[stage] * added_PR
    rows_PR: NDArray[np.int64] = np.minimum(us_PR / rates.row_us[stage], MOST_ROWS).round().astype(np.int64)
    return rows_PR


@inlined
def _with_tokens(layer, m, begin, end, st_layer, standing_CMR):  # type: ignore[no-untyped-def]
    """Copies of a layer and micro-batch: standing ones by their number, then flash copies from `st_layer.size` on."""
    copies = np.empty(st_layer.size + end - begin, np.int64)
    n = 0
    for c in range(st_layer.size):
        if st_layer[c] == layer and standing_CMR[c, m].any():
            copies[n] = c
            n += 1
    for f in range(begin, end):
        copies[n] = st_layer.size + f
        n += 1
    return copies[:n]


@kernel
def _level(  # type: ignore[no-untyped-def]
    tokens_MLER, home_LE, first, expert, rank, st_layer, st_expert, st_rank, base_PR, tile, tokens_FR, standing_CMR
):
    """Level every problem, and split by source what changes hands; returns whether a copy is left without tokens."""
    num_micro_batches, _, num_experts, num_ranks = tokens_MLER.shape
    at_home_ER = np.empty((num_experts, num_ranks), np.int32)
    needless = False
    for p in range(first.size - 1):
        layer, m = p // num_micro_batches, p % num_micro_batches
        copies = _with_tokens(layer, m, first[p], first[p + 1], st_layer, standing_CMR)
        n = copies.size
        if n == 0:
            continue
        of, on, share = np.zeros((3, n), np.int64)
        for k in range(n):
            c, f = copies[k], copies[k] - st_layer.size
            of[k] = st_expert[c] if f < 0 else expert[f]
        order = np.argsort(of, kind="mergesort")  # copies of one expert must be adjacent
        copies, of = copies[order], of[order]
        rows = base_PR[p].copy()
        at_home_ER[:] = tokens_MLER[m, layer]
        for k in range(n):
            c, f = copies[k], copies[k] - st_layer.size
            taken = standing_CMR[c, m] if f < 0 else tokens_FR[f]
            on[k] = st_rank[c] if f < 0 else rank[f]
            share[k] = taken.sum()
            rows[on[k]] += share[k]
            at_home_ER[of[k]] -= taken
        load = np.empty(num_experts, np.int64)
        for e in range(num_experts):
            load[e] = tokens_MLER[m, layer, e].sum()
            rows[home_LE[layer, e]] += at_home_ER[e].sum()
        level_nodes(rows, share, load, of, on, home_LE[layer].astype(np.int64), n)
        if share.min() == 0:
            needless = True  # the caller levels once more, without it
        elif tile > 1:
            _fill_tiles(tile, base_PR[p], share, load, of, on, home_LE[layer], n)
        for giving in (True, False):  # what copies give back must be there before others take it
            for k in range(n):
                c, f = copies[k], copies[k] - st_layer.size
                taken = standing_CMR[c, m] if f < 0 else tokens_FR[f]
                more = share[k] - taken.sum()
                if (more < 0) == giving:
                    _move(more, on[k], at_home_ER[of[k]], taken)
    return needless


@inlined
def thirds(rows, tile):  # type: ignore[no-untyped-def]
    """The cost of an instance's rows: its last tile is computed whole in two thirds of the work."""
    return THIRDS * rows + (THIRDS - 1) * (-rows % tile)


@kernel
def _fill_tiles(tile, base_R, share, load, of, on, home, n):  # type: ignore[no-untyped-def]
    """Change shares so that tiles are fuller, as long as that brings down the slower of the two ranks concerned."""
    left, cost = load.copy(), THIRDS * base_R
    for k in range(n):
        left[of[k]] -= share[k]
        # A copy's price includes the mean waste of a last tile; here the actual waste counts.
        cost[on[k]] += thirds(share[k], tile) - (THIRDS - 1) * tile // 2
    for e in range(load.size):
        cost[home[e]] += thirds(left[e], tile)
    wanted = np.empty(16, np.int64)
    for _ in range(_SWEEPS):
        changed = False
        for k in range(n):
            e, r, h = of[k], on[k], home[of[k]]
            here, both = share[k], share[k] + left[e]
            even = here + (cost[h] - cost[r]) // (2 * THIRDS)
            for d in range(5):
                wanted[d] = (here // tile + d - 2) * tile
                wanted[5 + d] = both - (left[e] // tile + d - 2) * tile
            wanted[10], wanted[11], wanted[12] = even, even // tile * tile, (even // tile + 1) * tile
            wanted[13] = both - (both - even) // tile * tile
            wanted[14] = wanted[13] - tile
            wanted[15] = here
            best, best_r, best_h = here, cost[r], cost[h]
            for new in wanted:
                if 0 < new <= both:
                    at_r = cost[r] - thirds(here, tile) + thirds(new, tile)
                    at_h = cost[h] - thirds(left[e], tile) + thirds(both - new, tile)
                    now, then = max(best_r, best_h), max(at_r, at_h)
                    if then < now or (then == now and at_r + at_h < best_r + best_h):
                        best, best_r, best_h = new, at_r, at_h
            if best != here:
                share[k], left[e], cost[r], cost[h] = best, both - best, best_r, best_h
                changed = True
        if not changed:
            break


@inlined
def _move(more, own, left, taken):  # type: ignore[no-untyped-def]
    """Give a copy on rank `own` more of what is left, by source, or take some: own tokens come first and go last."""
    for turn in range(left.size):
        other = turn - 1 if more > 0 else turn  # of all sources but its own
        other += other >= own
        r = own if turn == (0 if more > 0 else left.size - 1) else other
        some = min(more, np.int64(left[r])) if more > 0 else -min(-more, np.int64(taken[r]))
        left[r] -= some
        taken[r] += some
        more -= some
