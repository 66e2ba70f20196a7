"""Replay: ranks one after another on one device, each with its rows, its weights and its moves.

Symbols: N rows, D width, F inner width, P values of one expert in flat form, S spare slots.

Everything is allocated before timing: one pool of distinct random experts, which all ranks use in turn, two banks of
spare slots, float32 gradients, rows and their gradients. A rank computes with one bank while copies go into the other,
on their own stream; a pass ends when compute and copies are done. On a CPU there is no second stream, so copies run in
line.

Time of a rank: from the start of its pass to its end, copies included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.work import Moves, RankWork
from equilibra.core.errors import BudgetError
from equilibra.core.model import MoEModel
from equilibra.execute.experts import Activation, MoESpec
from equilibra.execute.experts.expert_math import backward, forward
from equilibra.execute.experts.weights import FlatLayout
from equilibra.execute.kernels import ExpertParts, RowWeights, add_in_order, has_triton, multiprocessors

Stamp = Any
"""a CUDA event or seconds"""
CYCLES_PER_US = 1_900
"""approximate clock of a GPU, for untimed waits"""
HEAD_START_US = 1500.0
"""time for the host to queue a rank: kernels, copies and stamps"""
REST, MOST_REST_US = 0.75, 20_000.0
"""rest as a share of the previous rank's time: a device without rests gets hot and its clock drifts by a few percent"""
NEIGHBOUR_HOMES = 4
"""experts of another layer: enough that caches do not keep them"""


