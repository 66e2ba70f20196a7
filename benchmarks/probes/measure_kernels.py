"""Grouped kernels on a GPU against torch's grouped_mm: correctness and speed, for several tiles.

    python -m benchmarks.probes.measure_kernels --output FILE [--sweep] [--rows 16384 65536]

Bare: the two products of the forward pass and the four of the backward pass by `torch._grouped_mm`, without
activations, permutation or sums of gradients.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from benchmarks.suite import environment
from equilibra.core.placement import Cluster, contiguous
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.execute.experts import Activation, MoESpec, expert_math
from equilibra.execute.experts.weights import ExpertWeights
from equilibra.execute.group import join_expert_group
from equilibra.execute.kernels import ExpertParts, RowWeights, grouped, rows
from equilibra.execute.kernels.grouped import Groups, Tile
from equilibra.execute.moe import BalancedMoE, Combine, Dispatch, Experts, LayerPass
from equilibra.execute.runtime import Runtime
from equilibra.execute.steps.balancer import Balancer, BalancerSetting
from equilibra.trace.routing import RoutingTrace

SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 16),
    "qwen3-235b-a22b": (4096, 1536, 16),
    "deepseek-v3": (7168, 2048, 8),
    "gpt-oss-20b": (2880, 2880, 4),
}
DEVICE = torch.device("cuda")
SWEEP = {
    "FIRST": [(128, 64, 8, 4), (128, 64, 8, 3)],
    "PRODUCT": [(256, 64, 8, 4), (256, 64, 8, 3), (128, 64, 8, 4)],
    "WEIGHT": [(256, 32, 8, 6), (256, 64, 8, 3)],
}  # fmt: skip


Works = dict[str, Callable[[], Any]]


def about(program: str) -> dict[str, Any]:
    """Machine and versions of a result."""
    known = environment()
    command = f"python -m benchmarks.probes.{program} --output FILE"
    return {"command": command, "date": known["date"], "commit": known["commit"]}


def in_turn(works: Works, repeats: int = 12) -> dict[str, float]:
    """Median microseconds of every piece of work, timed in turn because the clock drifts by several percent."""
    for work in works.values():
        for _ in range(3):
            work()
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda._sleep(300_000)  # type: ignore[no-untyped-call]  # the host queues meanwhile
            first.record()
            work()
            last.record()
            spans[name].append((first, last))
        torch.cuda.synchronize()
    return {name: median(a.elapsed_time(b) * 1e3 for a, b in spans[name]) for name in works}


def us(work: Callable[[], Any]) -> float:
    """Median microseconds of one piece of work."""
    return in_turn({"": work})[""]


def chosen(shape: str, rows: int) -> NDArray[np.int64]:
    """[T, K] experts of every token, some more often than others."""
    count = SHAPES[shape][2]
    top_k = 8 if count >= 16 else 4
    random = np.random.default_rng(0)
    liked = np.log(random.random(count) + 0.5) + random.gumbel(size=(rows // top_k, count))
    return np.argsort(-liked, axis=1)[:, :top_k]


class Layer:
    """One rank's experts and rows."""

    def __init__(self, shape: str, rows: int, *, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> None:
        width, inner, count = SHAPES[shape]
        torch.manual_seed(0)
        self.width, self.inner, self.count, self.rows = width, inner, count, rows
        sizes = np.bincount(chosen(shape, rows).ravel(), minlength=count).tolist()
        self.sizes = sizes
        new: dict[str, Any] = {"device": DEVICE, "dtype": dtype}
        self.gate_up = torch.randn(count, 2 * inner, width, **new) * 0.02
        self.down = torch.randn(count, width, inner, **new) * 0.02
        self.biases = (torch.randn(count, 2 * inner, **new), torch.randn(count, width, **new)) if bias else None
        self.gradient = (
            torch.zeros_like(self.gate_up, dtype=torch.float32),
            torch.zeros_like(self.down, dtype=torch.float32),
        )
        self.x, self.dy = torch.randn(rows, width, **new), torch.randn(rows, width, **new)
        self.index = torch.randperm(rows, device=DEVICE).to(torch.int32)
        self.groups = Groups.of(tuple(sizes), DEVICE)
        self.offs = torch.tensor(sizes, device=DEVICE).cumsum(0).to(torch.int32)
        self.instances = [
            ExpertParts(self.gate_up[i], self.down[i], *((b[i] for b in self.biases) if self.biases else ()))
            for i in range(count)
        ]
        self.gradients = [
            ExpertParts(self.gradient[0][i], self.gradient[1][i],
                        *((torch.zeros_like(b[i], dtype=torch.float32) for b in self.biases) if self.biases else ()))
            for i in range(count)
        ]  # fmt: skip
        self.dx = torch.empty_like(self.x)
        self.weighted = RowWeights(torch.rand(rows, device=DEVICE), torch.empty(rows, device=DEVICE))


def bare(layer: Layer) -> Works:
    """The products alone, with torch."""
    mm, offs = torch._grouped_mm, layer.offs
    h = torch.randn(layer.rows, 2 * layer.inner, device=DEVICE, dtype=layer.x.dtype)
    a = torch.randn(layer.rows, layer.inner, device=DEVICE, dtype=layer.x.dtype)
    w1, w2 = layer.gate_up.transpose(1, 2), layer.down.transpose(1, 2)
    work: Works = {
        "first": lambda: mm(layer.x, w1, offs),
        "second": lambda: mm(a, w2, offs),
        "inner": lambda: mm(layer.dy, layer.down, offs),
        "outer": lambda: mm(h, layer.gate_up, offs),
        "weight_down": lambda: mm(layer.dy.t(), a, offs),
        "weight_gate_up": lambda: mm(h.t(), layer.x, offs),
    }

    return work


def _all(works: list[Callable[[], Any]]) -> None:
    for work in works:
        work()


def ours(layer: Layer) -> Works:
    """The experts alone, rows in order: products and activations, gradients summed in float32."""
    kind, groups, instances = Activation.SWIGLU, layer.groups, layer.instances
    _, h = grouped.forward(kind, layer.x, groups, instances)
    saved = (layer.x, h, layer.dy)
    return {
        "forward": lambda: grouped.forward(kind, layer.x, groups, instances),
        "backward": lambda: grouped.backward(
            kind, saved, groups, instances, layer.gradients, layer.dx, weighted=layer.weighted
        ),
    }


def whole_layer(shape: str, rows: int) -> Works:
    """BalancedMoE of one rank, forward and backward, from tokens to tokens without the router; and from a graph."""
    width, inner, count = SHAPES[shape]
    ids = chosen(shape, rows)
    tokens, top_k = ids.shape
    cluster = Cluster(num_nodes=1, ranks_per_node=1)
    runtime = Runtime(join_expert_group(cluster), contiguous(cluster, num_layers=1, num_experts=count))
    spec = MoESpec(hidden=width, expert_ffn=inner, num_experts=count, top_k=top_k)
    moe = BalancedMoE(spec, runtime, device=DEVICE, dtype=torch.bfloat16)
    runtime.recorder.on = False
    balancer = Balancer(runtime, BalancerSetting(tokens_per_rank=tokens, planner="static", rates=Rates.free()))
    routing = RoutingTrace(
        ids=ids[:, None].astype(np.uint8), offsets=np.array([0, tokens], np.int64), num_experts=count
    )
    (micro_batch,) = balancer.begin(routing).micro_batches(Stage.UPDATE)
    x = torch.randn(tokens, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(x)
    weights = torch.rand(tokens, top_k, device=DEVICE, requires_grad=True)
    for part in moe.experts.parts():
        part.requires_grad_()

    def both() -> None:
        with micro_batch:
            visit = LayerPass(runtime, runtime.tables(0, micro_batch.experts(0, DEVICE)))
            rows_ND = Dispatch.apply(x, weights, visit)  # type: ignore[no-untyped-call]
            results_ND = Experts.apply(rows_ND, visit, *moe.experts.parts())  # type: ignore[no-untyped-call]
            out = Combine.apply(results_ND, weights.detach(), visit)  # type: ignore[no-untyped-call]
            out.backward(dout)

    def first() -> None:
        """The first micro-batch: gradients are written into the same memory, not added."""
        with patch.object(ExpertWeights, "has_gradients", new=False):
            both()

    return {"layer": both, "graph": graphed(both), "first": graphed(first)}


def graphed(work: Callable[[], Any]) -> Callable[[], Any]:
    """The work as a CUDA graph, which measures the device alone."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _each(change: Callable[[torch.Tensor], torch.Tensor], parts: ExpertParts) -> ExpertParts:
    gate_up, down, *biases = (None if part is None else change(part) for part in parts)
    assert gate_up is not None
    assert down is not None
    return ExpertParts(gate_up, down, *biases)


def check() -> list[dict[str, Any]]:
    """Compare with float64, to bf16 rounding."""
    found = []
    SHAPES["odd"], SHAPES["large"] = (264, 200, 5), (2056, 2000, 5)
    small = itertools.product(("odd",), (False, True), Activation)
    for shape, bias, kind in (*small, ("large", False, Activation.SWIGLU)):
        layer = Layer(shape, 700 if shape == "odd" else 2500, bias=bias)
        layer.sizes[1], layer.sizes[2] = 0, layer.sizes[1] + layer.sizes[2]
        layer.groups = Groups.of(tuple(layer.sizes), DEVICE)
        wide = [_each(torch.Tensor.double, parts) for parts in layer.instances]
        y64, h64 = expert_math.forward(kind, layer.x.double(), layer.sizes, wide)
        g64 = [_each(torch.zeros_like, parts) for parts in wide]
        dx64 = torch.empty_like(y64)
        weighed64 = RowWeights(layer.weighted.values_N.double(), torch.empty_like(dx64[:, 0]))
        saved = (layer.x.double(), h64, layer.dy.double())
        expert_math.backward(kind, saved, layer.sizes, wide, g64, dx64, weighted=weighed64)
        y, h = expert_math.forward(kind, layer.x, layer.sizes, layer.instances)
        saved = (layer.x, h, layer.dy)
        expert_math.backward(
            kind, saved, layer.sizes, layer.instances, layer.gradients, layer.dx, weighted=layer.weighted, num_last=2
        )
        pairs = [
            (a, b)
            for x, z in zip(layer.gradients, g64, strict=True)
            for a, b in zip(x, z, strict=True)
            if a is not None and b is not None
        ]
        groups: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {
            "y": [(y, y64)], "dx": [(layer.dx, dx64)], "weights": pairs,
            "weights of rows": [(layer.weighted.gradients_N, weighed64.gradients_N)],
        }  # fmt: skip
        errors = {
            name: max(float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in group)
            for name, group in groups.items()
        }
        found.append({"shape": shape, "bias": bias, "kind": str(kind), **errors})
        assert max(errors.values()) < 0.03, found[-1]
    return found


def kernels_of(layer: Layer) -> dict[str, Any]:
    """Every kernel alone, by the name of its tile."""
    kind, groups = Activation.SWIGLU, layer.groups
    h = torch.randn(layer.rows, 2 * layer.inner, device=DEVICE, dtype=layer.x.dtype)
    a, dh = h[:, : layer.inner].contiguous(), torch.empty_like(h)

    def launches() -> tuple[grouped.Shares, ...]:
        return grouped.Shares.of(grouped._share_task(groups, layer.dy, layer.inner, learned=(True, True)), DEVICE)

    return {
        "FIRST": lambda: grouped.first_product(kind, groups, layer.x, layer.instances, h, a),
        "PRODUCT_down": lambda: grouped.product(groups, a, layer.instances, "down", layer.dx, transposed=True),
        "PRODUCT_inner": lambda: grouped.product(groups, layer.dy, layer.instances, "down", a, transposed=False),
        "activation": lambda: grouped.activation_gradient(kind, h, a, dh, layer.weighted),
        "WEIGHT_and_rows": lambda: grouped.weights_and_rows(
            launches(), groups, (layer.dy, a, h, layer.x), layer.instances, layer.gradients, slice(0, layer.count),
            layer.dx,
        ),
    }  # fmt: skip


def sweep_one(job: tuple[str, str, tuple[int, ...], int], *, timed: bool = True) -> dict[str, Any]:
    """Time the kernels of one tile, or report that it does not fit."""
    shape, name, (bn, bk, warps, stages), rows = job
    before = getattr(grouped, name)
    setattr(grouped, name, Tile(bn=bn, bk=bk, warps=warps, stages=stages))
    result: dict[str, Any] = {"shape": shape, "rows": rows, "tile": [bn, bk, warps, stages]}
    for kernel, run in kernels_of(Layer(shape, rows)).items():
        if kernel.startswith(name):
            try:
                run()
                result[kernel] = us(run) if timed else 0.0
            except Exception as error:  # noqa: BLE001 - a tile that does not fit is a result
                result[kernel] = str(error)[:80]
    setattr(grouped, name, before)
    return result


def _warm(job: tuple[str, str, tuple[int, ...], int]) -> None:
    sweep_one((job[0], job[1], job[2], 256), timed=False)


def passes(layer: Layer) -> Works:
    """The passes over memory that the kernels fuse."""
    low = (torch.zeros_like(layer.gate_up), torch.zeros_like(layer.down))
    tokens, of_pair = layer.x[: layer.rows // 8].clone(), layer.index.view(-1, 8)
    of_row, weights = (layer.index.argsort() // 8).to(torch.int32), torch.rand_like(of_pair, dtype=torch.float32)
    return {
        "permute": lambda: layer.x.index_select(0, layer.index),
        "gather": lambda: tokens.index_select(0, of_row),
        "spread": lambda: rows.spread(tokens, of_pair, layer.dx),
        "spread_with_weights": lambda: rows.spread(tokens, of_pair, layer.dx, weights, layer.weighted.values_N),
        "weighted_sum": lambda: rows.weighted_sum(layer.x, of_pair, weights),
        "plain_sum_with_gradients": lambda: rows.plain_sum(layer.x, of_pair, layer.weighted.gradients_N, weights),
        "add_float32": lambda: [sums.add_(part) for sums, part in zip(layer.gradient, low, strict=True)],
    }


def _rounded(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return round(value, 3 if value < 10 else None) if isinstance(value, float) else value


def table(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# Kernels of an expert layer on one GPU (measured)",
        "",
        (
            f"`{result['command']}`, date {result['date']}, commit {result['commit']}, {result['device']}, torch "
            f"{result['torch']}, triton {result['triton']}; microseconds, medians of 12; everything in turn."
        ),
        "",
        (
            "| shape | rows | bare | float32 sums | our experts, forward | backward | layer, both | from a CUDA graph "
            "| first micro-batch | over bare | first over bare | over bare with sums |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for e in result["layers"]:
        cells = [
            e["shape"], e["rows"], e["bare"], e["pass add_float32"], e["ours forward"], e["ours backward"],
            e["layer"], e["graph"], e["first"],
        ]  # fmt: skip
        shown = [f"{cell:.0f}" if isinstance(cell, float) else str(cell) for cell in cells]
        ratios = [f"{e[name]:.2f}" for name in ("over_bare", "first_over_bare", "over_bare_with_sums")]
        lines.append("| " + " | ".join([*shown, *ratios]) + " |")
    lines += [
        "",
        (
            "Bare: the two products of the forward and the four of the backward pass by torch's grouped_mm on the "
            "same rows, results in bf16. float32 sums: adding those gradients to float32 ones, which every training "
            "does. Our experts: products, activation, gradients summed in float32. Layer: BalancedMoE of one rank "
            "from tokens to tokens (permutation, experts, weighted sums), without the router; if it takes longer than "
            "from a CUDA graph, the host queues too slowly. First micro-batch: of a step, from a graph; its gradients "
            "are written, as those of the bare products, while others are added. Ratios are of graphs; the "
            "requirement is 1.15."
        ),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Check, measure every shape, and sweep tiles if asked to; write after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--shapes", nargs="*", default=["qwen3-30b-a3b", "qwen3-235b-a22b"])
    parser.add_argument("--rows", nargs="*", type=int, default=[16384, 65536])
    parsed = parser.parse_args()
    result: dict[str, Any] = {
        **about("measure_kernels"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    result["check"] = check()
    print("checked", max(c["y"] for c in result["check"]), flush=True)
    result["layers"] = []
    for shape, num_rows in itertools.product(parsed.shapes, parsed.rows):
        layer = Layer(shape, num_rows)
        works: Works = {
            f"{kind} {name}": work
            for kind, group in (
                ("bare", bare(layer)),
                ("ours", ours(layer) | kernels_of(layer)),
                ("pass", passes(layer)),
            )
            for name, work in group.items()
        } | whole_layer(shape, num_rows)
        works["bare"] = partial(_all, list(bare(layer).values()))
        entry: dict[str, Any] = {"shape": shape, "rows": num_rows, **in_turn(works)}
        del layer, works
        entry["over_bare"] = entry["graph"] / entry["bare"]
        entry["first_over_bare"] = entry["first"] / entry["bare"]
        entry["over_bare_with_sums"] = entry["graph"] / (entry["bare"] + entry["pass add_float32"])
        result["layers"].append(entry)
        print(json.dumps({k: _rounded(v) for k, v in entry.items()}), flush=True)
        parsed.output.write_text(json.dumps(result))
        parsed.output.with_suffix(".md").write_text(table(result))
    if parsed.sweep:
        jobs = [
            (shape, name, tile, num_rows)
            for shape in parsed.shapes for name, tiles in SWEEP.items() for tile in tiles for num_rows in parsed.rows
        ]  # fmt: skip
        with multiprocessing.get_context("spawn").Pool(14) as pool:
            pool.map(_warm, [job for job in jobs if job[3] == parsed.rows[0]], chunksize=1)
        result["sweep"] = []
        for job in jobs:
            result["sweep"].append(sweep_one(job))
            print({k: (round(v) if isinstance(v, float) else v) for k, v in result["sweep"][-1].items()}, flush=True)
            parsed.output.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
