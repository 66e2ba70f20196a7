"""The timeline of a step: every rank and link, from visit to visit, on one expert-parallel group per pipeline stage.

Symbols: V visits, L layers, M micro-batches, R ranks, N nodes, P passes, K = 2 kinds of links: inside a node, to its
host.

The log-prob stage runs all micro-batches forward. The update runs one forward, one backward (1F1B): a pipeline stage
with n stages behind it starts n + 1 forward passes first. Optimizer steps do not mix. A visit is one pass of one
micro-batch through one layer; activation recompute adds a forward visit before each backward one. In a forward visit,
rank r

    computes attention ─► dispatches (waits for all) ─► computes its experts (waits for its copies) ─► combines (waits)

and in a backward visit the same from right to left. An all-to-all starts when the last rank arrives, ends when its
busiest rank is done, and occupies NVLink and the network; copies use the gaps. Each link serves its copies in the order
in which they are needed, up to the prefetch depth ahead. So a queue is two numbers per visit: `need`, the work to
finish before the visit's experts start, and `limit`, the work known by then. The kernel only adds and takes maxima, so
nothing finishes earlier when a time grows.

There is one queue inside each node, one over each node's host link (never interrupted), and one across nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from equilibra.core.kernel import inlined, kernel
from equilibra.core.visit import Stage
from equilibra.events.run import PASSES
from equilibra.events.schema import Direction
from equilibra.simulate.times import RunSetting, Times


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
    """Serve a queue from `free` to `until`; returns (done, free, the next visit whose copies are missing)."""
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
    """Run visits `first` to `last - 1`, changing the arrays after `net_limit`, which hold state and results.

    Queues inside nodes (k = 0) give way to all-to-alls, those over host links (k = 1) do not.
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


class StageRecord(NamedTuple):
    """Times of one pipeline stage in the recorded micro-batch."""

    visits: Visits
    """all visits of the stage"""
    chosen: NDArray[np.int64]
    """[W] numbers of the recorded visits"""
    begin_us: NDArray[np.float64]
    """[V] when each visit begins"""
    times_us: NDArray[np.float64]
    """[W, R, 6] as described at `timeline.COLUMNS`"""
    ready_us: NDArray[np.float64]
    """[N, V] when the flash copies of each visit have arrived"""
    net_ready_us: NDArray[np.float64]
    """[V] when its standing copies and moved homes have arrived"""


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupTimeline:
    """Times of a step of one data-parallel replica."""

    optimizer_ends_us: NDArray[np.float64]
    """[optimizer steps] end of each, from the end of the rollout"""
    layer_us_PLM: NDArray[np.float64]
    """[P, L, M] time of each pass through each layer and micro-batch"""
    records: list[StageRecord]
    """by pipeline stage"""

    @property
    def step_us(self) -> float:
        """From the end of the rollout to the end of the last optimizer step."""
        return float(self.optimizer_ends_us[-1])


