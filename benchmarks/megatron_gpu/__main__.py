"""Measure cases into a file of results, or print the tables of one.

    make megatron-gpu                                               # unpacks megatron-core, once, where pip works
    benchmarks/megatron_gpu/run.sh --output benchmarks/results      # on the machine with the GPU
    python -m benchmarks.megatron_gpu --table FILE.json             # anywhere: prints the tables, writes FILE.md
    python -m benchmarks.megatron_gpu --device cpu --tiny           # checks that it runs

Cases run in order until the budget is used up; figures are written as each case ends. Cases of earlier calls stay in
the file, so that several calls fill one.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from benchmarks.megatron_gpu.cases import CASES, SHAPES, Case, cases_named, cases_of
from benchmarks.megatron_gpu.figures import keep, results_of, tables
from benchmarks.suite import environment

STARTS = 4
"""times that ranks are started: again without the case that ended them"""


def main(words: list[str]) -> int:
    """Measure cases, or print the tables of a file."""
    asked = _arguments(words)
    if asked.table:
        path = Path(asked.table)
        text = tables(results_of(path))
        path.with_suffix(".md").write_text(text)
        print(text)
        return 0
    cases = cases_of(cases_named(asked.case), tiny=asked.tiny, device=asked.device, links=asked.links)
    folder = Path(asked.output or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "megatron-gpu.json"
    with tempfile.TemporaryDirectory() as scratch:
        _save_routing(Path(scratch), cases, asked.ranks)
        left = _run(asked, cases, path, Path(scratch))
    if left:
        print(f"left out, the budget of {asked.budget:.0f} s is spent: {', '.join(left)}")
    print(tables(results_of(path)))
    return int(any("error" in one for one in results_of(path).values()))


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.megatron_gpu", description=__doc__.split("\n")[0])
    names = ", ".join(case.name for case in CASES)
    parser.add_argument("--table", metavar="FILE", help="make FILE.md of FILE.json and measure nothing")
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help=f"only this (repeatable): {names}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models small enough for CPUs")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="processes (4)")
    parser.add_argument("--links", choices=("ipc", "nccl"), help="how tokens travel in all cases")
    parser.add_argument("--path", metavar="PATH", help="how copies travel, as MegatronSetting names it")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="another field of MegatronSetting"
    )
    parser.add_argument("--budget", type=float, default=330.0, metavar="S", help="start no case after this time (330)")
    parser.add_argument("--profile", metavar="DIR", help="write a trace of one step of each contender there")
    parser.add_argument("--output", metavar="DIR", help="write megatron-gpu.json and megatron-gpu.md there")
    return parser.parse_args(words)


def _save_routing(folder: Path, cases: list[Case], num_ranks: int) -> None:
    from benchmarks.megatron_gpu.rank import STEPS  # noqa: PLC0415 - needs torch and Megatron
    from benchmarks.megatron_gpu.routing import balanced_ids, rank_imbalance, skewed_ids  # noqa: PLC0415

    for name in dict.fromkeys(case.shape for case in cases):
        shape = SHAPES[name]
        skewed = skewed_ids(shape, steps=STEPS, num_ranks=num_ranks)
        np.savez(folder / f"{name}.npz", skewed=skewed, balanced=balanced_ids(shape, steps=STEPS, num_ranks=num_ranks))
        print(f"{name}: {shape.words()}; imbalance {rank_imbalance(skewed, shape.num_experts):.2f}", flush=True)


def _run(asked: argparse.Namespace, cases: list[Case], path: Path, scratch: Path) -> list[str]:
    """Run cases; returns the names of those that were not started."""
    from tests.distributed.ranks import run_ranks  # noqa: PLC0415

    from benchmarks.megatron_gpu.rank import Request, run  # noqa: PLC0415

    progress, deadline = scratch / "progress", monotonic() + asked.budget
    made = _made(asked)
    for _ in range(STARTS):
        request = Request(
            cases=tuple(cases), device=asked.device, routing=str(scratch), results=str(path), progress=str(progress),
            made=made, setting=_setting(asked), deadline=deadline, profile=asked.profile or "",
        )  # fmt: skip
        progress.write_text(cases[0].name)
        try:
            left = run_ranks(
                asked.ranks, run, request, timeout_s=max(deadline - monotonic(), 0.0) + 120.0,
                backend="nccl" if asked.device == "cuda" else "gloo",
            )[0]  # fmt: skip
            cases = [case for case in cases if case.name in left]
        except AssertionError as error:
            failed = progress.read_text()
            print(f"{failed} ended the processes: {error}", file=sys.stderr, flush=True)
            at = [case.name for case in cases].index(failed)
            keep(path, failed, {**made, "error": str(error)[:2000]})
            cases = cases[at + 1 :]
        if not cases or monotonic() > deadline:
            break
    return [case.name for case in cases]


def _setting(asked: argparse.Namespace) -> dict[str, Any]:
    """Fields of MegatronSetting, numbers and flags as such."""

    def value(text: str) -> Any:  # noqa: ANN401
        if text in {"True", "False"}:
            return text == "True"
        return int(text) if text.lstrip("-").isdigit() else text

    found = {name: value(text) for name, _, text in (one.partition("=") for one in asked.set)}
    return {**found, **({"path": asked.path} if asked.path else {})}


def _made(asked: argparse.Namespace) -> dict[str, Any]:
    """Command, machine and versions of the figures."""
    import torch  # noqa: PLC0415

    words = [
        *([] if asked.device == "cuda" else ["--device", asked.device]), *["--tiny"] * asked.tiny,
        *([] if asked.ranks == 4 else ["--ranks", str(asked.ranks)]),
        *(word for name in ("links", "path") if (value := getattr(asked, name)) for word in (f"--{name}", value)),
        *(word for one in asked.set for word in ("--set", one)),
    ]  # fmt: skip
    gpu = "none"
    if asked.device == "cuda":
        gpu = f"{torch.cuda.get_device_name(0)}, {asked.ranks} processes" if torch.cuda.is_available() else "none"
        gpu += "" if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") else " without MPS"
    found = environment()
    return {
        "command": " ".join(["benchmarks/megatron_gpu/run.sh", *words]), "date": datetime.now(UTC).date().isoformat(),
        "commit": found["commit"], "gpu": gpu,
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, megatron-core {_version()}",
    }  # fmt: skip


def _version() -> str:
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        from megatron.core.package_info import __version__  # noqa: PLC0415

        return str(__version__)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
