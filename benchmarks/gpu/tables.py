"""The GPU bench's tables and files: gpu.md, gpu.json, gpu.png, the raw records and the measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.contenders import AGAIN, EPLB, EQUILIBRA, NAMES, ONLINE, STATIC
from benchmarks.gpu.figures import FIGURES, Outcome
from benchmarks.gpu.laws import calibration
from benchmarks.gpu.records import Records, save_records
from benchmarks.gpu.roofline import roofline
from benchmarks.plots import plot_gpu
from benchmarks.suite import Row, Suite, markdown, plain
from equilibra.core.atomic import atomic_file

SHARE_REACH, EXPOSED_REACH = 0.97, 0.01
TITLES = {
    "cases": "Expert layers, rank after rank on one device (measured)",
    "times": "A layer of every contender (measured)",
    "calibration": "The cost model, fitted to some cases and compared on the others (measured and predicted)",
    "roofline": "Roofline (measured)",
    "left_out": "Left out",
}


def result_of(outcome: Outcome, records: Records) -> dict[str, Any]:
    """All results, as printed and written."""
    cases = outcome["cases"] = _in_order(outcome["cases"])
    worst = min(cases, key=lambda case: case["share_of_balanced"][EQUILIBRA]["median"])
    fitted_rows, measurements, note = calibration(records, cases)
    ceilings = {name: max(case["ceilings"][name] for case in cases) for name in cases[0]["ceilings"]}
    value = 4 if worst["measured_on"]["device"] == "cpu" else 2
    tables = {
        "cases": [_case_row(case) for case in cases],
        "times": [row for case in cases for row in _time_rows(case)],
        "calibration": fitted_rows,
        "roofline": roofline(records, cases, ceilings, value=value),
        "left_out": outcome["left_out"],
    }
    about = {"command": _every("command", cases), "measured_on": _environment(cases)}
    return {
        **{name: worst[name] for name in ("case", *FIGURES)},
        **outcome,
        "command": about["command"],
        "environment": about["measured_on"],
        "measured_ceilings": ceilings,
        "calibration_note": note,
        "measurements": measurements,
        "sections": {name: {**about, "rows": plain(rows)} for name, rows in tables.items() if rows},
    }


def _in_order(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cases by recording and model in order of first appearance, then by ranks."""
    seen = {name: list(dict.fromkeys(case[name] for case in cases)) for name in ("recording", "model")}
    return sorted(cases, key=lambda case: (*(seen[name].index(case[name]) for name in seen), case["ranks"]))


def _every(name: str, things: list[dict[str, Any]]) -> Any:  # noqa: ANN401
    """The common value; where added runs differ, every distinct value once."""
    values = list(dict.fromkeys(thing[name] for thing in things))
    return values[0] if len(values) == 1 else "; ".join(str(value) for value in values)


