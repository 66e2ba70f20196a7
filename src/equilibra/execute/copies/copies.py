"""Copies on this rank: prefetched ahead of the layers that need them, and their gradients returned.

Every rank runs the same program, so collective calls come in the same order everywhere. Prefetching follows the order
of visits: next layers in the forward pass, previous ones in the backward pass, then the next micro-batch; frameworks
with an order of their own say which visit comes next. A wrong guess costs a fetch, never a result. The update never
prefetches across the end of a mini-batch, where weights change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from equilibra.core.checks import check_number, check_whole
from equilibra.core.errors import InputError
from equilibra.core.plan import GroupPlan
from equilibra.core.visit import CopyList, Stage, VisitKey
from equilibra.events.schema import Direction, Kind, Resource
from equilibra.execute.copies.device import DeviceEngine, streams_are_serial
from equilibra.execute.copies.device_paths import BothPath, IpcPath, PinnedPath, ipc_works
from equilibra.execute.copies.standing import StandingStore
from equilibra.execute.copies.transfer import CollectiveEngine, HostEngine, Path, SpareSlots, TransferEngine, copied_of
from equilibra.execute.experts.weights import HomeExperts
from equilibra.execute.group import ExpertGroup, Pending
from equilibra.execute.record import Moment, Recorder

LINKS = {path: Resource.HOST_LINK if path is Path.HOST else Resource.COPY_ENGINE for path in Path}


@dataclass(frozen=True, kw_only=True)
class CopySetting:
    """How copies are kept and moved."""

    spare_slots: int = 2
    """flash copies a rank can hold per layer"""
    prefetch_depth: int = 1
    """layers to prefetch; memory is spare_slots x (prefetch_depth + 1) experts per rank"""
    path: dict[Stage, Path] = field(default_factory=lambda: dict.fromkeys(Stage, Path.COLLECTIVE))
    """path of flash copies in each stage"""
    host_share: float = 0.1
    """fraction of a copy that path `both` sends over the host link: its rate over the sum of both rates"""

    def __post_init__(self) -> None:
        for name in ("spare_slots", "prefetch_depth"):
            check_whole(name, getattr(self, name), low=0, high=4096)
        check_number("host_share", self.host_share, above=0, high=1, below=True)
        if set(self.path) != set(Stage) or not all(isinstance(path, Path) for path in self.path.values()):
            raise InputError(
                f"path needs one of {', '.join(Path)} for each of the stages {', '.join(Stage)}, not {self.path}"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Return:
    moving: Pending
    key: VisitKey
    copies: CopyList
    started: Moment


class Copies:
    """The copies of the armed plan on this rank. Buffers and engines are made once and serve all plans."""

    def __init__(
        self, group: ExpertGroup, weights: Sequence[HomeExperts], setting: CopySetting, recorder: Recorder,
        order: Callable[[VisitKey, Direction], Iterable[VisitKey]] | None = None,
    ) -> None:  # fmt: skip
        """order: the visits expected after one, up to `prefetch_depth`; None: layer after layer, forward and back."""
        self.group, self.weights, self.setting, self.recorder = group, weights, setting, recorder
        self._order = order or self._layer_after_layer
        like = weights[0]
        self._row = torch.zeros(like.layout.size, dtype=like.dtype, device=like.device)
        self._slots = SpareSlots(
            num_slots=setting.spare_slots, depth=setting.prefetch_depth, row=self._row, now=recorder.now
        )
        self.standing = StandingStore(group, weights, None)
        self._engines: dict[Path, TransferEngine] = {}
        self.lists: MutableMapping[VisitKey, CopyList] = {}
        """of visits that have come up"""
        self.armed: GroupPlan | None = None
        self._returning: _Return | None = None
        self._summing: set[int] = set()
        """layers whose gradients may still be changing"""
        self._path: dict[Stage, Path] = {}
        """of the armed plan"""
        self._ipc_works: bool | None = None

    def fits(self) -> bool:
        """Whether the buffers still match the weights' dtype and device."""
        like = self.weights[0]
        return self._row.dtype == like.dtype and self._row.device == like.device

    def arm(self, armed: GroupPlan | None) -> None:
        """Collective: prepare for a plan. None: visits come without one, and their maker puts copies into `lists`."""
        self.forget()
        self.armed = armed
        self.lists = WeakValueDictionary() if armed is None else {}
        plan = None if armed is None else armed.plan
        self.standing = StandingStore(self.group, self.weights, plan, self.standing, self.recorder.now)
        self._path = {stage: self._chosen(path, stage) for stage, path in self.setting.path.items()}
        for path in dict.fromkeys(self._path.values()):  # in the same order on every rank
            if path not in self._engines:
                self._engines[path] = self._engine(path)
        for engine in self._engines.values():
            engine.source = self.standing

    def _chosen(self, path: Path, stage: Stage) -> Path:
        """Resolve `auto` for this plan; equal on every rank."""
        if self.armed is None:
            return Path.COLLECTIVE  # other paths publish what a plan copies
        if path is not Path.AUTO:
            return path
        if self._row.device.type != "cuda" or streams_are_serial():
            return Path.COLLECTIVE
        if self._ipc_works is None:
            self._ipc_works = ipc_works(self.group, self._row)
        if not self._ipc_works:  # the host link is too slow for gradients
            return Path.HOST if stage is Stage.LOGPROB else Path.COLLECTIVE
        return Path.BOTH if stage in self.armed.late else Path.IPC

    def _engine(self, path: Path) -> TransferEngine:
        row, dtype, slots = self._row, self.weights[0].gradient_dtype, self.setting.spare_slots
        if path is Path.COLLECTIVE:
            return CollectiveEngine(self.group, num_slots=slots, row=row, gradient_dtype=dtype)
        if row.device.type == "cuda":
            banks_2SP = torch.zeros(2, slots, row.numel(), dtype=dtype, device=row.device)
            if path is Path.HOST:
                return DeviceEngine(self.group, banks_2SP, row, PinnedPath(self.group, banks_2SP, row))
            if path is Path.IPC:
                return DeviceEngine(self.group, banks_2SP, row, IpcPath(self.group, banks_2SP, row))
            both = BothPath(self.group, banks_2SP, row, self.setting.host_share)
            return DeviceEngine(self.group, banks_2SP, row, both)
        if path is Path.HOST:
            return HostEngine(self.group, num_slots=slots, row=row, gradient_dtype=dtype)
        raise InputError(f"path {path} needs GPUs, and experts are on {row.device}: use collective or host")

    def finish_reads(self) -> None:
        """Collective, before weights change: wait until no rank reads them."""
        for engine in self._engines.values():
            engine.finish_reads()

    def forget(self) -> None:
        """Drop all copies, because the weights or the plan change."""
        self.finish_returns()
        self._slots.forget()
        self.standing.forget()

    def offer(self, version: int) -> None:
        """Make this version of the weights available for copying, and start fetching standing copies."""
        self.version = version
        one_sided = bool(set(self._path.values()) - {Path.COLLECTIVE})
        ahead = len(self.weights) if one_sided else self.setting.prefetch_depth + 1
        for layer in range(min(ahead, len(self.weights))):  # what is published may be made of standing copies
            self.standing.start(layer)
        if self.armed is None:
            return
        for layer, weights in enumerate(self.weights) if one_sided else ():
            weights.check_version(layer)  # other ranks read them from now on
        for path in dict.fromkeys(self._path.values()):
            stages = [stage for stage in Stage if self._path[stage] is path]
            self._engines[path].publish(version, copied_of(self.armed.plan, stages, self.group))

    # --- weights ---

    def take(self, key: VisitKey, direction: Direction) -> list[Any]:
        """A visit's standing and flash copies once they are here; those of the next visits are prefetched."""
        rows_nP = self.take_rows(key, direction)
        return self.standing.parts(key.layer)[0] + self.weights[key.layer].layout.experts(rows_nP)

    def take_rows(self, key: VisitKey, direction: Direction) -> Tensor:
        """[n, P] a visit's flash copies; its standing copies are here too."""
        start = self.recorder.now()
        arrived = self.standing.wait(key.layer)
        if arrived is not None:
            once, fetched = VisitKey.once(key.layer, key.stage), (self.standing.asked[key.layer], self.recorder.now())
            self.recorder.moved(Kind.STANDING_COPY, Resource.NIC, once, fetched, arrived, num_bytes=self._row.nbytes)
        copies, path = self.list_of(key), self._path[key.stage]
        rows_nP, span = self._slots.take(key, copies, self._engines[path], self.version)
        if span is not None:
            self.recorder.moved(Kind.FLASH_COPY, LINKS[path], key, span, copies, num_bytes=self._row.nbytes)
        if len(rows_nP) or self.standing.num_held(key.layer):
            self.recorder.add(Kind.WAIT, Resource.COMPUTE, key, direction, start, self.recorder.now())
        for there in self._order(key, direction):
            self.start(there)
        return rows_nP

    def start(self, key: VisitKey) -> None:
        """Start fetching a visit's copies, unless they are here or on their way."""
        self.standing.start(key.layer)
        self._slots.start(key, self.list_of(key), self._engines[self._path[key.stage]], self.version)

    def has(self, key: VisitKey) -> bool:
        return self._slots.has(key)

    def list_of(self, key: VisitKey) -> CopyList:
        found = self.lists.get(key)
        if found is None:
            assert self.armed is not None
            found = self.armed.plan.visit(*key).copy_list(self.group.rank, self.group.ranks_of_node)
            self.lists[key] = found
        return found

    def _layer_after_layer(self, key: VisitKey, direction: Direction) -> Iterator[VisitKey]:
        assert self.armed is not None
        layer, number, last = key.layer, key.micro_batch, len(self.weights) - 1
        backward, turns = direction is not Direction.FORWARD, key.stage is Stage.UPDATE
        for _ in range(self.setting.prefetch_depth):
            if not backward and layer == last and turns:
                backward = True  # the same layer comes again, backward
                continue
            layer += -1 if backward else 1
            if not 0 <= layer <= last:
                following = self.armed.after(key.stage, number)
                if following is None:
                    return
                number, layer, backward = following, 0, False
            yield VisitKey(key.stage, number, layer)

    # --- gradients ---

    def settle(self, layer: int) -> None:
        """Wait for what is being added to a layer's gradients, before they are written."""
        if layer in self._summing:  # in other layers sums may still be under way
            self._finish_sums()

    def flash_gradients(self, key: VisitKey) -> list[Any]:
        """Buffers for the gradients of a visit's flash copies."""
        self._end_return()
        self.settle(key.layer)
        engine = self._engines[self._path[key.stage]]
        return self.weights[key.layer].layout.experts(engine.gradient_slots(self.list_of(key)))

    def send_gradients(self, key: VisitKey) -> None:
        """Start returning the gradients of a visit's flash copies to their homes."""
        copies = self.list_of(key)
        moving = self._engines[self._path[key.stage]].give_back(copies)
        self._returning = _Return(moving=moving, key=key, copies=copies, started=self.recorder.now())

    def finish_returns(self) -> None:
        """Wait until gradients of flash copies in flight are added."""
        self._end_return()
        self._finish_sums()

    def _finish_sums(self) -> None:
        for engine in self._engines.values():
            engine.finish_sums()
        self._summing.clear()

    def _end_return(self) -> None:
        if self._returning is not None:
            done, self._returning = self._returning, None
            done.moving.wait()
            if done.copies.num_in_node:
                self._summing.add(done.key.layer)
            span = getattr(done.moving, "span", (done.started, self.recorder.now()))
            link, num_bytes = Resource.COPY_ENGINE, self._gradient_bytes
            self.recorder.moved(Kind.FLASH_GRADIENT, link, done.key, span, done.copies, num_bytes=num_bytes)

    def return_standing(self, layers: Collection[int] | None = None) -> None:
        """Collective: add gradients of standing copies to their homes'. layers: None for all."""
        start = self.recorder.now()
        layers = self.standing.layers if layers is None else layers
        self.standing.give_back(layers)
        span, num_bytes = (start, self.recorder.now()), self._gradient_bytes
        for held in map(self.standing.list_of, layers):
            once = VisitKey.once(held.layer)
            self.recorder.moved(Kind.STANDING_GRADIENT, Resource.NIC, once, span, held, num_bytes=num_bytes)

    @property
    def _gradient_bytes(self) -> int:
        return self._row.numel() * self.weights[0].gradient_dtype.itemsize

    def memory_bytes(self) -> dict[str, int]:
        return {
            "spare_slots": self._slots.num_bytes,
            "standing_copies": self.standing.num_bytes,
            "transfers": sum(engine.num_bytes for engine in self._engines.values()),
        }

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines = {}
