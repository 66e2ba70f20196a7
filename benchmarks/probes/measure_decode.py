"""Time one layer of decoding on a GPU: attention over a cache, experts with few rows, dense products; fit their laws.

    python -m benchmarks.probes.measure_decode --output FILE [--limit-s 90]
    python -m benchmarks.probes.measure_decode --fit FILE [--output LAW.json]
    python -m benchmarks.probes.measure_decode --tiny --output FILE       # on a CPU: checks that it runs, not how fast

An attention layer is everything from one token per sequence to the router's choice: norm, query, key and value
products, rotation, writing the cache, scores, output product, norm, router, top-k. Scores use torch alone, in three
ways: flash attention with a group's queries as a sequence, torch's own grouped-query path, plain products; the layer
takes the fastest. An expert layer is everything from tokens to their weighted sums: gather, two grouped products with
SwiGLU between, weighted sum; with `torch._grouped_mm` and with our kernels, of which the faster counts. All run from a
CUDA graph, so a slow host does not count. Cases come in a shuffled order; figures are medians with quartiles.

`--fit` fits the constants to one half of the cases and reports the law's error on the other half.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.probes.decode_fit import fit_decode
from benchmarks.suite import environment
from equilibra.core.model import MoEModel, model_named
from equilibra.cost.decode import decode_law
from equilibra.cost.presets import prices_named

Case = dict[str, Any]
Work = Callable[[], object]

MODELS = ("qwen3-30b-a3b", "gpt-oss-20b")
BATCHES, CONTEXTS = (64, 128, 256, 512, 1024), (128, 1024, 2048, 4096, 8192)
TOKENS, SHARES = (64, 128, 256, 512, 1024, 2048, 4096), (1, 2, 4, 8)
"""tokens of all attention nodes together; an expert node has one of so many parts of the experts"""
TINY_BATCHES, TINY_CONTEXTS, TINY_TOKENS, TINY_SHARES = (2, 4, 8), (8, 32), (4, 16, 64), (1, 2)
REPEATS = 11


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Device, dtype and number of repeats."""

    device: torch.device
    dtype: torch.dtype
    repeats: int

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype) * 0.02

    def clock(self, work: Work, *, graph: bool = True) -> dict[str, float]:
        """Median and quartiles of a piece of work in microseconds."""
        run = self.graphed(work) if graph else work
        run()
        times = [self._once(run) for _ in range(self.repeats)]
        low, middle, high = quantiles(times, n=4)
        return {"us": middle, "us_low": low, "us_high": high}

    def _once(self, run: Work) -> float:
        if self.device.type != "cuda":
            start = perf_counter()
            run()
            return (perf_counter() - start) * 1e6
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(200_000)  # type: ignore[no-untyped-call]  # the host queues meanwhile
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) * 1e3

    def graphed(self, work: Work) -> Work:
        """The work as a CUDA graph; without a GPU, unchanged."""
        if self.device.type != "cuda":
            return work
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One attention layer with its cache."""

    model: MoEModel
    batch: int
    context: int
    weights: dict[str, Tensor]
    key: Tensor
    """[batch, key-value heads, context, size]"""
    value: Tensor
    hidden: Tensor
    angles: Tensor

    @classmethod
    def made(cls, model: MoEModel, bench: Bench, caches: Tensor, batch: int, context: int) -> Attention:
        """A layer with random weights and these caches."""
        heads, pairs = model.num_heads, model.cache_heads
        size = model.attention_width // heads
        half = batch * pairs * context * size
        return cls(
            model=model, batch=batch, context=context,
            weights={"qkv": bench.randn(model.hidden, (heads + 2 * pairs) * size),
                     "out": bench.randn(heads * size, model.hidden),
                     "router": bench.randn(model.hidden, model.num_experts)},
            key=caches[:half].view(batch, pairs, context, size),
            value=caches[half : 2 * half].view(batch, pairs, context, size),
            hidden=bench.randn(batch, model.hidden), angles=bench.randn(2, size // 2),
        )  # fmt: skip

    @property
    def size(self) -> int:
        return self.model.attention_width // self.model.num_heads

    def scores(self, kind: str, query: Tensor) -> Tensor:
        """Attention of [batch, heads, size] queries over the cache."""
        batch, heads, size = query.shape
        grouped = query.view(batch, self.model.cache_heads, heads // self.model.cache_heads, size)
        if kind == "flash":
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = F.scaled_dot_product_attention(grouped, self.key, self.value)
        elif kind == "grouped":
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # others would copy the cache once for each head
                out = F.scaled_dot_product_attention(query[:, :, None], self.key, self.value, enable_gqa=True)
        else:
            products = torch.matmul(grouped, self.key.transpose(2, 3)) * size**-0.5
            out = torch.matmul(products.softmax(-1), self.value)
        return out.reshape(batch, heads * size)

    def layer(self, kind: str) -> tuple[Tensor, Tensor]:
        weights, model, x = self.weights, self.model, self.hidden
        heads, pairs, size = model.num_heads, model.cache_heads, self.size
        mixed = F.rms_norm(x, (model.hidden,)) @ weights["qkv"]
        query, key, value = mixed.view(self.batch, heads + 2 * pairs, size).split_with_sizes(
            [heads, pairs, pairs], dim=1
        )
        query, key = _rotated(query, self.angles), _rotated(key, self.angles)
        self.key[:, :, -1], self.value[:, :, -1] = key, value
        x = x + self.scores(kind, query) @ weights["out"]
        scores = (F.rms_norm(x, (model.hidden,)) @ weights["router"]).float().softmax(-1)
        return scores.topk(model.top_k)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    cos, sin = angles[0], angles[1]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def attention_cases(model: MoEModel, bench: Bench, caches: Tensor, batch: int, context: int) -> list[Case]:
    """The layer with each kind of scores, and the scores alone."""
    layer = Attention.made(model, bench, caches, batch, context)
    fastest, alone = fastest_scores(layer, bench)
    took = bench.clock(lambda: layer.layer(fastest))
    return [{"kind": "attention", "model": model.name, "batch": batch, "context": context, "scores": fastest,
             "scores_us": alone, **took}]  # fmt: skip


def fastest_scores(layer: Attention, bench: Bench) -> tuple[str, dict[str, float]]:
    """The fastest kind of scores, and the microseconds of each."""
    query = bench.randn(layer.batch, layer.model.num_heads, layer.size)
    alone: dict[str, float] = {}
    for kind in ("flash", "grouped", "plain"):
        try:
            alone[kind] = bench.clock(partial(layer.scores, kind, query))["us"]
        except RuntimeError as error:  # a path that this torch does not have
            print(f"{kind}: {str(error).splitlines()[0][:100]}", flush=True)
    return min(alone, key=lambda kind: alone[kind]), alone


def experts_cases(model: MoEModel, bench: Bench, tokens: int, share: int) -> list[Case]:
    """The experts of one node, by torch and by our kernels."""
    held = model.num_experts // share
    rng = np.random.default_rng(tokens * 100 + share)
    chosen = np.argsort(rng.random((tokens, model.num_experts)), axis=1)[:, : model.top_k]
    token, place = np.nonzero(chosen < held)
    order = np.argsort(chosen[token, place], kind="stable")
    sizes = np.bincount(chosen[token, place], minlength=held)
    if not sizes.any():
        return []
    of_row = torch.from_numpy(token[order]).to(bench.device)
    x, weights = (
        bench.randn(tokens, model.hidden),
        torch.rand(of_row.numel(), 1, device=bench.device, dtype=bench.dtype),
    )
    products = expert_products(model, bench, sizes)

    def layer(experts: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.zeros_like(x).index_add_(0, of_row, experts(x[of_row]) * weights)

    took: dict[str, dict[str, float]] = {}
    for name, experts in products.items():
        try:
            took[name] = bench.clock(partial(layer, experts))
        except Exception as error:  # noqa: BLE001 - the other products still count
            print(f"{name}: {str(error)[:200]}", flush=True)
    fastest = min(took, key=lambda name: took[name]["us"])
    return [{
        "kind": "experts", "model": model.name, "tokens": tokens, "share": share, "instances": held,
        "active": int((sizes > 0).sum()), "rows": int(sizes.sum()), "products": fastest,
        "products_us": {name: each["us"] for name, each in took.items()}, **took[fastest],
    }]  # fmt: skip


def expert_products(
    model: MoEModel, bench: Bench, sizes: np.ndarray[Any, Any]
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Results of this many rows per expert, by torch and by our kernels."""
    first = bench.randn(len(sizes), 2 * model.expert_ffn, model.hidden)
    second = bench.randn(len(sizes), model.hidden, model.expert_ffn)
    return {"torch": _by_torch(sizes, first, second), **_by_kernels(sizes, first, second, bench)}


