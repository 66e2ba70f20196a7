"""The value of foresight: replay, live, history and static placement on the same recorded routing, without timing.

python -m benchmarks.foresight RECORDING... [--output FOLDER]     # from the repository

A recording is cut into steps of micro-batches, in file order (neighbours are of one domain) or with its sequences
shuffled (as rollouts are mixed). Every mode executes the same steps:

    static    contiguous homes
    history   standing copies, per rank, and homes from the four steps before; a copy takes a fixed share of a source's
              tokens, as under `MegatronSetting(mode="history")`
    live      flash copies inside the node for each layer and micro-batch, from its own counts, on contiguous homes
    live+     the same, and standing copies between nodes: chosen from the four steps before, split by its own counts,
              as under `MegatronSetting(mode="live")` with `begin_from_past_steps()`
    replay    flash copies, standing copies and homes planned with the step known

Plans are made with all prices zero, so imbalance (slowest over mean rank of a layer in a micro-batch) is the lowest
that a mode reaches. Costs are not included: live exchanges counts and fetches copies while every layer waits. The first
steps, for which history has no data, are left out for all modes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import deque
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import EquilibraError, InputError
from equilibra.core.load import StepLoad, imbalance
from equilibra.core.placement import Cluster, Placement, contiguous
from equilibra.core.plan import StandingCopies
from equilibra.cost.rates import Rates
from equilibra.plan.history import rank_load_by_shares, shares_of
from equilibra.plan.one_layer import balance
from equilibra.plan.planner import StepProblem, planner_named
from equilibra.trace.open import load_trace
from equilibra.trace.routing import RoutingTrace

MODES = ("static", "history", "live", "live+", "replay")
CLUSTERS = ((1, 8), (2, 4), (4, 2))
"""nodes and ranks of each"""
TOKENS, MICRO_BATCHES, WINDOW = 512, 4, 4
"""tokens per rank and micro-batch, micro-batches per step, steps that history plans from"""
SPARE_SLOTS, STANDING_SLOTS = 2, 2


def steps_of(trace: RoutingTrace, num_ranks: int, *, shuffled: bool) -> list[StepLoad]:
    """The recording as steps; ranks and micro-batches take consecutive tokens."""
    order = np.arange(trace.num_sequences)
    if shuffled:
        np.random.default_rng(0).shuffle(order)
    pieces = np.split(trace.ids, trace.offsets[1:-1])
    ids_TLK = np.concatenate([pieces[s] for s in order])
    size = num_ranks * TOKENS
    per_step = min(MICRO_BATCHES, max(len(ids_TLK) // size // 2, 1))
    return [
        StepLoad(tokens_MLER=np.stack([
            _counts(ids_TLK[at : at + size], trace.num_experts, num_ranks)
            for at in range(first, first + per_step * size, size)
        ]))
        for first in range(0, len(ids_TLK) - per_step * size + 1, per_step * size)
    ]  # fmt: skip


def _counts(ids_TLK: NDArray[np.integer[Any]], num_experts: int, num_ranks: int) -> NDArray[np.int32]:
    """[L, E, R]"""
    by_rank = ids_TLK.reshape(num_ranks, -1, *ids_TLK.shape[1:])
    return np.stack([
        np.stack([np.bincount(by_rank[r, :, layer].ravel(), minlength=num_experts) for r in range(num_ranks)], axis=1)
        for layer in range(ids_TLK.shape[1])
    ]).astype(np.int32)  # fmt: skip


def _live(load: StepLoad, home: Placement, standing: StandingCopies) -> NDArray[np.int64]:
    """[L, M, R]"""
    rows_LMR = np.zeros((load.num_layers, load.num_micro_batches, load.num_ranks), np.int64)
    for layer, home_E in enumerate(home.home_of_expert):
        of_layer = standing.layer == layer
        for m in range(load.num_micro_batches):
            rows_LMR[layer, m] = balance(
                load.tokens_MLER[m, layer], home_of_expert=home_E, cluster=home.cluster, spare_slots=SPARE_SLOTS,
                standing_expert=standing.expert[of_layer], standing_rank=standing.rank[of_layer],
            ).rank_load  # fmt: skip
    return rows_LMR


def compare(steps: list[StepLoad], cluster: Cluster) -> dict[str, NDArray[np.float64]]:
    """Imbalance by mode, of every layer and micro-batch after the first steps."""
    planner, home = planner_named("equilibra"), contiguous(
        cluster, num_layers=steps[0].num_layers, num_experts=steps[0].num_experts
    )  # fmt: skip
    alone = Cluster(num_nodes=cluster.num_ranks, ranks_per_node=1)
    past_home: Placement = contiguous(alone, num_layers=steps[0].num_layers, num_experts=steps[0].num_experts)
    known_home, past = home, deque([steps[0]], maxlen=WINDOW)
    seen: dict[str, list[NDArray[np.int64]]] = {mode: [] for mode in MODES}
    for load in steps[1:]:
        seen["static"].append(planner_named("static").plan(_problem(load, home, 0, 0)).rank_load(load))
        window = StepLoad(tokens_MLER=np.concatenate([one.tokens_MLER for one in past]))
        plan = planner.plan(_problem(window, past_home, 0, STANDING_SLOTS))
        seen["history"].append(rank_load_by_shares(load, plan, shares_of(plan, window)))
        past_home = plan.placement
        seen["live"].append(_live(load, home, StandingCopies.none()))
        standing = StandingCopies.none()
        if cluster.num_nodes > 1:
            problem = replace(_problem(window, home, SPARE_SLOTS, STANDING_SLOTS), max_moves_per_layer=0)
            standing = planner.plan(problem).standing
        seen["live+"].append(_live(load, home, standing))
        plan = planner.plan(_problem(load, known_home, SPARE_SLOTS, STANDING_SLOTS))
        seen["replay"].append(plan.rank_load(load))
        known_home = plan.placement
        past.append(load)
    return {mode: np.concatenate([imbalance(rows).ravel() for rows in found]) for mode, found in seen.items()}


def _problem(load: StepLoad, home: Placement, spare_slots: int, standing_slots: int) -> StepProblem:
    return StepProblem(
        cluster=home.cluster, given_load=load, previous=home, rates=Rates.free(), spare_slots=spare_slots,
        standing_slots=standing_slots,
    )  # fmt: skip


def rows(path: Path) -> list[dict[str, Any]]:
    """Table rows of a recording."""
    trace, found = load_trace(path), []
    assert isinstance(trace, RoutingTrace)
    for nodes, per_node in CLUSTERS:
        for shuffled in (False, True):
            steps = steps_of(trace, nodes * per_node, shuffled=shuffled)
            if len(steps) < 2:
                continue
            compared = compare(steps, Cluster(num_nodes=nodes, ranks_per_node=per_node))
            found.append({
                "recording": path.stem, "nodes": nodes, "ranks_per_node": per_node, "steps": len(steps) - 1,
                "micro_batches_per_step": steps[0].num_micro_batches,
                "order": "shuffled" if shuffled else "as recorded",
                **{mode: {"mean": float(values.mean()), "p99": float(np.quantile(values, 0.99))}
                   for mode, values in compared.items()},
            })  # fmt: skip
    return found


def main() -> None:
    """Compute and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    asked = parser.parse_args()
    try:
        found = [row for path in asked.recordings for row in rows(path)]
        if not found:
            raise InputError("the recordings are too short: two steps of 4,096 tokens on 8 ranks are needed")
    except EquilibraError as error:
        parser.error(str(error))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {
        "command": "python -m benchmarks.foresight " + " ".join(path.name for path in asked.recordings),
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit.stdout.strip(), "tokens_per_rank": TOKENS,
        "spare_slots": SPARE_SLOTS, "standing_slots": STANDING_SLOTS,
    }  # fmt: skip
    (asked.output / "foresight.json").write_text(json.dumps({**about, "rows": found}, indent=1) + "\n")
    lines = [
        "# What foresight is worth", "",
        f"Measured {about['date']} at commit {about['commit']}, by counting rows, nothing timed:",
        f"`{about['command']}`, which also describes the modes.", "",
        f"{TOKENS} tokens per rank and micro-batch, {SPARE_SLOTS} spare slots per rank, {STANDING_SLOTS} standing",
        "copies per layer, on every rank under history and on every node under live+ and replay. Imbalance: mean /",
        "99th percentile over layers and micro-batches.", "",
        f"| recording | nodes x ranks | order | steps x micro-batches | {' | '.join(MODES)} |",
        "|---|---|---|---|" + "---|" * len(MODES),
        *(
            f"| {row['recording']} | {row['nodes']} x {row['ranks_per_node']} | {row['order']} | {row['steps']} x "
            f"{row['micro_batches_per_step']} | "
            + " | ".join(f"{row[mode]['mean']:.3f} / {row[mode]['p99']:.2f}" for mode in MODES) + " |"
            for row in found
        ),
    ]  # fmt: skip
    (asked.output / "foresight.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
