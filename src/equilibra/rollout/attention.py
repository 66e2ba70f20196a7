"""An attention process: everything of a model but the experts, for its share of the requests.

Symbols: B sequences of a micro-batch, T tokens it processes, L MoE layers, K experts per token, D width.

A forward pass is a generator that stops at every MoE layer and yields what the experts need (`Routed`). While one
micro-batch waits for its experts, the process works on the next. With m of them in flight neither side idles, as long
as m * max(T_a, T_e) covers a round trip.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import ExecuteError
from equilibra.rollout.control import NAP_S, Ask, Loader, apply_setting
from equilibra.rollout.ends import Ends
from equilibra.rollout.instances import Instances
from equilibra.rollout.m2n import Pairs
from equilibra.rollout.pages import PagedCache
from equilibra.rollout.processes import Outbox
from equilibra.rollout.scheduler import Batch, Growing, Scheduler
from equilibra.rollout.setting import Pass, PoolModel, PoolSetting, Routed, Statistics


@dataclass(eq=False)
class _Flight:
    """A forward pass that waits for experts."""

    batch: Batch
    steps: Pass
    routed: Routed
    experts: list[NDArray[np.int32]] = field(default_factory=list)
    """[T, K] layer by layer"""


class _Process:
    """State of an attention process."""

    def __init__(self, number: int, setting: PoolSetting, model: PoolModel, ends: Ends, instances: Instances) -> None:
        self.sender, self.instances = ends.sender(number, model.device), instances
        self.model, self.version = model.attention(model.dtype, model.device), 0
        self.cache = PagedCache(setting.num_pages, setting.page, dtype=model.dtype, device=model.device)
        self.scheduler = Scheduler(
            self.cache, micro_batches=setting.micro_batches, places=setting.places,
            prefill_tokens=setting.prefill_tokens, end=model.end,
        )  # fmt: skip
        self.flights: dict[int, _Flight] = {}
        """by micro-batch"""
        self._pairs_LE = np.zeros_like(instances.home_LE, np.int64)
        self.statistics = Statistics.none(instances)

    def take_statistics(self) -> Statistics:
        taken, self.statistics = self.statistics, Statistics.none(self.instances)
        taken.preempted, self.scheduler.num_preempted = self.scheduler.num_preempted, 0
        return taken

    # --- micro-batches ---

    def step(self) -> bool:
        """Advance every micro-batch that can; returns whether any could."""
        moved = False
        for number in range(len(self.scheduler.running)):
            flight = self.flights.get(number)
            if flight is None:
                batch = self.scheduler.next_batch(number, self.flights) if self.scheduler.busy else None
                if batch is not None:
                    self._advance(number, batch, self.model.forward(batch), None, [])
                    moved = True
            elif self.sender.arrived(number):
                self._advance(number, flight.batch, flight.steps, self._combined(number, flight.routed), flight.experts)
                moved = True
        if moved:
            self.sender.made_progress()
        return moved

    def _advance(
        self, number: int, batch: Batch, steps: Pass, result: Tensor | None, experts: list[NDArray[np.int32]]
    ) -> None:
        """Run a pass up to its next MoE layer, or to its end."""
        try:
            routed = next(steps) if result is None else steps.send(result)
        except StopIteration as ended:
            self.flights.pop(number, None)
            every_TLK = np.stack(experts, axis=1)
            self.scheduler.finish(batch, ended.value, np.split(every_TLK, np.cumsum(batch.sizes)[:-1]))
            self.statistics.passes += 1
            return
        chosen = routed.experts_TK.to(torch.int32).cpu().numpy()
        self.flights[number] = _Flight(batch, steps, routed, [*experts, chosen])
        self._send(number, routed, chosen)

    def _send(self, number: int, routed: Routed, experts_TK: NDArray[np.int32]) -> None:
        """Send every token to the processes chosen for its experts."""
        layer, top_k, expert_P = routed.layer, experts_TK.shape[1], experts_TK.ravel()
        process_P = self.instances.choose(layer, expert_P, self._pairs_LE[layer])
        rows_N = np.bincount(process_P, minlength=self.instances.num_processes)
        self.statistics.tokens_LE[layer] += np.bincount(expert_P, minlength=self._pairs_LE.shape[1])
        self.statistics.rows_LN[layer] += rows_N
        by_process = np.split(np.lexsort((expert_P, process_P)), np.cumsum(rows_N)[:-1])
        for process, place_P in enumerate(by_process):
            if place_P.size:
                tokens_N, row_P = np.unique(place_P // top_k, return_inverse=True)
                pairs = Pairs(
                    layer=layer, row_P=row_P.astype(np.int32), expert_P=expert_P[place_P],
                    place_P=place_P.astype(np.int32),
                )  # fmt: skip
                self.sender.send(process, number, routed.hidden_TD, tokens_N, pairs)

    def _combined(self, number: int, routed: Routed) -> Tensor:
        """Weighted sum of every token's experts."""
        num, top_k = routed.experts_TK.shape
        results_TKD = self.sender.tray(number)[: num * top_k].view(num, top_k, -1)
        return (results_TKD * routed.weights_TK.to(results_TKD.dtype)[:, :, None]).sum(dim=1)


def run_attention(
    pipe: Connection, number: int, setting: PoolSetting, model: PoolModel, ends: Ends, instances: Instances
) -> None:
    """Serve until the pipe closes."""
    apply_setting(model.device, setting.threads)
    outbox = Outbox(pipe)
    try:
        process = _Process(number, setting, model, ends, instances)
        outbox.send(process.sender.handle())
        _serve(pipe, outbox, process)
    finally:
        outbox.close()


def _serve(pipe: Connection, outbox: Outbox, process: _Process) -> None:
    loader, scheduler = Loader(), process.scheduler
    while True:
        mark = process.sender.mark()
        while pipe.poll():
            _answer(outbox, pipe.recv(), process, loader)
        moved = process.step()
        for one in scheduler.take_done():
            outbox.send((one.number, one.generation(process.version)))
            moved = True
        if moved:
            continue
        if not process.flights and scheduler.busy:
            queued = len(scheduler.waiting) + len(scheduler.aside)
            raise ExecuteError(
                f"{scheduler.num_running} running and {queued} waiting sequences cannot continue, "
                f"with {process.cache.num_free} of {process.cache.num_pages} pages free: a defect"
            )
        process.sender.wait(mark, NAP_S)


def _answer(outbox: Outbox, asked: Any, process: _Process, loader: Loader) -> None:  # noqa: ANN401
    what, value = asked
    if what is Ask.GENERATE:
        process.scheduler.temperature, requests = value
        process.scheduler.add([Growing.of(number, request) for number, request in requests])
    elif what is Ask.INSTANCES:
        process.instances, process.statistics = value, Statistics.none(value)
    elif what is Ask.LOAD_BEGIN:
        process.version = value
        loader.begin(process.model.targets)
    elif what is Ask.LOAD:
        outbox.send(loader.take(*value))
    elif what is Ask.LOAD_END:
        outbox.send(loader.end())
    elif what is Ask.STATISTICS:
        outbox.send(process.take_statistics())
    elif what is Ask.CONNECT:
        process.sender.connect(value)
        outbox.send(None)