def _by_torch(sizes: np.ndarray[Any, Any], first: Tensor, second: Tensor) -> Callable[[Tensor], Tensor]:
    ends = torch.from_numpy(np.cumsum(sizes)).to(first.device, torch.int32)
    into, out = first.transpose(1, 2), second.transpose(1, 2)

    def run(rows: Tensor) -> Tensor:
        gate, up = torch._grouped_mm(rows, into, offs=ends).chunk(2, dim=-1)
        return torch._grouped_mm(F.silu(gate) * up, out, offs=ends)

    return run


def _by_kernels(
    sizes: np.ndarray[Any, Any], first: Tensor, second: Tensor, bench: Bench
) -> dict[str, Callable[[Tensor], Tensor]]:
    """The work on our kernels, if they support the shape."""
    if bench.device.type != "cuda":
        return {}
    from equilibra.execute.experts import Activation  # noqa: PLC0415 - torch's kernels suffice without a GPU
    from equilibra.execute.kernels import ExpertParts, grouped  # noqa: PLC0415

    instances = [ExpertParts(first[i], second[i]) for i in range(len(sizes))]
    if not grouped.serves(first[0], instances):
        return {}
    groups = grouped.Groups.of(tuple(sizes.tolist()), bench.device)
    return {"ours": lambda rows: grouped.forward(Activation.SWIGLU, rows, groups, instances, keep=False)[0]}


