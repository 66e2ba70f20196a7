"""What plans cost when copies cost something: planned as if they were free, and with their price known.

    python benchmarks/probes/price_of_copies.py TRACES [--ranks N] [--model NAME] [--free-traffic]

For the cases of `equilibra bench gpu`. A rank's effective load is its rows, and for every copy it holds and every flash
copy it serves what that costs in rows; the table has the slowest rank over the mean rank's rows, all layers and
micro-batches together. Prices: 30 us to hold and 20 us to serve an expert of 50 MB, as measured on an H200.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from equilibra.bench.gpu.case import Case, case_of, routing_of
from equilibra.bench.gpu.setting import MODELS, RANKS, RECORDINGS, GpuSetting
from equilibra.bench.gpu.work import works_of
from equilibra.core.model import MoEModel, model_named
from equilibra.core.plan import Stage
from equilibra.cost.presets import prices_named
from equilibra.cost.rates import Rates, rates_for
from equilibra.plan.planner import StepProblem
from equilibra.plan.step import Equilibra
from equilibra.trace.open import load_trace

HOLD_US, SERVE_US, PER_BYTES = 30.0, 20.0, 50e6


def priced(rates: Rates, model: MoEModel) -> Rates:
    """The rates with the price of copies in the update."""
    size = model.expert_bytes / PER_BYTES
    return replace(
        rates,
        hold_us={Stage.LOGPROB: 0.0, Stage.UPDATE: HOLD_US * size},
        serve_us={Stage.LOGPROB: 0.0, Stage.UPDATE: SERVE_US * size},
    )


def effective(case: Case, rates: Rates, prices: Rates, setting: GpuSetting) -> tuple[float, float, float]:
    """(effective imbalance, imbalance of rows, flash copies per layer and micro-batch) of the plan under `rates`."""
    problem = StepProblem(
        cluster=case.cluster, given_load=case.load, rates=rates, spare_slots=setting.spare_slots,
        standing_slots=setting.standing_slots,
    )  # fmt: skip
    plan = Equilibra().plan(problem)
    plan.check(case.load, spare_slots=setting.spare_slots, standing_slots=setting.standing_slots)
    hold, serve = prices.hold_rows(Stage.UPDATE), prices.serve_rows(Stage.UPDATE)
    works = [ranks for layer in works_of(plan, case.load) for ranks in layer]
    homes = case.cluster.experts_per_rank(case.load.num_experts)
    rows = np.array([[work.num_rows for work in ranks] for ranks in works], np.float64)
    standing = [[sum(size > 0 for size in work.staying[homes:]) for work in ranks] for ranks in works]
    held = np.array([[len(work.flash) for work in ranks] for ranks in works]) + np.array(standing)
    load = rows + hold * held + serve * np.array([[work.served for work in ranks] for ranks in works])
    even = rows.mean(axis=1).sum()
    copies = sum(len(work.flash) for ranks in works for work in ranks) / len(works)
    return float(load.max(axis=1).sum() / even), float(rows.max(axis=1).sum() / even), copies


def lines(arguments: argparse.Namespace) -> Iterator[str]:
    """The table."""
    setting = GpuSetting()
    yield "| case | hold | serve | blind | rows | copies | aware | rows | copies |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, files in RECORDINGS.items():
        routing = routing_of(name, [load_trace(arguments.traces / f"{file}.npz") for file in files])
        for model in arguments.model or MODELS:
            for num_ranks in arguments.ranks or RANKS:
                case = case_of(routing, model_named(model), num_ranks, setting)
                rates = rates_for(case.model, prices_named("h200"), num_nodes=case.cluster.num_nodes)
                free = dict.fromkeys(Stage, 0.0)
                blind = replace(rates, hold_us=free, serve_us=free)
                if arguments.free_traffic:
                    blind = replace(blind, cross_row_us=0.0)
                aware = priced(blind, case.model)
                parts = [effective(case, one, aware, setting) for one in (blind, aware)]
                figures = " | ".join(f"{a:.4f} | {b:.4f} | {c:.1f}" for a, b, c in parts)
                prices = f"{aware.hold_rows(Stage.UPDATE)} | {aware.serve_rows(Stage.UPDATE)}"
                yield f"| {case.name} | {prices} | {figures} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, help="folder with the recordings")
    parser.add_argument("--model", action="append", help="shape (may be repeated)")
    parser.add_argument("--ranks", type=int, action="append", help="ranks (may be repeated)")
    parser.add_argument("--free-traffic", action="store_true", help="traffic across nodes costs nothing")
    for line in lines(parser.parse_args()):
        print(line, flush=True)
