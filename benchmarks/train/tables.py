"""The training bench as tables."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.suite import Row, Suite
from benchmarks.train.setting import EQUILIBRA, MOVES, NAMES, STAGES, STATIC

REACH = 0.02
"""limit of the share of a step for planning and moving"""
SHARES = {
    "static_imbalance": "imbalance without balancing",
    "imbalance": "imbalance with it",
    "planning_and_moving_share": "planning and moving, of the step",
    "from_contiguous_share": "the same, from contiguous homes",
    "prepared_share": "the same, planned while rewards are computed",
    "exposed_share": "waiting for copies and moves (recorder), of the step",
}
BEGIN = {
    "counts": "checking and gathering counts",
    "planner": "the planner",
    "move": "moving homes",
    "arm": "agreeing, routing to its ranks, arming",
    "send": "tokens to their ranks",
    "from_contiguous_seconds": "from contiguous homes: all of it",
    "from_contiguous_move": "from contiguous homes: moving",
    "prepared_prepare": "prepared: counts",
    "prepared_begin": "prepared: waiting for the plan, moving, arming",
    "prepared_exposed": "prepared: all that the step is longer by",
}


def section_rows(figures: dict[str, Any], found: dict[str, Any], *, skew: float) -> dict[str, list[Row]]:
    """Rows of all tables."""
    return {
        "figures": _figures(figures, skew),
        "stages": [_stages(name, figures, found) for name in NAMES],
        "begin": _begin(figures),
    }


def _figures(figures: dict[str, Any], skew: float) -> list[Row]:
    rows: list[Row] = []
    sides = ((EQUILIBRA, figures), (MOVES, figures["moves_only"]))
    for name, text in (("speedup_over_static", "speedup over static"), ("share_of_balanced", "share of balanced")):
        for part, of in (("step", "whole step"), ("logprob_and_update", "log-prob and update")):
            cells = [_cells(title, side[name][part]) for title, side in sides]
            rows.append({"figure": f"{text}, {of}", **cells[0], **cells[1], "reach": None})
    for name, text in SHARES.items():
        extra = f" (--skew {skew:g})" if name == "static_imbalance" else ""
        cells = [_cells(title, side[name]) for title, side in sides]
        reach = REACH if name == "planning_and_moving_share" else None
        rows.append({"figure": text + extra, **cells[0], **cells[1], "reach": reach})
    others = _cells(EQUILIBRA, figures["others_share"])
    return [*rows, {"figure": "other programs, of the core where they had most", **others, "reach": None}]


def _stages(name: str, figures: dict[str, Any], found: dict[str, Any]) -> Row:
    steps = [repeat["contenders"][name] for repeat in found["repeats"]]
    seconds = figures["step_seconds"][name]
    shares = figures["shares"][name]

    def middle(what: str) -> float:
        return float(median(step[what] for step in steps))

    return {
        "contender": name, "step_s": seconds["median"], "step_s_spread": _range(seconds),
        "tokens_per_s": round(middle("tokens") / seconds["median"]),
        **{stage: _percent(shares[stage]) for stage in STAGES},
        "imbalance": middle("imbalance"), "micro_batches": middle("micro_batches"),
        "experts_s": middle("experts_s"), "flash_copies": middle("flash_copies"),
        "moves": middle("moves"), "moves_at_first": found["first_round"]["contenders"][name]["moves"],
    }  # fmt: skip


def _begin(figures: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for part, text in BEGIN.items():
        row: Row = {"part": text}
        for name in (STATIC, EQUILIBRA, MOVES):
            spread = figures["begin_seconds"][name].get(part)
            if spread is not None:
                row |= {f"{name}_ms": spread["median"] * 1e3, f"{name}_ms_spread": _range(spread, 1e3, 1)}
        rows.append(row)
    return rows


def _cells(title: str, spread: dict[str, Any]) -> Row:
    return {title: spread["median"], f"{title}_spread": _range(spread)}


def _range(spread: dict[str, Any], times: float = 1.0, digits: int = 3) -> str:
    return f"{spread['low'] * times:.{digits}f} to {spread['high'] * times:.{digits}f}"


def _percent(spread: dict[str, Any]) -> str:
    return f"{spread['median']:.1%}"


TITLES = {
    "figures": "Whole training steps on two ranks of one core each (measured)",
    "stages": "Where the time of a step goes (measured)",
    "begin": "What comes before log-prob (measured)",
}
NOTES = {
    "figures": "A step: rollout (embedded engine, routing captured), reward, plan, move, log-prob, advantages (GRPO), "
    "update (several optimizer steps of several micro-batches), weights to the engine; float32. Every repeat has one "
    "rollout, on which the contenders train in turn, each time in another order. Figures are medians over repeats of "
    "ratios within a repeat; spreads are the least and the largest. `equilibra`: flash copies; inside a node homes "
    "stay. `equilibra-moves`: no slots for copies, so homes move. `balanced`: the same tokens with routing that gives "
    "each token as many experts on each rank; its samples stay on their ranks, so balancing, which also packs "
    "samples, can be faster. The model is a Qwen3-MoE from a seed. Its routing is skewed by hand: all embeddings "
    "share a direction, and along it router rows are shifted up for the experts of one rank and down for those of the "
    "other, by --skew times a half-normal number times the scores' own spread; the favoured rank alternates over "
    "layers. Rewards are computed and then replaced by random numbers, so that gradients are not zero. The learning "
    "rate is 0, so that all repeats do the same work; homes, which stay from step to step, therefore move less than "
    "if routing drifted. `from contiguous homes` is the other extreme: every possible home moves. The planner's "
    "prices are measured here; they are not a GPU's.",
    "stages": "Shares of the step. `plan`: gathering counts, planning, sending routing and tokens, arming. "
    "`experts_s`: seconds of expert compute, on the rank with most. `flash_copies`: of both stages of a step. "
    "`moves`: homes moved before a step; `moves_at_first`: before the first.",
    "begin": "Milliseconds on the slowest rank. Static also gathers, arms and sends. `prepared`: counts are gathered "
    "after the rollout, and the planner runs in the background while rewards are computed; with one core per rank it "
    "takes that core from the rewards, which is counted.",
}
TRAIN = Suite(
    name="train",
    title="Training bench",
    intro="`reach` is the requirement; empty ones have none.",
    sections=dict.fromkeys(TITLES, lambda _setting: []),  # all tables are of one run: see `figures.measured`
    titles=TITLES,
    notes=NOTES,
)