def _environment(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The machine and the versions of all cases."""
    every = [case["measured_on"] for case in cases]
    return {name: _every(name, every) for name in every[0]}


def _said(spread: dict[str, Any]) -> str:
    return f"{spread['median']:.3f} ({spread['low']:.3f} to {spread['high']:.3f})"


def _over(share: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """A share over another one, also by repeat."""
    repeats = [one / again for one, again in zip(share["repeats"], other["repeats"], strict=True)]
    return {"median": share["median"] / other["median"], "low": min(repeats), "high": max(repeats)}


def _case_row(case: dict[str, Any]) -> Row:
    """A row of the first table."""
    shares, exposed = case["share_of_balanced"], case["exposed_share"]
    row: Row = {"case": case["case"], "static_imbalance": case["static_imbalance"]["of_step"]}
    row |= {name: _said(shares[name]) for name in (STATIC, EPLB, ONLINE, EQUILIBRA, AGAIN) if name in shares}
    if AGAIN in shares:
        row["share_of_slowest_balanced"] = _said(_over(shares[EQUILIBRA], shares[AGAIN]))
    row["reach"] = SHARE_REACH
    row["speedup_over_static"] = _said(case["speedup_over_static"][EQUILIBRA])
    for path, found in exposed.items():
        row[f"exposed_{path}"] = f"{found['median']:.2%} ({found['low']:.2%} to {found['high']:.2%})"
    row["exposed_reach"] = EXPOSED_REACH
    row["notes"] = "; ".join(case["notes"])
    return row


def _time_rows(case: dict[str, Any]) -> list[Row]:
    """Rows of the second table."""
    about = {one["contender"]: one for one in case["contenders"]}
    rows = []
    for name in NAMES:
        if name not in about:
            continue
        us, one = case["layer_us"][name], about[name]
        row: Row = {
            "case": case["case"], "contender": name, "layer_us": us["median"],
            "layer_us_spread": f"{us['low']:.0f} to {us['high']:.0f}", "share_of_balanced":
            case["share_of_balanced"][name]["median"], "imbalance": one["imbalance"],
            "worst_imbalance": one["worst_imbalance"], "copies": one["copies_per_layer"], "path": one["path"],
        }  # fmt: skip
        if name == ONLINE:
            row |= {"plan_us": case["online"]["plan_us"], "copy_us": case["online"]["copy_us"]}
        if one["path"] is not None and name != ONLINE:
            row["late"] = case["late_share"][one["path"]]
        rows.append(row)
    return rows


NOTES = {
    "cases": "Contender columns are shares of the balanced speed. Contenders take turns rank by rank. Because the "
    "clock drifts, a rank's time is divided by the median of up to nine balanced ranks around it, and its median over "
    "repeats counts. Brackets show the least and largest of single repeats; in each of them the slowest of many ranks "
    "is also slow by chance, so all may be lower than the median. `balanced-again` is balanced a second time: its "
    "distance from 1 is that chance. `share_of_slowest_balanced` is equilibra's share of it: the slowest rank on both "
    "sides. A layer is the expert compute alone, forward and backward, of its slowest rank; attention, all-to-all and "
    "the optimizer are not run. `static_imbalance`: rows of slowest over mean ranks. `online-exact`: its planning (on "
    "the host, plan_us below; UltraEP's authors report 67 to 78 us on a GPU) and the copies of its weights are added "
    "to every layer; its exchange of counts, copies in the backward pass and gradients are not charged. `exposed`: "
    "how much longer a layer takes while copies of its neighbour layers move, by source: another place of the "
    "device's memory, or pinned host memory. One device stands for all ranks. So a copy inside it is faster than a "
    "link between two, takes memory bandwidth that two devices would share, and is made by a kernel that leaves room "
    "for others (`benchmarks.gpu.copying`), where copy engines would work between devices. Gradients of copies are "
    "added in place, as where ranks share a device, and read once more by the rank that holds them; between devices "
    "they are pulled first. A pass ends when products and copies are done; the few microseconds in which streams then "
    "wait for each other are not counted. Before each rank the device rests for at least three quarters of the "
    "previous rank's time, so that it stays cool. Plans count what rows, copies and moves cost on this device "
    "(regressions over earlier runs of this bench), rows in whole tiles, a 32nd of what is paid once a step for every "
    "micro-batch, and no network unless `--network` is set; then plans also even out traffic, which takes more copies "
    "and has no effect here.",
    "times": "`layer_us`: mean over layers and micro-batches. `copies`: flash copies per layer and micro-batch, all "
    "ranks together. `late`: share of ranks that waited for copies at the end of a pass. `plan_us`, `copy_us`: median "
    "time that online planning adds. equilibra-still: the same rows without moves.",
    "calibration": "`equilibra calibrate` reads gpu-measurements.json. Errors are of a layer's time, over contenders "
    "without moves, layers and micro-batches; errors by contender are signed.",
    "roofline": "Per balanced rank. `of_product`, `of_memory`: shares of the ceilings. `reached`: the larger of FLOP "
    "and bytes at the ceilings' rates, over the measured time. Bytes count every intermediate result; see "
    "`benchmarks.gpu.roofline`. `copies`: weights that arrive at a rank of online-exact, with nothing beside them.",
}
GPU = Suite(
    name="gpu",
    title="GPU bench",
    intro="`reach` columns are requirements.",
    sections=dict.fromkeys(TITLES, lambda _setting: []),  # all tables are of one run: see `result_of`
    titles=TITLES,
    notes=NOTES,
)


def write_gpu(result: dict[str, Any], records: Records, folder: Path, *, picture: bool = True) -> None:
    """Write all files of the bench, each atomically."""
    shown = {key: value for key, value in result.items() if key != "measurements"}
    with atomic_file(folder / "gpu.json", overwrite=True) as part:
        part.write_text(json.dumps(shown, indent=1) + "\n")
    with atomic_file(folder / "gpu.md", overwrite=True) as part:
        part.write_text(page(result))
    if picture:
        plot_gpu(result["sections"]["cases"]["rows"], folder)
    save_records(records, folder / "gpu-records.npz")
    about = {"command": result["command"], **result["environment"]}
    lines = ",\n  ".join(json.dumps(one) for one in result["measurements"])
    if lines:
        with atomic_file(folder / "gpu-measurements.json", overwrite=True) as part:
            part.write_text(f'{{"about": {json.dumps(about)},\n "measurements": [\n  {lines}\n ]}}\n')


def page(result: dict[str, Any]) -> str:
    """The Markdown page: tables, and this run's notes on fits and ceilings."""
    ceilings = ", ".join(f"{name} {value:.4g}" for name, value in result["measured_ceilings"].items())
    notes = {
        **NOTES,
        "calibration": f"{result['calibration_note']} {NOTES['calibration']}",
        "roofline": f"Ceilings, measured after every case, the highest: {ceilings}. {NOTES['roofline']}",
    }
    return markdown(replace(GPU, notes=notes), result)
