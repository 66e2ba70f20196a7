"""The GPU bench: rank-serial replay of planned steps on one device.

Every rank's rows run as real kernels, one rank after another; a layer takes as long as its slowest rank. From the times
of each repeat, per case:

    share_of_balanced     time(balanced) / time(contender)
    speedup_over_static   time(static) / time(contender)
    exposed_share         time(equilibra) / time(equilibra-still) - 1, for every path of the copies
    static_imbalance      of rows, from the routing alone

The figures at the top of the result are those of the case with the least share of balanced. Results are written after
every case, and a later run can add cases to them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu.case import Case, GpuSetting
from benchmarks.gpu.contenders import (
    BALANCED,
    EQUILIBRA,
    NAMES,
    ONLINE,
    OTHER_PATH,
    STATIC,
    STILL_ONE,
    contenders,
)
from benchmarks.gpu.records import Records, layer_times, load_records, ratio, relative_times, settled_ratio
from benchmarks.suite import environment, spread
from equilibra.core.errors import InputError

if TYPE_CHECKING:
    import torch

    from benchmarks.gpu.measure import Measured

FIGURES = ("static_imbalance", "share_of_balanced", "speedup_over_static", "exposed_share")

Outcome = dict[str, Any]
"""cases and left_out: all but the records and what is made of them"""


def device_named(name: str | None) -> torch.device:
    """The named device; without a name, the GPU."""
    if find_spec("torch") is None:
        raise InputError("the GPU bench needs PyTorch: pip install 'equilibra[torch]'")
    import torch  # noqa: PLC0415 - only what runs needs it

    if name in (None, "cuda") and not torch.cuda.is_available():
        raise InputError(
            "PyTorch finds no GPU here: run this on a machine with one, or check that it works with --device cpu and "
            "small sizes (--hidden 64 --ffn 64 --tokens-per-rank 64)"
        )
    return torch.device("cpu") if name == "cpu" else torch.device("cuda", torch.cuda.current_device())


def about_device(device: torch.device) -> dict[str, Any]:
    """Name and versions of what ran the kernels."""
    import torch  # noqa: PLC0415

    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "triton": triton}


def run_cases(
    cases: list[Case],
    setting: GpuSetting,
    *,
    device: torch.device,
    command: str,
    earlier: tuple[Outcome, Records],
    tell: Callable[[str], None],
    keep: Callable[[Outcome, Records], None],
) -> tuple[Outcome, Records]:
    """Measure all cases; after each, hand over the results so far, with earlier ones."""
    from benchmarks.gpu.measure import measure  # noqa: PLC0415
    from benchmarks.gpu.roofline import measured_ceilings  # noqa: PLC0415

    outcome, records = earlier
    about = {**environment(), **about_device(device)}
    tell(f"planning {len(cases)} cases")
    planned = [contenders(case, setting) for case in cases]
    begin, done_s, all_s = perf_counter(), 0.0, sum(case.round_s for case in cases)
    for number, case in enumerate(cases, start=1):
        start = perf_counter()
        left_s = None if setting.seconds is None else max(setting.seconds - (start - begin), 0.0)
        part_s = None if left_s is None else left_s * case.round_s / (all_s - done_s)
        found = measure(case, planned[number - 1], setting, device=device, seconds=part_s)
        seconds = perf_counter() - start
        records.add(case.name, found.rows)
        result = {
            **case_result(case, setting, found), "ceilings": measured_ceilings(device), "seconds": seconds,
            "command": command, "measured_on": about,
        }  # fmt: skip
        outcome["cases"] = [one for one in outcome["cases"] if one["case"] != case.name] + [result]
        keep(outcome, records)
        done_s += case.round_s
        left = (perf_counter() - begin) * (all_s / done_s - 1)
        share, exposed = result["share_of_balanced"][EQUILIBRA]["median"], result["exposed_share"][setting.paths[0]]
        tell(
            f"[{number}/{len(cases)}] {case.name}: {share:.1%} of balanced, "
            f"{result['share_of_balanced'][STATIC]['median']:.1%} static, exposed {exposed['median']:.2%} "
            f"({seconds:.0f} s, about {left:.0f} s left)"
        )
    return outcome, records


def case_result(case: Case, setting: GpuSetting, found: Measured) -> dict[str, Any]:
    """Figures of one case, and what was run."""
    rows = {one.name: found.rows[found.rows["contender"] == NAMES.index(one.name)] for one in found.contenders}
    us = {name: layer_times(of) for name, of in rows.items()}
    each = {name: relative_times(of, rows[BALANCED]) for name, of in rows.items()}
    settled = {name: settled_ratio(of, rows[BALANCED]) for name, of in rows.items()}
    each[BALANCED], settled[BALANCED] = np.ones_like(each[BALANCED]), 1.0  # its ranks are equal, so none is slowest

    def over(first: str, second: str) -> dict[str, Any]:
        return ratio(settled[first] / settled[second], each[first] / each[second])

    def exposed(name: str) -> dict[str, Any]:
        return ratio(settled[name] / settled[STILL_ONE] - 1, each[name] / each[STILL_ONE] - 1)

    moved = dict(zip(setting.paths, (EQUILIBRA, OTHER_PATH), strict=False))
    return {
        "case": case.name, "recording": case.recording, "model": case.model.name, "ranks": case.cluster.num_ranks,
        "nodes": case.cluster.num_nodes, "hidden": case.model.hidden, "expert_ffn": case.model.expert_ffn,
        "experts": case.model.num_experts, "top_k": case.model.top_k, "layers": case.layers,
        "static_imbalance": case.static_imbalance(),
        "share_of_balanced": {name: over(BALANCED, name) for name in us},
        "speedup_over_static": {name: over(STATIC, name) for name in us},
        "exposed_share": {path: exposed(name) for path, name in moved.items()},
        "late_share": {path: _late_share(found, name) for path, name in moved.items()},
        "layer_us": {name: spread(times.mean(axis=1)) for name, times in us.items()},
        "online": _online(found),
        "contenders": [
            {"contender": one.name, "path": one.path, "imbalance": one.imbalance(),
             "worst_imbalance": one.worst_imbalance(), "copies_per_layer": one.copies_per_layer(),
             "standing_copies": one.standing_copies}
            for one in found.contenders
        ],
        "settings": {**asdict(setting), "layers_and_micro_batches": us[STATIC].shape[1],
                     "rows": int(case.load.tokens_MLER.sum(dtype=np.int64))},
        "host_bound_share": found.host_bound_share,
        "notes": case.notes + found.notes,
    }  # fmt: skip


def _late_share(found: Measured, name: str) -> float:
    """Share of passes with copies in which compute waited for them."""
    rows = found.rows[(found.rows["contender"] == NAMES.index(name)) & (found.rows["bytes"] > 0)]
    return float((rows["late_us"] > 0).mean()) if rows.size else 0.0


def _online(found: Measured) -> dict[str, float]:
    """What online planning adds to a layer: medians."""
    rows = found.rows[found.rows["contender"] == NAMES.index(ONLINE)]
    copied = rows[rows["copies"] > 0]
    return {
        "plan_us": float(np.median(rows["plan_us"])),
        "copy_us": float(np.median(copied["copy_us"])) if copied.size else 0.0,
    }


def fresh() -> tuple[Outcome, Records]:
    """An outcome without cases."""
    return {"cases": [], "left_out": []}, Records()


def earlier_outcome(folder: Path, *, records: bool) -> tuple[Outcome, Records]:
    """The outcome of an earlier run in a folder, empty if there is none; an error if the file is not a GPU bench's."""
    file = folder / "gpu.json"
    if not file.is_file():
        return fresh()
    try:
        found = json.loads(file.read_text())
        outcome = {name: found[name] for name in ("cases", "left_out")}
        ours = all("ceilings" in case for case in outcome["cases"])
    except (ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise InputError(f"{file} is not a result of this bench as it is now; move it away, or choose another folder")
    return (outcome, load_records(folder / "gpu-records.npz")) if records else fresh()
