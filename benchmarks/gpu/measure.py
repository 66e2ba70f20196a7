"""Measure one case: contenders in turn inside every layer and micro-batch, repeat after repeat.

A round runs every rank once, and for every rank all contenders in turn, in an order that rotates by one from rank to
rank and round to round: a device's clock drifts by several percent within seconds, so what is compared must run close
together. The first round of every layer and micro-batch does not count, because kernels are chosen and memory is
allocated in it. A layer and micro-batch is finished before the next one starts, so a case that runs out of time has
only complete ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu.case import Case, GpuSetting
from benchmarks.gpu.contenders import NAMES, Contender, seconds_to_plan
from benchmarks.gpu.records import FIELDS
from benchmarks.gpu.replay import RankTimes, Replay, Sizes

WAITED = 0.9
"""part of a call that the host may be queueing; above, the device may have waited for it"""
MOST_HEAD_START_US = 20_000.0
OFTEN = 0.02
"""part of the calls from which a case says that the device waited"""


@dataclass(kw_only=True, eq=False)
class Measured:
    """One case."""

    contenders: list[Contender]
    """what ran"""
    rows: NDArray[Any]
    """records of FIELDS, `case` not filled in"""
    notes: list[str] = field(default_factory=list)
    """what was left out"""
    host_bound_share: float = 0.0
    """part of the timed calls in which the device may have waited for the host to queue kernels"""


def measure(
    case: Case, every: list[Contender], setting: GpuSetting, *, device: torch.device, seconds: float | None
) -> Measured:
    """Run the contenders of a case for at most `seconds`; at least one layer and micro-batch is measured."""
    begin, threads = perf_counter(), torch.get_num_threads()
    sizes = Sizes.of([work for contender in every for work in contender.every_work()])
    runner = _Runner(case, setting, every, Replay(case.model, sizes, device=device, seed=setting.seed))
    cells = [(layer, m) for m in range(case.load.num_micro_batches) for layer in range(case.load.num_layers)]
    parts: list[NDArray[Any]] = []
    start = perf_counter()
    torch.set_num_threads(1 if device.type == "cpu" else threads)  # small products wait for threads, not for work
    try:
        for done, (layer, m) in enumerate(cells, start=1):
            parts.append(runner.cell(layer, m))
            each = (perf_counter() - start) / done
            if seconds is not None and done < len(cells) and perf_counter() - begin + each > seconds:
                runner.notes.append(f"{done} of {len(cells)} layers and micro-batches: no time for more")
                break
    finally:
        torch.set_num_threads(threads)
    del runner.replay
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the next case has other shapes
    waited = runner.host_bound / max(runner.calls, 1)
    if waited > OFTEN:
        runner.notes.append(f"the device may have waited for the host in {waited:.0%} of the calls")
    return Measured(
        contenders=every, rows=np.concatenate(parts), notes=runner.notes,
        host_bound_share=waited,
    )  # fmt: skip


class _Runner:
    """The contenders of a case on their buffers."""

    def __init__(self, case: Case, setting: GpuSetting, every: list[Contender], replay: Replay) -> None:
        self.case, self.setting, self.every, self.replay = case, setting, every, replay
        self.notes: list[str] = []
        self.head_start_us = dict.fromkeys(NAMES, 0.0)
        self.calls = self.host_bound = 0

    def cell(self, layer: int, micro_batch: int) -> NDArray[Any]:
        """All repeats of a layer and micro-batch."""
        found = []
        for repeat in range(-1, self.setting.repeats):
            times: dict[str, list[RankTimes]] = {contender.name: [] for contender in self.every}
            for rank in range(self.case.cluster.num_ranks):
                turn = (repeat + rank) % len(self.every)
                for contender in self.every[turn:] + self.every[:turn]:
                    time = self._rank(contender, layer, micro_batch, rank, timed=repeat >= 0)
                    times[contender.name].append(time)
            if repeat >= 0:
                found += [self._rows(one, layer, micro_batch, repeat, times[one.name]) for one in self.every]
        return np.concatenate(found)

    def _rank(self, contender: Contender, layer: int, micro_batch: int, rank: int, *, timed: bool) -> RankTimes:
        """Run one rank of a contender once."""
        work, move = contender.works[layer][micro_batch][rank], contender.moves(layer, micro_batch)[rank]
        head_start_us = self.head_start_us[contender.name]
        (time,) = self.replay.run([work], [move], contender.path, head_start_us=head_start_us)
        self._watch_host(contender.name, sum(time[:3]), timed=timed)
        return time

    def _rows(
        self, contender: Contender, layer: int, micro_batch: int, repeat: int, times: list[RankTimes]
    ) -> NDArray[Any]:
        """A record per rank."""
        works, moves = contender.works[layer][micro_batch], contender.moves(layer, micro_batch)
        plan_us = 0.0
        if contender.planning is not None:
            plan_us = seconds_to_plan(contender.planning, layer, micro_batch) * 1e6
        rows = np.zeros(len(works), FIELDS)
        rows["contender"], rows["repeat"] = NAMES.index(contender.name), repeat
        rows["layer"], rows["micro_batch"] = self.case.layers[layer], micro_batch
        rows["rank"], rows["plan_us"] = np.arange(len(works)), plan_us
        rows["rows"], rows["instances"] = [w.num_rows for w in works], [w.num_instances for w in works]
        rows["copies"] = [move.num_copies for move in moves]
        weights, gradients = self.replay.expert_bytes, self.replay.gradient_bytes
        rows["bytes"] = [move.num_bytes(weights, gradients) for move in moves]
        for name in times[0]._fields:
            rows[name] = [getattr(time, name) for time in times]
        return rows

    def _watch_host(self, name: str, device_us: float, *, timed: bool) -> None:
        """Where the device may have waited for the host, give the host a longer head start."""
        host_us, head_start = self.replay.host_us, self.head_start_us[name]
        if not self.replay.cuda:
            return
        waited = host_us > WAITED * (head_start + device_us)
        self.calls += timed
        self.host_bound += timed and waited
        if waited:
            self.head_start_us[name] = min(max(2 * head_start, host_us), MOST_HEAD_START_US)
