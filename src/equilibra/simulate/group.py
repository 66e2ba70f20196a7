"""Run a whole step on one expert-parallel group per pipeline stage.

Symbols: V visits, N nodes, L layers, M micro-batches, P passes, K = 2 kinds of links: inside a node, to its host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.core.visit import Stage
from equilibra.events.run import PASSES
from equilibra.events.schema import Direction
from equilibra.simulate.setting import RunSetting
from equilibra.simulate.timeline import COLUMNS, Pass, Visits, passes_of_stage, run_visits, visits_of
from equilibra.simulate.times import Times

__all__ = ["GroupTimeline", "StageRecord", "run_group"]


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
    if setting.pipeline_stages > num_layers:
        raise InputError(f"{num_layers} layers cannot fill {setting.pipeline_stages} pipeline stages: use fewer")
    cuts = [num_layers * i // setting.pipeline_stages for i in range(setting.pipeline_stages + 1)]
    stages = [
        _PipelineStage(times, setting, number, range(cuts[number], cuts[number + 1]), window)
        for number in range(setting.pipeline_stages)
    ]
    finished: dict[tuple[int, Stage, Direction, int], float] = {}
    while any(stage.waiting for stage in stages):
        for number, stage in enumerate(stages):
            while stage.waiting and (ready := _ready(finished, stage.waiting[0], number, stages, times)) is not None:
                one = stage.waiting.pop(0)
                finished[number, one.stage, one.direction, one.micro_batch] = stage.run(one, ready)
    layer_us = np.zeros((len(PASSES), num_layers, num_micro_batches))
    for stage in stages:
        stage.add_layer_us(layer_us)
    return GroupTimeline(
        optimizer_ends_us=np.array([stage.optimizer_ends for stage in stages]).max(axis=0),
        layer_us_PLM=layer_us,
        records=[stage.record() for stage in stages],
    )


def _ready(
    finished: dict[tuple[int, Stage, Direction, int], float],
    one: Pass,
    number: int,
    stages: list[_PipelineStage],
    times: Times,
) -> float | None:
    """When a pass may start on a pipeline stage; None if the pass it needs has not run."""
    forward = one.direction is Direction.FORWARD
    neighbour = number - 1 if forward else number + 1
    if not 0 <= neighbour < len(stages):
        return 0.0
    done = finished.get((neighbour, one.stage, one.direction, one.micro_batch))
    return None if done is None else done + float(times.hop_us[one.micro_batch])


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
    """Work of a pipeline stage's links: cumulated microseconds by visit."""

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
