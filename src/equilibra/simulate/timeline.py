"""The timeline: every rank and link of one expert-parallel group, from visit to visit.

The log-prob stage runs all micro-batches forward. The update runs one forward, one backward (1F1B): a pipeline stage
with n stages behind it starts n + 1 forward passes first. Optimizer steps do not mix. A visit is one pass of one
micro-batch through one layer; activation recompute adds a forward visit before each backward one. In a forward visit,
rank r

    computes attention ─► dispatches (waits for all) ─► computes its experts (waits for its copies) ─► combines (waits)

and in a backward visit the same from right to left. An all-to-all starts when the last rank arrives, ends when its
busiest rank is done, and occupies NVLink and the network; copies run in the gaps. Each link serves its copies in the
order they are needed, up to the prefetch depth ahead. So a queue is two numbers per visit: `need`, the work to finish
before the visit's experts start, and `limit`, the work known by then. Only additions and maxima occur, so nothing gets
faster when a time grows.

Queues: inside each node, over each node's host link (never interrupted), and one across nodes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from equilibra.core.kernel import inlined, kernel
from equilibra.core.visit import Stage
from equilibra.events.schema import Direction
from equilibra.simulate.setting import RunSetting

__all__ = ["COLUMNS", "Pass", "Visits", "chunks", "passes_of_stage", "run_visits", "visits_of"]


class Pass(NamedTuple):
    """One micro-batch through all layers of a pipeline stage, forward or backward."""

    stage: Stage
    direction: Direction
    micro_batch: int
    chunk: int
    """number of the optimizer step from 0; -1 in the log-prob stage"""


class Visits(NamedTuple):
    """All visits of one pipeline stage, in order."""

    stage: NDArray[np.int64]
    direction: NDArray[np.int64]
    layer: NDArray[np.int64]
    micro_batch: NDArray[np.int64]
    last_of_chunk: NDArray[np.int64]
    """the last visit before weights change: no copy is fetched beyond it"""


def chunks(num_micro_batches: int, optimizer_steps: int) -> list[range]:
    """Micro-batches of each optimizer step, split as evenly as possible."""
    bounds = [num_micro_batches * i // optimizer_steps for i in range(optimizer_steps + 1)]
    return [range(a, b) for a, b in pairwise(bounds) if b > a]


def passes_of_stage(number: int, num_micro_batches: int, setting: RunSetting) -> list[Pass]:
    """The passes of pipeline stage `number`, in order."""
    found: list[Pass] = []
    if setting.logprob_stage:
        found += [Pass(Stage.LOGPROB, Direction.FORWARD, m, -1) for m in range(num_micro_batches)]
    for chunk, part in enumerate(chunks(num_micro_batches, setting.optimizer_steps)):
        ahead = min(setting.pipeline_stages - number, len(part))
        forward = [Pass(Stage.UPDATE, Direction.FORWARD, m, chunk) for m in part]
        backward = [Pass(Stage.UPDATE, Direction.BACKWARD, m, chunk) for m in part]
        found += forward[:ahead]
        for i, one in enumerate(backward):
            found.append(one)
            found += forward[ahead + i : ahead + i + 1]
    return found


def visits_of(passes: list[Pass], layers: range, *, activation_recompute: bool) -> Visits:
    """The visits these passes make to the layers of a pipeline stage."""
    rows: list[tuple[int, int, int, int, int]] = []
    for one in passes:
        if one.direction is Direction.FORWARD:
            rows += [(one.stage.number, Direction.FORWARD, layer, one.micro_batch, one.chunk) for layer in layers]
            continue
        for layer in reversed(layers):
            if activation_recompute:
                rows.append((one.stage.number, Direction.FORWARD_AGAIN, layer, one.micro_batch, one.chunk))
            rows.append((one.stage.number, Direction.BACKWARD, layer, one.micro_batch, one.chunk))
    table = np.array(rows, np.int64).reshape(-1, 5)
    chunk = np.maximum(table[:, 4], 0)  # weights are the same in the log-prob stage and in the first optimizer step
    last = np.searchsorted(chunk, chunk, side="right") - 1
    stage, direction, layer, micro_batch, _ = np.ascontiguousarray(table.T)
    return Visits(stage, direction, layer, micro_batch, last)


BACKWARD, FORWARD = int(Direction.BACKWARD), int(Direction.FORWARD)
COLUMNS = 6
"""recorded times of a rank in a visit: attention start and end, dispatch end, experts start and end, combine end"""


@inlined
def _drain(done, free, until, limit, need, ready, at):  # type: ignore[no-untyped-def]
    """Serve a queue from when it is free until a time; returns (done, free, next visit that is not ready)."""
    after = done + max(until - free, 0.0)
    after = max(min(after, limit), done)
    while at < need.size and need[at] <= after + 1e-9:
        ready[at] = free + max(need[at] - done, 0.0)
        at += 1
    return after, max(until, free), at


@kernel
def run_visits(  # type: ignore[no-untyped-def]
    first, last, stage, direction, layer, micro_batch,
    attention_us, experts_us, slowed_us, inside_us, across_us, flash_us, plan_ready_us,
    latency_us, counts_us, exposed_copies, group,
    need_KVN, limit_KVN, net_need, net_limit,
    rank_free, done_KN, free_KN, at_KN, net, ready_KNV, net_ready, begin_V, end_V, window, record,
):  # fmt: skip
    """Run visits first to last - 1; all arrays after `net_limit` are state or results and are changed.

    K: queues inside nodes (0), which give way to all-to-alls, and over host links (1).
    """
    num_ranks = rank_free.size
    num_nodes = done_KN.shape[1]
    arrived = np.empty(num_ranks)
    for v in range(first, last):
        st = stage[v]
        back = direction[v] == BACKWARD
        step = 0 if st == 0 else (2 if back else 1)
        l = layer[v]
        m = micro_batch[v]
        begin = rank_free.max()
        begin_V[v] = begin
        kept = window[v]
        for r in range(num_ranks):
            arrived[r] = rank_free[r] if back else rank_free[r] + attention_us[0, m, r]
            if kept >= 0:
                record[kept, r, 0] = rank_free[r]
                record[kept, r, 1] = arrived[r]
        sync = arrived.max()
        if direction[v] == FORWARD:
            sync += counts_us
        sync = max(sync, plan_ready_us[l])
        for until, w in ((begin, max(v - 1, 0)), (sync, v)):
            for n in range(num_nodes):
                for k in range(2):
                    done_KN[k, n], free_KN[k, n], at_KN[k, n] = _drain(
                        done_KN[k, n], free_KN[k, n], until, limit_KVN[k, w, n], need_KVN[k, :, n], ready_KNV[k, n],
                        at_KN[k, n],
                    )  # fmt: skip
            net[0], net[1], net_at = _drain(net[0], net[1], until, net_limit[w], net_need, net_ready, int(net[2]))
            net[2] = net_at
        sent = sync + latency_us  # dispatch, or backward the gradients of combine
        wire = 0.0
        slowest = 0.0
        for r in range(num_ranks):
            wire = max(wire, across_us[st, l, m, r])
            slowest = max(slowest, inside_us[st, l, m, r], across_us[st, l, m, r])
        net[1] = sent + wire
        net_waits = net[1] + net_need[v] - net[0] if net_need[v] > net[0] + 1e-9 else 0.0
        for n in range(num_nodes):
            local = 0.0
            for r in range(n * group, (n + 1) * group):
                local = max(local, inside_us[st, l, m, r])
            free_KN[0, n] = sent + local
            waits = net_waits
            for k in range(2):
                if need_KVN[k, v, n] > done_KN[k, n] + 1e-9:
                    waits = max(waits, free_KN[k, n] + need_KVN[k, v, n] - done_KN[k, n])
            if exposed_copies and direction[v] == FORWARD:
                free_KN[0, n] += flash_us[st, l, m, n]
                waits = max(waits, free_KN[0, n])
            got = sent + slowest
            for r in range(n * group, (n + 1) * group):
                start = max(got, waits)
                arrived[r] = start + experts_us[step, l, m, r] + slowed_us[step, l, m, r]
                if kept >= 0:
                    record[kept, r, 2] = got
                    record[kept, r, 3] = start
                    record[kept, r, 4] = arrived[r]
        sync = arrived.max()
        for n in range(num_nodes):
            done_KN[0, n], free_KN[0, n], at_KN[0, n] = _drain(
                done_KN[0, n], free_KN[0, n], sync, limit_KVN[0, v, n], need_KVN[0, :, n], ready_KNV[0, n], at_KN[0, n]
            )
        net[0], net[1], net_at = _drain(net[0], net[1], sync, net_limit[v], net_need, net_ready, int(net[2]))
        net[2] = net_at
        sent = sync + latency_us  # combine, or backward the gradients of dispatch
        net[1] = sent + wire
        for n in range(num_nodes):
            local = 0.0
            for r in range(n * group, (n + 1) * group):
                local = max(local, inside_us[st, l, m, r])
                got = sent + slowest
                rank_free[r] = got + attention_us[1, m, r] if back else got
                if kept >= 0:
                    record[kept, r, 5] = got
                    if back:  # attention comes last
                        record[kept, r, 0] = got
                        record[kept, r, 1] = rank_free[r]
            free_KN[0, n] = sent + local
        end_V[v] = rank_free.max()
