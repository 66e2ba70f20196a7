"""One rank: train a case plain and balanced from the same weights, compare losses, then time steps in turn.

Symbols: S steps, M micro-batches, R ranks, T tokens of a rank's micro-batch, L MoE layers, K experts per token,
V spans.

A step's time is that of the slowest rank, from `begin`, which plans, to the end of the optimizer. Static and balanced
routing train the same plain model, because only its time counts then. Rank 0 writes every case's figures as it ends.
"""

from __future__ import annotations

import gc
import logging
import os
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from threading import Timer
from time import monotonic
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.megatron_gpu.cases import SHAPES, Case, Shape
from benchmarks.megatron_gpu.clock import Spans
from benchmarks.megatron_gpu.experts import GroupedExperts
from benchmarks.megatron_gpu.figures import BALANCED, OURS, STATIC, keep
from benchmarks.megatron_gpu.links import IpcTokens, route_through
from benchmarks.megatron_gpu.models import Place, Routing, Training, join
from equilibra.cost.rates import Rates
from equilibra.integrations.executor.balancer import stage_group
from equilibra.integrations.executor.warming import warm_up
from equilibra.integrations.megatron import MegatronSetting
from equilibra.integrations.planned import cluster_of

STEPS = 2
"""steps of routing, used in turn"""
PATIENCE_S = 75.0
"""until a case that stands still is given up: what waits for links is released, and a while later the process ends"""
EXTRA_S = 30.0
SMALL = ("tiny", "small")
"""shapes so small that by the prices nothing would be copied: there copies are free"""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of a run, sent to all ranks."""

    cases: tuple[Case, ...]
    device: str
    routing: str
    """folder of SHAPE.npz with skewed and balanced ids [S, M, R, T, L, K]"""
    results: str
    """file that rank 0 writes"""
    progress: str
    """file with the name of the case that runs"""
    made: dict[str, Any]
    """command, commit and machine"""
    setting: dict[str, Any]
    """fields of MegatronSetting for all cases"""
    deadline: float
    """in time.monotonic(); later cases are left out"""
    profile: str = ""
    """folder for a trace of one step of rank 0 of every contender of every timed case; empty: none"""


def run(request: Request) -> list[str]:
    """Run cases; returns those not started, because of the deadline or an earlier failure.

    After a failure ranks may have taken different numbers of collectives, so they end.
    """
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    place = _place(request.device)
    compiling = warm_up(1)  # numba compiles the planner, and Triton the kernels
    join(place.num_ranks, place.device)
    cases, links = request.cases, None
    if place.device.type == "cuda":
        _compile(place, cases)
        cases, links = _linked(place, cases)
    compiling.wait()
    place.meet()
    for number, case in enumerate(cases):
        if _rank_0_says(place, monotonic() > request.deadline):
            return [one.name for one in cases[number:]]
        if place.rank == 0:
            Path(request.progress).write_text(case.name)
        start = monotonic()
        end = Timer(PATIENCE_S + EXTRA_S, os._exit, [1])  # last resort, so that other cases can run
        end.daemon = True
        end.start()
        try:
            with _given_up_after(links, PATIENCE_S):
                result = _Bench(case, place, links, request).run()
        except Exception as error:  # noqa: BLE001 - the other cases may run
            result = {"error": f"{type(error).__name__}: {error}"[:2000]}
        failed = [text for text in _texts(place, result.get("error", "")) if text]
        end.cancel()
        result = {"error": failed[0]} if failed else result
        result |= {"case": asdict(case), "shape": asdict(SHAPES[case.shape]), "case_s": monotonic() - start}
        if place.rank == 0:
            keep(Path(request.results), case.name, {**request.made, **result})
            print(f"{case.name}: {monotonic() - start:.1f} s {result.get('error', '')}", flush=True)
        if failed:
            return [one.name for one in cases[number + 1 :]]
        gc.collect()
        if place.device.type == "cuda":
            torch.cuda.empty_cache()
    return []


def _place(device: str) -> Place:
    found = torch.device(device)
    if found.type == "cuda":
        found = torch.device("cuda", 0)
        torch.cuda.set_device(found)
    control = dist.new_group(backend="gloo")
    return Place(rank=dist.get_rank(), num_ranks=dist.get_world_size(), device=found, control=control)


def _texts(place: Place, text: str) -> list[str]:
    every: list[Any] = [None] * place.num_ranks
    dist.all_gather_object(every, text, group=place.control)
    return every


def _rank_0_says(place: Place, late: bool) -> bool:  # noqa: FBT001
    """The value from rank 0."""
    said = [late]
    dist.broadcast_object_list(said, src=0, group=place.control)
    return said[0]


def _compile(place: Place, cases: tuple[Case, ...]) -> None:
    """Compile the experts' Triton kernels while numba compiles the planner in the background."""
    for name, fused in sorted({(case.shape, case.fused) for case in cases if case.timed and case.experts == "grouped"}):
        shape = SHAPES[name]
        config = SimpleNamespace(
            hidden_size=shape.hidden, moe_ffn_hidden_size=shape.expert_ffn, params_dtype=torch.bfloat16,
            use_cpu_initialization=False, gradient_accumulation_fusion=fused,
        )  # fmt: skip
        experts = GroupedExperts(2, config, pg_collection=SimpleNamespace(ep=None, expt_dp=None, expt_tp=None))
        for weight in experts.parameters():
            torch.nn.init.normal_(weight, std=0.02)
            if fused:
                weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
        rows = torch.randn(600, shape.hidden, device=place.device, dtype=torch.bfloat16, requires_grad=True)
        probs = torch.rand(600, device=place.device, requires_grad=True)
        counts = torch.tensor([200, 400])
        with torch.no_grad():
            experts(rows, counts, probs)
        experts(rows, counts, probs)[0].sum().backward()
    place.meet()