class Clock:
    """Takes time stamps in one queue; call `settle` before reading times."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def stamp(self) -> Stamp:
        if not self.cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def settle(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def us(self, start: Stamp, end: Stamp) -> float:
        """Microseconds between two stamps."""
        return float(start.elapsed_time(end)) * 1e3 if self.cuda else (end - start) * 1e6

    def let_host_ahead(self, us: float) -> None:
        """Keep the device busy for this long, so that queueing by the host is not measured."""
        if self.cuda and us > 0:
            torch.cuda._sleep(int(us * CYCLES_PER_US))  # type: ignore[no-untyped-call]  # noqa: SLF001


class Sizes(NamedTuple):
    """The most that any rank needs."""

    rows: int
    """N"""
    staying: int
    """homes and standing copies"""
    flash: int
    """flash copies"""
    served: int = 0
    """gradients that come home"""

    @classmethod
    def of(cls, works: Sequence[RankWork]) -> Sizes:
        return cls(
            max(work.num_rows for work in works), max(len(work.staying) for work in works),
            max(len(work.flash) for work in works), max(sum(work.served) for work in works),
        )  # fmt: skip


class RankTimes(NamedTuple):
    """One rank in one layer and micro-batch, in microseconds."""

    copy_us: float
    """weights that had to come before it started"""
    forward_us: float
    """experts, and whatever of the copies took longer"""
    backward_us: float
    """the same, backward"""
    late_us: float
    """time that compute waited for copies, in both passes"""


class Replay:
    """Buffers of one shape, and the ranks that use them."""

    def __init__(self, model: MoEModel, sizes: Sizes, *, device: torch.device, seed: int = 0) -> None:
        self.model, self.sizes, self.device = model, sizes, device
        self.cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.clock = Clock(device)
        self.side: torch.cuda.Stream | None = None
        if self.cuda:
            self.side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.host_us = 0.0
        """host time to queue the last call"""
        self._last_us = 0.0
        """device time of the last call"""
        self._check_memory()
        torch.manual_seed(seed)
        spec = MoESpec(hidden=model.hidden, expert_ffn=model.expert_ffn, num_experts=1, top_k=1)
        self.layout = FlatLayout(spec.part_shapes())
        slots, values = max(sizes.flash, 1), self.layout.size
        self.staying = self.layout.experts(self._random(sizes.staying, values) * 0.02)
        self.banks = [self._random(slots, values) * 0.02 for _ in range(2)]
        self.bank_experts = [self.layout.experts(bank) for bank in self.banks]
        self.source = self._random(slots, values) * 0.02
        self.host_source = torch.empty(slots, values, dtype=self.dtype, pin_memory=self.cuda)
        self.host_source.copy_(self.source)
        self.gradients: list[ExpertParts] = self.layout.experts(self._zeros(sizes.staying + slots, values))
        self.neighbour_homes = self._zeros(min(sizes.staying, NEIGHBOUR_HOMES), values)
        """gradients of another layer's homes, which those of its copies are added to"""
        self.neighbour_copies = self._zeros(max(slots, sizes.served), values)
        """gradients of another layer's copies, those that this rank holds or those that others do"""
        self.host_copies = torch.zeros(slots, values, pin_memory=self.cuda)
        """the same on their way through the host"""
        self._arrived = self._zeros(max(slots, sizes.served), values)
        self._read = torch.zeros(multiprocessors(device), dtype=torch.int32, device=device)
        self.rows = self._random(sizes.rows, model.hidden)
        self.dy = self._random(sizes.rows, model.hidden) * 0.01
        self.dx = torch.empty_like(self.rows)
        self.weights_N, self.dweights_N = torch.rand(2, sizes.rows, device=device)
        torch.empty(self._scratch_bytes(), dtype=torch.uint8, device=device)  # freed, but kept by the allocator

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, device=self.device)

    @property
    def expert_bytes(self) -> int:
        return self.layout.size * self.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        return self.layout.size * 4

    def _check_memory(self) -> None:
        if not self.cuda:
            return
        model, sizes = self.model, self.sizes
        weights = (sizes.staying + 4 * sizes.flash + 4) * model.expert_parameters * 2
        gradients = (
            (sizes.staying + sizes.flash + 2 * max(sizes.flash, sizes.served) + NEIGHBOUR_HOMES + 4)
            * model.expert_parameters
            * 4
        )
        need = weights + gradients + sizes.rows * 3 * model.hidden * 2 + self._scratch_bytes()
        free, _ = torch.cuda.mem_get_info(self.device)
        if need > free:
            raise BudgetError(
                f"{sizes.rows} rows and {sizes.staying} experts of {model.name} need about {need / 2**30:.0f} GiB, "
                f"{free / 2**30:.0f} GiB are free: use fewer --tokens-per-rank"
            )

    def _scratch_bytes(self) -> int:
        """Approximate bytes both passes allocate for rows."""
        return self.sizes.rows * (3 * self.model.hidden + 10 * self.model.expert_ffn) * self.dtype.itemsize

    def run(self, works: Sequence[RankWork], moves: Sequence[Moves], path: str | None, *, head_start_us: float = 0.0
            ) -> list[RankTimes]:  # fmt: skip
        """Run all ranks of a layer and micro-batch, one after another."""
        self.clock.settle()
        rest_us = min(REST * self._last_us, MOST_REST_US)
        self.clock.let_host_ahead(max(HEAD_START_US + head_start_us, rest_us))
        begin = perf_counter()
        stamps = [
            self._rank(work, move, path or "device", bank=rank % 2)
            for rank, (work, move) in enumerate(zip(works, moves, strict=True))
        ]
        self.host_us = (perf_counter() - begin) * 1e6
        self.clock.settle()
        times = [self._times(*found) for found in stamps]
        self._last_us = sum(sum(time[:3]) for time in times)
        return times

    def _rank(self, work: RankWork, move: Moves, path: str, *, bank: int) -> list[Stamp]:
        """Stamps: start, weights there, forward computed, copies done, backward begun, computed, copies done."""
        count, sizes = work.num_rows, work.sizes
        instances = [*self.staying[: len(work.staying)], *self.bank_experts[bank][: len(work.flash)]]
        gradients = self.gradients[: len(sizes)]
        rows, dy, dx = self.rows[:count], self.dy[:count], self.dx[:count]
        stamps = [self.clock.stamp()]
        self._fetch(move.exposed, path, bank, alone=True)
        stamps.append(self.clock.stamp())
        copied = self._beside(lambda: self._fetch(move.ahead, path, 1 - bank), move.ahead)
        _, h = forward(Activation.SWIGLU, rows, sizes, instances) if count else (rows, rows)
        stamps += [*self._together(copied), self.clock.stamp()]
        copied = self._beside(
            lambda: self._backward_moves(move, path, 1 - bank), move.behind, move.returned, *move.added
        )
        if count:
            saved = (rows, h, dy)
            weighted = RowWeights(self.weights_N[:count], self.dweights_N[:count])
            backward(
                Activation.SWIGLU, saved, sizes, instances, gradients, dx, weighted=weighted, num_last=len(work.flash)
            )
        return stamps + self._together(copied)

    def _beside(self, moving: Callable[[], None], *amounts: int) -> Stamp | None:
        """Start moving something beside what the device computes; the stamp is at its end."""
        if not any(amounts):
            return None
        if self.side is None:
            moving()
            return self.clock.stamp()
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.side):
            moving()
            return self.clock.stamp()

    def _together(self, copied: Stamp | None) -> list[Stamp]:
        """Stamps when compute is done and when copies are; what comes next waits for both."""
        computed = self.clock.stamp()
        if copied is None:
            return [computed, computed]
        if self.side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.side)
        return [computed, copied]

    def _fetch(self, num: int, path: str, bank: int, *, alone: bool = False) -> None:
        """Copy the weights of this many experts into slots of a bank."""
        if num:
            source = self.host_source if path == "host" else self.source
            self._copy(self.banks[bank][:num], source[:num], alone=alone)

    def _copy(self, into: Tensor, source: Tensor, *, alone: bool = False) -> None:
        """Copy with the driver, unless its kernel would compete with compute."""
        if into.is_cuda and source.is_cuda and not alone and has_triton():
            from benchmarks.gpu.copying import copy_beside  # noqa: PLC0415 - needs Triton

            copy_beside(into, source)
        else:
            into.copy_(source, non_blocking=True)

    def _backward_moves(self, move: Moves, path: str, bank: int) -> None:
        """Weights of the layer before, gradients that leave, and the sum of those that come home.

        On the device both ranks' memory is the same: gradients are added from where they lie, as `copies.ipc` does. The
        rank that holds them has its memory read by another one: it reads as much itself.
        """
        self._fetch(move.behind, path, bank)
        gradients = self.neighbour_copies
        if move.returned and path == "host":
            self.host_copies[: move.returned].copy_(gradients[: move.returned], non_blocking=True)
        elif move.returned and self.cuda and has_triton():
            from benchmarks.gpu.copying import read_beside  # noqa: PLC0415

            read_beside(gradients[: move.returned], self._read)
        first = 0
        for home, count in enumerate(move.added):
            into = self.neighbour_homes[home % len(self.neighbour_homes)]
            if path == "host":
                for number in range(first, first + count):
                    self._arrived[number].copy_(self.host_copies[number % len(self.host_copies)], non_blocking=True)
            rows = self._arrived if path == "host" else gradients
            add_in_order(into, list(rows[first : first + count]))
            first += count

    def _times(self, *stamps: Stamp) -> RankTimes:
        """Microseconds of both passes, each until compute and copies are done."""
        start, there, computed, copied, back, computed_back, copied_back = stamps
        us = self.clock.us
        forward_us, backward_us = us(there, computed), us(back, computed_back)
        late = [0.0, 0.0]
        if copied is not computed:
            late[0] = max(us(there, copied) - forward_us, 0.0)
        if copied_back is not computed_back:
            late[1] = max(us(back, copied_back) - backward_us, 0.0)
        return RankTimes(us(start, there), forward_us + late[0], backward_us + late[1], sum(late))
