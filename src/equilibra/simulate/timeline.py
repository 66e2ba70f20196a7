"""The timeline: every rank and link of one expert-parallel group, from visit to visit.

A visit is one pass of one micro-batch through one layer. Forward, rank r

    computes attention ─► dispatches (waits for all) ─► computes its experts (waits for its copies) ─► combines (waits)

and backward the same from right to left. An all-to-all starts when the last rank arrives and ends for all when its
busiest rank is through, so the balance of a plan counts by its maxima alone. It occupies a node's NVLink and the
network for what they have to move; so do copies, which run in the gaps it leaves. Each link serves its copies in the
order they are needed, up to the prefetch depth ahead, and always lets an all-to-all go first. A queue is therefore two
numbers per visit: `need`, the work that must be done before the visit's experts start, and `limit`, the work that is
known by then. All of it is additions and maxima of the given times, so nothing gets faster when a time grows.

Queues: copies inside the nodes (one per node), over the host link (one per node, never interrupted), across
nodes (one).
"""

from __future__ import annotations

import numpy as np

from equilibra.core.kernel import inlined, kernel
from equilibra.events.schema import Direction

__all__ = ["COLUMNS", "run_visits"]

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
    need_VN, limit_VN, host_need_VN, host_limit_VN, net_need, net_limit,
    rank_free, done_N, free_N, at_N, host_done_N, host_free_N, host_at_N, net,
    ready_NV, host_ready_NV, net_ready, begin_V, end_V, window, record,
):  # fmt: skip
    """Run visits first to last - 1; all arrays after `net_limit` are state or results and are changed."""
    num_ranks = rank_free.size
    num_nodes = done_N.size
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
                done_N[n], free_N[n], at_N[n] = _drain(
                    done_N[n], free_N[n], until, limit_VN[w, n], need_VN[:, n], ready_NV[n], at_N[n]
                )
                host_done_N[n], host_free_N[n], host_at_N[n] = _drain(
                    host_done_N[n],
                    host_free_N[n],
                    until,
                    host_limit_VN[w, n],
                    host_need_VN[:, n],
                    host_ready_NV[n],
                    host_at_N[n],
                )
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
            free_N[n] = sent + local
            waits = net_waits
            if need_VN[v, n] > done_N[n] + 1e-9:
                waits = max(waits, free_N[n] + need_VN[v, n] - done_N[n])
            if host_need_VN[v, n] > host_done_N[n] + 1e-9:
                waits = max(waits, host_free_N[n] + host_need_VN[v, n] - host_done_N[n])
            if exposed_copies and direction[v] == FORWARD:
                free_N[n] += flash_us[st, l, m, n]
                waits = max(waits, free_N[n])
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
            done_N[n], free_N[n], at_N[n] = _drain(
                done_N[n], free_N[n], sync, limit_VN[v, n], need_VN[:, n], ready_NV[n], at_N[n]
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
            free_N[n] = sent + local
        end_V[v] = rank_free.max()