# --- links ---


def _linked(place: Place, cases: tuple[Case, ...]) -> tuple[tuple[Case, ...], IpcTokens | None]:
    """Links through the GPU's memory, if cases need them; NCCL for all cases, fewer steps of it, if they fail."""
    if all(case.links != "ipc" for case in cases):
        return cases, None
    said, links = "", None
    try:
        links = _tested_links(place, cases)
    except Exception as error:  # noqa: BLE001 - NCCL is left
        said = f"{type(error).__name__}: {error}"
    failed = [text for text in _texts(place, said) if text]
    if not failed:
        return cases, links
    if place.rank == 0:
        print(f"no links through the GPU's memory, all cases use NCCL ({failed[0]})", flush=True)
    slow = [replace(case, links="nccl", check_steps=2, repeats=3) if case.links == "ipc" else case for case in cases]
    return tuple(slow), None


def _tested_links(place: Place, cases: tuple[Case, ...]) -> IpcTokens:
    """Links that have passed a test against NCCL."""
    shapes = [SHAPES[case.shape] for case in cases if case.links == "ipc"]
    from megatron.core import parallel_state  # noqa: PLC0415

    world, alone = parallel_state.get_expert_model_parallel_group(), parallel_state.get_expert_data_parallel_group()
    group = stage_group(world, alone, cluster_of(place.num_ranks, None), 120.0)
    most = max(shape.tokens * shape.top_k * shape.hidden * 4 // (1 if shape.hidden < 1024 else 2) for shape in shapes)
    links = IpcTokens(group, place.device, most)
    generator = np.random.default_rng(3)
    for _ in range(12):
        sizes_RR = generator.integers(0, 300, (place.num_ranks, place.num_ranks))
        sent, received = sizes_RR[place.rank].tolist(), sizes_RR[:, place.rank].tolist()
        rows = torch.randn(sum(sent), 64, device=place.device)
        wanted = rows.new_empty(sum(received), 64)
        dist.all_to_all_single(wanted, rows, received, sent)
        with _given_up_after(links, 30.0):
            found = links.exchange(rows, sent, received)
            place.wait()
        if not torch.equal(found, wanted):
            raise RuntimeError("rows through shared memory differ from NCCL's")
    return links


@contextmanager
def _given_up_after(links: IpcTokens | None, seconds: float) -> Iterator[None]:
    if links is None:
        yield
        return
    links.expect_within(seconds)
    try:
        yield
    finally:
        links.expect_within(None)
    if links.expired:
        raise TimeoutError(f"a rank was waited for in vain for {seconds:.0f} s: links through shared memory are lost")


# --- a case ---


class _Bench:
    """One case on one rank."""

    def __init__(self, case: Case, place: Place, links: IpcTokens | None, request: Request) -> None:
        self.case, self.place, self.shape, self.request = case, place, SHAPES[case.shape], request
        if case.links == "ipc" and (links is None or links.expired):
            raise RuntimeError("there are no links through shared memory")
        self.spans = {name: Spans(place.device) for name in ("experts", "exchange", "products")}
        route_through(links if case.links == "ipc" else None, self.spans["exchange"])
        GroupedExperts.spans = self.spans["products"]
        GroupedExperts.copies_learn = True
        self.ids = _routing(request, case, self.shape, place)
        known = {one.name for one in fields(MegatronSetting)}
        asked = {"spare_slots": 2, **request.setting, **case.options}
        if unknown := sorted(set(asked) - known):
            raise ValueError(f"MegatronSetting has no {', '.join(unknown)}")
        if case.shape in SMALL:
            asked["rates"] = Rates.free()
        self.setting = MegatronSetting(**asked)

    def run(self) -> dict[str, Any]:
        plain, losses = self._trained(balanced=False)
        ours, found = self._trained(balanced=True)
        result: dict[str, Any] = {
            "losses": {STATIC: losses, OURS: found},
            "static_imbalance": _mean(step.static_imbalance for step in ours.steps),
            "planned_imbalance": _mean(step.planned_imbalance for step in ours.steps),
            "resident_bytes": {STATIC: plain.resident_bytes, OURS: ours.resident_bytes},
            "setting": {key: str(value) for key, value in asdict(self.setting).items()},
            "copies_of_step": _mean(_copies_of(step) for step in ours.steps),
            "paths": sorted({str(path) for path in getattr(ours.copies, "_path", {}).values()}),
        }
        if self.case.control:
            GroupedExperts.copies_learn = False
            broken, result["losses"]["control"] = self._trained(balanced=True)
            GroupedExperts.copies_learn = True
            broken.close()
        if self.case.timed:
            result |= self._timed(plain, ours)
        result |= _ahead_of(ours)
        plain.close()
        ours.close()
        return result

    def _trained(self, *, balanced: bool) -> tuple[_Measured, list[float]]:
        """A model after the compared steps, and every step's loss, averaged over ranks."""
        before = self._allocated()
        training = _Measured(self.case, self.shape, self.place)
        if balanced:
            training.balance(self.setting)
        training.record(self.spans["experts"])
        losses = []
        for number in range(self.case.check_steps):
            following = self.ids[STATIC][(number + 1) % STEPS]
            took = training.step(number, self.ids[STATIC][number % STEPS], following)
            losses.append(float(self.place.gather([took.loss]).mean()))
            self._take()
            if not number:
                training.resident_bytes = self._allocated() - before
        return training, losses

    def _allocated(self) -> int:
        """Allocated bytes of the rank that has most."""
        mine = torch.cuda.memory_allocated(self.place.device) if self.place.device.type == "cuda" else 0
        return int(self.place.gather([float(mine)]).max())

    def _timed(self, plain: Training, ours: Training) -> dict[str, Any]:
        rng = np.random.default_rng(zlib.crc32(self.case.name.encode()))
        contenders = {STATIC: plain, OURS: ours, BALANCED: plain}
        steps: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
        peaks: dict[str, int] = {}
        for repeat in range(-1, self.case.repeats):
            for name in rng.permutation(list(contenders)).tolist():
                if repeat < 0:
                    peaks[name] = self._peak_of(contenders[name], name)
                else:
                    steps[name].append(self._one(contenders[name], name))
        if self.request.profile:
            for name, contender in contenders.items():
                self._profiled(contender, name)
        return {"steps": steps, "transient_bytes": peaks}

    def _profiled(self, training: Training, name: str) -> None:
        """Run one more step and write rank 0's trace to CASE-NAME.json.gz."""
        if self.place.rank:
            self._one(training, name)
            return
        with torch.profiler.profile() as profile:
            self._one(training, name)
        file = f"{self.case.name}-{name.rsplit(',', 1)[-1].split(maxsplit=1)[0]}.json.gz"
        profile.export_chrome_trace(str(Path(self.request.profile) / file))

    def _peak_of(self, training: Training, name: str) -> int:
        """Peak bytes of a step beyond those allocated before it, on the rank that needs most."""
        if self.place.device.type != "cuda":
            self._one(training, name)
            return 0
        torch.cuda.reset_peak_memory_stats(self.place.device)
        before = torch.cuda.memory_allocated(self.place.device)
        self._one(training, name)
        return int(self.place.gather([float(torch.cuda.max_memory_allocated(self.place.device) - before)]).max())

    def _one(self, training: Training, name: str) -> dict[str, float]:
        ids = self.ids[BALANCED if name == BALANCED else STATIC]
        number = len(training.steps)
        took = training.step(number, ids[number % STEPS], ids[(number + 1) % STEPS])
        seconds, plan_s = self.place.gather([took.seconds, took.plan_s]).max(axis=0).tolist()
        return {"seconds": seconds, "plan_s": plan_s, **self._take()}

    def _take(self) -> dict[str, float]:
        """Milliseconds of the last step's spans."""
        mine = {name: spans.take_ms() for name, spans in self.spans.items()}
        experts_RV, exchange_RV = self.place.gather(mine["experts"]), self.place.gather(mine["exchange"])
        products_R = self.place.gather([sum(mine["products"])])[:, 0]
        return {
            "experts_slowest_ms": float(experts_RV.max(axis=0).sum()),
            "experts_mean_ms": float(experts_RV.mean(axis=0).sum()),
            "products_slowest_ms": float(products_R.max()),
            "products_mean_ms": float(products_R.mean()),
            "exchange_ms": float(exchange_RV.min(axis=0).sum()),
            "exchange_with_waiting_ms": float(exchange_RV.mean(axis=0).sum()),
        }


class _Measured(Training):
    """A training and the bytes it holds."""

    resident_bytes = 0
    """resident memory after the first step"""


def _routing(request: Request, case: Case, shape: Shape, place: Place) -> dict[str, list[Routing]]:
    """The ids of every step on this rank."""
    saved = np.load(Path(request.routing) / f"{case.shape}.npz")
    layers = range(1 if case.kind == "layer" else shape.num_layers)

    def of(ids: Any) -> list[Routing]:  # noqa: ANN401
        return [
            [[_on(ids[s, m, place.rank, :, layer], place) for layer in layers] for m in range(shape.micro_batches)]
            for s in range(STEPS)
        ]

    return {STATIC: of(saved["skewed"]), BALANCED: of(saved["balanced"])}


def _on(ids: Any, place: Place) -> Tensor:  # noqa: ANN401
    return torch.from_numpy(np.ascontiguousarray(ids)).long().to(place.device)


def _copies_of(step: Any) -> float:  # noqa: ANN401
    return float(sum(stage.num_copies for stage in step.plan.stages.values()) / len(step.plan.stages))


def _ahead_of(training: Training) -> dict[str, float]:
    """Share of visits whose copies were in transit before their layer began, if the balancer counts them."""
    counted = [(getattr(one, "num_ahead", 0), getattr(one, "num_late", 0)) for one in training.balancer.layers]
    ahead, late = (sum(part) for part in zip(*counted, strict=True))
    return {"ahead": ahead / (ahead + late)} if ahead + late else {}


def _mean(values: Any) -> float:  # noqa: ANN401
    return float(np.mean(list(values)))