def dense_cases(model: MoEModel, bench: Bench, batch: int) -> list[Case]:
    """The output head, the largest dense product of decoding."""
    vocabulary = model.embedding_parameters // model.hidden
    x, head = bench.randn(batch, model.hidden), bench.randn(model.hidden, vocabulary)
    return [{"kind": "dense", "model": model.name, "batch": batch, "parameters": model.hidden * vocabulary,
             **bench.clock(lambda: x @ head)}]  # fmt: skip


def jobs_of(models: list[MoEModel], bench: Bench, caches: Tensor, *, tiny: bool) -> list[Callable[[], list[Case]]]:
    """All cases in shuffled order, so that heat and clocks favour none."""
    batches, contexts = (TINY_BATCHES, TINY_CONTEXTS) if tiny else (BATCHES, CONTEXTS)
    tokens, shares = (TINY_TOKENS, TINY_SHARES) if tiny else (TOKENS, SHARES)
    jobs: list[Callable[[], list[Case]]] = []
    for model in models:
        for batch, context in product(batches, contexts):
            jobs.append(partial(attention_cases, model, bench, caches, batch, context))
        for count, share in product(tokens, shares):
            jobs.append(partial(experts_cases, model, bench, count, share))
        jobs += [partial(dense_cases, model, bench, batch) for batch in batches]
    random.Random(0).shuffle(jobs)
    return jobs


def measure(names: list[str], *, tiny: bool, limit_s: float) -> dict[str, Any]:
    """Measure cases until the time is used up."""
    device = torch.device("cuda" if torch.cuda.is_available() and not tiny else "cpu")
    bench = Bench(device=device, dtype=torch.float32 if tiny else torch.bfloat16, repeats=3 if tiny else REPEATS)
    models = [small(model_named(name)) if tiny else model_named(name) for name in names]
    most = max(model.cache_values for model in models)
    size = TINY_BATCHES[-1] * TINY_CONTEXTS[-1] if tiny else BATCHES[-1] * CONTEXTS[-1]
    caches = torch.empty(most * size, device=device, dtype=bench.dtype)
    for part in caches.chunk(64):
        part.normal_(0, 0.5)
    known = environment()
    result: dict[str, Any] = {
        "command": "python -m benchmarks.probes.measure_decode --output FILE"
        + f" --models {','.join(names)}" * (tuple(names) != MODELS) + " --tiny" * tiny,
        "date": known["date"], "commit": known["commit"], "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else known["cpu"],
        "dtype": str(bench.dtype).removeprefix("torch."), "repeats": bench.repeats,
        "models": {model.name: _shape(model) for model in models}, "cases": [], "failed": [],
    }  # fmt: skip
    jobs, start = jobs_of(models, bench, caches, tiny=tiny), perf_counter()
    with torch.no_grad():
        for number, job in enumerate(jobs):
            if perf_counter() - start > limit_s:
                print(f"stopped after {limit_s:g} s: {number} of {len(jobs)} cases", flush=True)
                break
            try:
                result["cases"] += job()
            except Exception as error:  # noqa: BLE001 - the other cases still count
                result["failed"].append(f"{job}: {error}"[:300])
                print(result["failed"][-1], flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # graphs keep their memory
    result["seconds"] = round(perf_counter() - start, 1)
    return result


def _shape(model: MoEModel) -> dict[str, int]:
    names = ("hidden", "expert_ffn", "num_experts", "top_k", "num_heads", "cache_heads", "cache_values", "score_width",
             "attention_width", "embedding_parameters")  # fmt: skip
    return {name: getattr(model, name) for name in names}


def small(model: MoEModel) -> MoEModel:
    """A model of the same name, small enough for CPUs."""
    return MoEModel(
        name=model.name, num_layers=1, hidden=64, expert_ffn=32, num_experts=8, top_k=2, num_heads=4, cache_heads=2,
        cache_values=2 * 2 * 16, score_width=4 * 16, attention_width=4 * 16, embedding_parameters=64 * 256,
    )  # fmt: skip


def main() -> None:
    """Measure, or fit what was measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--fit", type=Path, metavar="FILE")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated; their shapes count")
    parser.add_argument("--limit-s", type=float, default=90.0)
    parsed = parser.parse_args()
    if parsed.fit is None:
        result = measure(parsed.models.split(","), tiny=parsed.tiny, limit_s=parsed.limit_s)
        print(f"{len(result['cases'])} cases in {result['seconds']} s on {result['device']}", flush=True)
    else:
        measured = json.loads(parsed.fit.read_text())
        source = f"fitted to {measured['device']}, {measured['date']}, commit {measured['commit']}"
        fit = fit_decode(measured, decode_law(prices_named("h200")), source=source)
        result = {"law": asdict(fit.law), "errors": fit.errors, "of": measured["command"]}
        for name, error in fit.errors.items():
            print(name, {key: round(value, 4) for key, value in error.items()}, flush=True)
    if parsed.output is not None:
        parsed.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
