"""Results: stored as JSON case by case, and the tables from them. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from equilibra.core.atomic import atomic_file

STATIC, OURS, BALANCED = "Megatron", "Equilibra", "Megatron, balanced routing"
TOLERANCE = {"float32": 2e-5, "bfloat16": 2.0**-8, "float64": 1e-10}
"""relative tolerance of a step's loss: sums in another order, after several steps of Adam"""
GOAL = 0.95
"""required share of the speed with routing forced to balance"""

Case = dict[str, Any]


def results_of(path: Path) -> dict[str, Case]:
    """Cases by name; none if there is no file yet."""
    found: dict[str, Case] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def keep(path: Path, name: str, case: Case) -> None:
    """Add or replace a case, and write the tables beside it."""
    results = results_of(path)
    results[name] = _short(case)
    with atomic_file(path, overwrite=True) as file:
        file.write_text(json.dumps(results, indent=1) + "\n")
    with atomic_file(path.with_suffix(".md"), overwrite=True) as file:
        file.write_text(tables(results))


def _short(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_short(one) for one in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def largest_difference(case: Case, name: str = OURS) -> float:
    """The largest relative difference of a step's loss from plain Megatron's."""
    pairs = zip(case["losses"][STATIC], case["losses"][name], strict=True)
    return float(max(abs(b - a) / abs(a) for a, b in pairs))


def tolerance(case: Case) -> float:
    """The largest relative loss difference that rounding explains."""
    return TOLERANCE[case["case"]["dtype"]]


# --- tables ---


def tables(results: dict[str, Case]) -> str:
    """All tables as Markdown."""
    failed = {name: case["error"] for name, case in results.items() if "error" in case}
    done = {name: case for name, case in results.items() if name not in failed}
    timed = {name: case for name, case in done.items() if "steps" in case}
    parts = ["# Megatron-Core on one GPU", INTRO]
    if timed:
        parts += ["## Steps", _steps(timed), STEPS_NOTE, "## Where the time goes", _shares(timed), SHARES_NOTE]
        parts += ["## Memory", _memory(timed), MEMORY_NOTE]
    if done:
        parts += ["## Losses", _losses(done), LOSSES_NOTE, "## Commands", _commands(results)]
    if failed:
        parts += ["## Failed", "\n".join(f"- {name}: `{error[:300]}`" for name, error in failed.items())]
    return "\n\n".join(parts) + "\n"


INTRO = """Real megatron-core trains the same model three ways, in turn and in random order: unmodified, balanced by
Equilibra, and unmodified with routing forced to balance. Four processes share one GPU under CUDA MPS, a quarter of its
multiprocessors each, and form one expert-parallel group. Routing is replayed; it is synthetic, with skew, noise between
sequences and correlation taken from a recording of gpt-oss-20b for models of its shape. Weights, data and optimizer are
the same for all. Measured."""
STEPS_NOTE = f"""A step's time is that of the slowest rank, from `begin` to the end of the optimizer, with plan, DDP and
DistributedOptimizer: median (least to most) of the repeats. Ratios are medians of those within a repeat. The goal is
{GOAL:.0%} of the speed with balanced routing. `links`: tokens travel through the GPU's memory (`ipc`, like
fast links), or through NCCL, which treats processes on one GPU as different hosts and uses sockets. `path`: how copies
travel."""
SHARES_NOTE = """Milliseconds of a step. Experts: the sum over layers, micro-batches and passes of the slowest rank's
time in them (and over mean rank), including waiting for copies. Products: our grouped kernels alone, on the rank with
most over a whole step (and over mean rank). Exchange: the sum of the shortest time of any rank in each all-to-all of
tokens, which excludes waiting for others; it is a share of the step. Plan: the host's time before the first forward."""
MEMORY_NOTE = """Maximum over ranks. Resident: weights, optimizer state and buffers after the first step. Transient:
peak of a step beyond the memory allocated before it. Slots: spare slots times the bytes of an expert."""
LOSSES_NOTE = """The largest relative difference of a step's loss, averaged over ranks, from plain Megatron's, over this
many steps of Adam from the same weights. Control: gradients of copies are dropped, so it must exceed the tolerance."""


def _steps(cases: dict[str, Case]) -> str:
    rows = []
    for name, case in cases.items():
        seconds = {who: _values(case, who, "seconds") for who in (STATIC, OURS, BALANCED)}
        share = _median_ratio(seconds[BALANCED], seconds[OURS])
        rows.append([
            name, _model(case), case["case"]["links"],
            ", ".join(case.get("paths", [])) or case["setting"].get("path", "collective"),
            f"{case['static_imbalance']:.2f} → {case['planned_imbalance']:.3f}",
            *(_spread(seconds[who], 1e3) for who in (STATIC, OURS, BALANCED)),
            f"{_median_ratio(seconds[STATIC], seconds[OURS]):.2f}×", f"{share:.1%}{'' if share < GOAL else ' ✓'}",
        ])  # fmt: skip
    return _table(
        ["case", "model", "links", "path", "imbalance", *(f"{who}, ms" for who in (STATIC, OURS, BALANCED)),
         "faster than Megatron", "of balanced"], rows,
    )  # fmt: skip


def _shares(cases: dict[str, Case]) -> str:
    rows = []
    for name, case in cases.items():
        for who in (STATIC, OURS, BALANCED):
            middle = {key: median(_values(case, who, key)) for key in case["steps"][who][0]}
            rows.append([
                name, who, f"{1e3 * middle['seconds']:.0f}", _with_mean(middle, "experts"),
                _with_mean(middle, "products"),
                f"{middle['exchange_ms']:.0f} ({middle['exchange_ms'] / middle['seconds'] / 1e3:.0%})",
                f"{1e3 * middle['plan_s']:.1f}",
            ])  # fmt: skip
    return _table(["case", "", "step", "experts", "products", "exchange", "plan"], rows)


def _with_mean(middle: dict[str, float], name: str) -> str:
    slowest, mean = middle[f"{name}_slowest_ms"], middle[f"{name}_mean_ms"]
    return f"{slowest:.0f} ({slowest / mean:.2f})" if mean else "–"


def _memory(cases: dict[str, Case]) -> str:
    rows = []
    for name, case in cases.items():
        of_expert = 3 * case["shape"]["hidden"] * case["shape"]["expert_ffn"] * _width(case)
        rows.append([
            name, *(_mib(case["resident_bytes"][who]) for who in (STATIC, OURS)),
            *(_mib(case["transient_bytes"][who]) for who in (STATIC, OURS, BALANCED)),
            _mib(int(case["setting"]["spare_slots"]) * of_expert),
        ])  # fmt: skip
    transient = [f"transient, {who}" for who in (STATIC, OURS, BALANCED)]
    return _table(["MiB", f"resident, {STATIC}", f"resident, {OURS}", *transient, "slots"], rows)


def _losses(cases: dict[str, Case]) -> str:
    rows = []
    for name, case in cases.items():
        apart, allowed = largest_difference(case), tolerance(case)
        control = "–"
        if "control" in case["losses"]:
            broken = largest_difference(case, "control")
            control = f"{broken:.1e} {'✓' if broken > allowed else '✗ not noticed'}"
        rows.append([
            name, case["case"]["dtype"], "full" if case["case"]["recompute"] else "none", case["case"]["experts"],
            str(len(case["losses"][OURS])), f"{case['copies_of_step']:.0f}", f"{allowed:.1e}",
            f"{apart:.1e} {'✓' if apart <= allowed else '✗'}", control,
        ])  # fmt: skip
    heads = ["case", "dtype", "recompute", "experts", "steps", "copies a step", "tolerance", "difference", "control"]
    return _table(heads, rows)


def _commands(cases: dict[str, Case]) -> str:
    rows = [
        [name, f"`{case['command']} --case {name}`", *(str(case[key]) for key in ("date", "commit", "gpu", "versions"))]
        for name, case in cases.items()
    ]
    return _table(["case", "command", "date", "commit", "GPU", "versions"], rows)


def _model(case: Case) -> str:
    shape, how = case["shape"], case["case"]
    layers = "one MoELayer" if how["kind"] == "layer" else f"GPTModel, {shape['num_layers']} layers"
    words = [
        layers, how["dtype"], f"hidden {shape['hidden']}", f"FFN {shape['expert_ffn']}",
        f"{shape['num_experts']} experts, top {shape['top_k']}", f"{how['experts']} experts",
        f"{shape['sequence'] * shape['sequences']} tokens × {shape['micro_batches']} micro-batches",
        *["full recompute"] * how["recompute"], *["fused gradients"] * how["fused"],
    ]  # fmt: skip
    return ", ".join(words)


def _values(case: Case, who: str, key: str) -> list[float]:
    return [step[key] for step in case["steps"][who]]


def _median_ratio(slower: list[float], faster: list[float]) -> float:
    return median(a / b for a, b in zip(slower, faster, strict=True))


def _spread(values: list[float], scale: float) -> str:
    return f"{scale * median(values):.0f} ({scale * min(values):.0f} to {scale * max(values):.0f})"


def _width(case: Case) -> int:
    return {"bfloat16": 2, "float32": 4, "float64": 8}[case["case"]["dtype"]]


_mib: Callable[[int], str] = lambda count: f"{count / 2**20:,.0f}"  # noqa: E731


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