def run_group(times: Times, setting: RunSetting, *, window: int = -1) -> GroupTimeline:
    """Run the step and record micro-batch `window` (-1: none)."""
    num_layers, num_micro_batches, *_ = times.shape
    cuts = [num_layers * i // setting.pipeline_stages for i in range(setting.pipeline_stages + 1)]
    stages = [
        _PipelineStage(times, setting, number, range(first, last), window)
        for number, (first, last) in enumerate(pairwise(cuts))
    ]
    finished: dict[tuple[int, Pass], float] = {}

    def ready(number: int, one: Pass) -> float | None:
        """When a pass may start on a pipeline stage; None if the pass it needs has not run."""
        neighbour = number - 1 if one.direction is Direction.FORWARD else number + 1
        if not 0 <= neighbour < len(stages):
            return 0.0
        done = finished.get((neighbour, one))
        return None if done is None else done + float(times.hop_us[one.micro_batch])

    while any(stage.waiting for stage in stages):
        for number, stage in enumerate(stages):
            while stage.waiting and (start := ready(number, stage.waiting[0])) is not None:
                one = stage.waiting.pop(0)
                finished[number, one] = stage.run(one, start)
    layer_us = np.zeros((len(PASSES), num_layers, num_micro_batches))
    for stage in stages:
        stage.add_layer_us(layer_us)
    return GroupTimeline(
        optimizer_ends_us=np.array([stage.optimizer_ends for stage in stages]).max(axis=0),
        layer_us_PLM=layer_us,
        records=[stage.record() for stage in stages],
    )


class _PipelineStage:
    def __init__(self, times: Times, setting: RunSetting, number: int, layers: range, window: int) -> None:
        _, num_micro_batches, num_ranks, num_nodes = times.shape
        self.times = times
        self.is_last = number == setting.pipeline_stages - 1
        self.waiting = passes_of_stage(number, num_micro_batches, setting)
        self.visits = visits_of(self.waiting, layers, activation_recompute=setting.activation_recompute)
        self.queues = _queues(times, self.visits, setting)
        self.at = 0
        self.optimizer_ends: list[float] = []
        self.rank_free = np.zeros(num_ranks)
        planned = float(times.plan_ready_us[layers[0]])  # no copy is fetched before it is planned
        self.done_KN, self.free_KN = np.zeros((2, num_nodes)), np.full((2, num_nodes), planned)
        self.at_KN = np.zeros((2, num_nodes), np.int64)
        self.net = np.array([0.0, planned, 0.0])  # done, free, next visit not ready
        size = self.visits.layer.size
        self.begin, self.end = np.zeros(size), np.zeros(size)
        self.ready_KNV, self.net_ready = np.zeros((2, num_nodes, size)), np.zeros(size)
        self.chosen = np.nonzero(self.visits.micro_batch == window)[0]
        self.window = np.full(size, -1, np.int64)
        self.window[self.chosen] = np.arange(self.chosen.size)
        self.recorded = np.zeros((self.chosen.size, num_ranks, COLUMNS))

    @property
    def now(self) -> float:
        return float(self.rank_free.max())

    def run(self, one: Pass, ready: float) -> float:
        times, visits, queues = self.times, self.visits, self.queues
        np.maximum(self.rank_free, ready, out=self.rank_free)
        backward = one.direction is Direction.BACKWARD
        if self.is_last and backward:
            self.rank_free += times.outer_us[1, one.micro_batch]
        last = self._end_of_pass(one)
        run_visits(
            self.at, last, visits.stage, visits.direction, visits.layer, visits.micro_batch,
            times.attention_us, times.experts_us, times.slowed_us, times.inside_us, times.across_us, times.flash_us,
            times.plan_ready_us, times.latency_us, times.counts_us, times.exposed_copies,
            self.rank_free.size // self.done_KN.shape[1], queues.need_KVN, queues.limit_KVN, queues.net_need,
            queues.net_limit, self.rank_free, self.done_KN, self.free_KN, self.at_KN, self.net, self.ready_KNV,
            self.net_ready, self.begin, self.end, self.window, self.recorded,
        )  # fmt: skip
        self.at = last
        if self.is_last and not backward:
            self.rank_free += times.outer_us[0, one.micro_batch]
        through = self.now
        if one.chunk >= 0 and visits.last_of_chunk[last - 1] == last - 1:
            self._optimizer_step(last - 1)
        return through

    def _end_of_pass(self, one: Pass) -> int:
        again = self.visits.direction[self.at] == Direction.FORWARD_AGAIN
        layers = np.unique(self.visits.layer).size
        return self.at + (2 * layers if one.direction is Direction.BACKWARD and again else layers)

    def _optimizer_step(self, visit: int) -> None:
        """Wait for all links to drain, then step."""
        total_KN, net_total = self.queues.total_KVN[:, visit], self.queues.net_total[visit]
        drained = float((self.free_KN + total_KN - self.done_KN).max())
        end = max(self.now, drained, float(self.net[1] + net_total - self.net[0])) + self.times.optimizer_us
        self.optimizer_ends.append(end)
        self.rank_free[:] = end
        self.done_KN[:], self.free_KN[:] = total_KN, end
        self.net[0], self.net[1] = net_total, end

    def add_layer_us(self, layer_us: NDArray[np.float64]) -> None:
        """Add the time of every visit to its pass, layer and micro-batch."""
        backward = (self.visits.direction != Direction.FORWARD).astype(np.int64)
        number = self.visits.stage + backward  # 0 log-prob forward, 1 update forward, 2 update backward
        np.add.at(layer_us, (number, self.visits.layer, self.visits.micro_batch), self.end - self.begin)

    def record(self) -> StageRecord:
        ready = self.ready_KNV.max(axis=0)
        return StageRecord(self.visits, self.chosen, self.begin, self.recorded, ready, self.net_ready)


class _Queues(NamedTuple):
    """Cumulated work of a pipeline stage's links, in microseconds by visit."""

    need_KVN: NDArray[np.float64]
    limit_KVN: NDArray[np.float64]
    total_KVN: NDArray[np.float64]
    net_need: NDArray[np.float64]
    net_limit: NDArray[np.float64]
    net_total: NDArray[np.float64]


def _queues(times: Times, visits: Visits, setting: RunSetting) -> _Queues:
    size, depth, last = visits.layer.size, setting.prefetch_depth, visits.last_of_chunk
    backward, forward = visits.direction == Direction.BACKWARD, visits.direction == Direction.FORWARD
    fetches = ~backward | (not setting.activation_recompute)
    if times.exposed_copies:
        fetches &= ~forward
    flash_VN = times.flash_us[visits.stage, visits.layer, visits.micro_batch] * fetches[:, None]
    by_host = np.array(times.host_path)[visits.stage][:, None]
    first_visit, final_visit = _ends_of_layers(visits)
    later = (last[first_visit] > last[0]).astype(np.int64)
    out_VN, back_VN = flash_VN * ~by_host, times.flash_return_us[visits.layer, visits.micro_batch] * backward[:, None]
    out_VN[first_visit] += times.setup_inside_us[later, visits.layer[first_visit]][:, None]
    back_VN[final_visit] += times.return_inside_us[visits.layer[final_visit]][:, None]
    net_out, net_back = np.zeros(size), np.zeros(size)
    net_out[first_visit] = times.setup_across_us[later, visits.layer[first_visit]]
    net_back[final_visit] = times.return_across_us[visits.layer[final_visit]] + times.reduce_us
    ahead = np.minimum(np.arange(size) + depth, last)
    out, back, host = _sums(out_VN), _sums(back_VN), _sums(flash_VN * by_host)
    net_out, net_back = _sums(net_out), _sums(net_back)
    visit, begin = np.arange(size), np.searchsorted(last, last)  # begin: the first visit of the optimizer step
    return _Queues(
        need_KVN=np.stack([out[visit + 1] + back[np.maximum(visit - depth, begin)], host[visit + 1]]),
        limit_KVN=np.stack([out[ahead + 1] + back[visit], host[ahead + 1]]),
        total_KVN=np.stack([out[last + 1] + back[last + 1], host[ahead + 1]]),
        net_need=net_out[visit + 1] + net_back[begin],
        net_limit=net_out[last + 1] + net_back[visit],
        net_total=net_out[last + 1] + net_back[last + 1],
    )


def _sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[V + 1, ...] cumulative sums, from 0."""
    return np.concatenate([np.zeros((1, *values.shape[1:])), np.cumsum(values, axis=0)])


def _ends_of_layers(visits: Visits) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and last visit of every layer in every optimizer step."""
    key = visits.last_of_chunk * (int(visits.layer.max()) + 1) + visits.layer
    _, first = np.unique(key, return_index=True)
    _, from_end = np.unique(key[::-1], return_index=True)
    return first, key.size - 1 - from_end
