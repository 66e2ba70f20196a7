"""The answer to a question about a deployment: the best disaggregated one beside the best colocated one.

Where disaggregation loses, the answer says by how much, and whether a faster network would change that: both kinds are
searched again with links of 2, 4, 8 and 16 times the bandwidth, and without any transfer time. The field calls such
cases the dead zone (arXiv 2602.09721): ordinary networks, experts so small that each token's rows cost more to send
than to compute, or memory that one side holds twice.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

from equilibra.core.errors import InputError
from equilibra.plan.deployment.question import OBJECTIVES, Plan, Question, Side
from equilibra.plan.deployment.search import best_colocated, best_disaggregated, grown
from equilibra.plan.deployment.times import Conditions, conditions, iteration_us, timeline

LEVEL = 0.02
"""difference below which two deployments count as level"""
FASTER = (2.0, 4.0, 8.0, 16.0)
FREE_GB_PER_S = 1e9
SHOWN_LAYERS = 3
SIDES = ("attention", "experts", "links")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Both deployments and how they compare."""

    question: Question
    disaggregated: Plan
    colocated: tuple[Plan, ...]
    """the best one on each hardware that can serve, best first"""
    not_colocated: tuple[str, ...]
    """for each hardware that cannot, why"""
    links: float | None
    """in a dead zone, the least multiple of the network's bandwidth at which disaggregation wins; inf: only without
    transfer times; None: not asked, or never"""
    search_s: float
    """seconds that the search for the disaggregated deployment took"""

    @property
    def ratio(self) -> dict[str, float]:
        """Disaggregated over best colocated, by objective; objectives whose costs are unknown are left out."""
        found = {}
        for objective in OBJECTIVES:
            other = max((plan.value(objective) for plan in self.colocated), default=0.0)
            if other > 0 and self.disaggregated.value(objective) > 0:
                found[objective] = self.disaggregated.value(objective) / other
        return found

    @property
    def verdict(self) -> str:
        """wins, level, dead zone, or alone (nothing colocated serves)."""
        ratio = self.ratio.get(self.question.objective)
        if ratio is None:
            return "alone"
        return "level" if abs(ratio - 1) < LEVEL else "wins" if ratio > 1 else "dead zone"

    @property
    def sentence(self) -> str:
        """The verdict in a sentence."""
        ratio, per = self.ratio.get(self.question.objective), "GPU" if self.question.objective == "gpu" else "cost"
        if ratio is None:
            return "Only disaggregated: no colocated deployment serves this within latency, memory and ranks."
        best = self.colocated[0]
        if self.verdict == "level":
            return f"Level: disaggregated decodes {ratio:.2f}x the tokens per {per} of colocated {best.hardware[0]}."
        if self.verdict == "wins":
            return f"Disaggregated wins: {ratio:.2f}x the tokens per {per} of colocated {best.hardware[0]}."
        cure = (
            f"A network {self.links:g} times as fast would change that." if self.links not in (None, float("inf"))
            else "Only transfers that take no time would change that." if self.links is not None
            else "No network would change that."
        )  # fmt: skip
        return (
            f"Dead zone: colocated {best.hardware[0]} decodes {1 / ratio:.2f}x the tokens per {per} of disaggregated. "
            f"{cure}"
        )

    @property
    def conditions(self) -> Conditions:
        plan = self.disaggregated
        return conditions(plan.t_a_us, plan.t_e_us, plan.t_c_us, plan.micro_batches)

    @property
    def bound(self) -> dict[str, str]:
        """What sets the pace of the pipeline, and what stops the batch from growing."""
        plan = self.disaggregated
        trip = plan.t_a_us + plan.t_e_us + 2 * plan.t_c_us
        parts = {"attention": plan.t_a_us, "experts": plan.t_e_us, "transfers": plan.t_c_us}
        name = max(parts, key=lambda part: parts[part])
        pace = name if plan.micro_batches * parts[name] >= trip else "the round trip"
        return {"pace": pace, "batch": grown(self.question, plan)}

    def to_json(self) -> dict[str, Any]:
        question = self.question
        sides = {"attention": question.attention, "experts": question.experts}
        return {
            "model": question.model.name,
            "layers": question.model.num_layers,
            "hardware": {name: side.prices.name for name, side in sides.items()},
            "cost_per_hour": {name: side.cost_per_hour for name, side in sides.items()},
            "room_bytes": {name: side.room_bytes for name, side in sides.items()},
            "context": asdict(question.context),
            "latency_limit_ms": question.latency_us * 1e-3,
            "max_ranks": question.max_ranks,
            "imbalance": question.imbalance,
            "objective": question.objective,
            "law": question.attention.law.source,
            "kind": "simulated",
            "verdict": self.verdict,
            "sentence": self.sentence,
            "ratio": self.ratio,
            "links_to_win": None if self.links is None else "free" if self.links == float("inf") else self.links,
            "conditions": {**asdict(self.conditions), "all_hold": self.conditions.all_hold},
            "bound": self.bound,
            "disaggregated": self.disaggregated.to_json(),
            "colocated": [plan.to_json() for plan in self.colocated],
            "not_colocated": list(self.not_colocated),
            "search_s": self.search_s,
            "pipeline": _pipeline(question, self.disaggregated),
            **_of_answers(question, self.disaggregated),
        }


def answer(question: Question) -> Answer:
    """Search both kinds; InputError if no disaggregated deployment serves."""
    start = perf_counter()
    plan = best_disaggregated(question)
    took = perf_counter() - start
    colocated, reasons = _colocated(question)
    found = Answer(question=question, disaggregated=plan, colocated=colocated, not_colocated=reasons, links=None,
                   search_s=took)  # fmt: skip
    return replace(found, links=_links_to_win(question)) if found.verdict == "dead zone" else found


def _colocated(question: Question) -> tuple[tuple[Plan, ...], tuple[str, ...]]:
    """The best plan on each hardware, best first, and why others have none."""
    plans, reasons = [], []
    for side in [question.attention] if question.one_hardware else [question.attention, question.experts]:
        try:
            plans.append(best_colocated(replace(question, attention=side, experts=side)))
        except InputError as error:
            reasons.append(f"{side.prices.name}: {error}")
    return tuple(sorted(plans, key=lambda plan: -plan.value(question.objective))), tuple(reasons)


def _links_to_win(question: Question) -> float | None:
    for times in (*FASTER, float("inf")):
        faster = replace(
            question, attention=_faster(question.attention, times), experts=_faster(question.experts, times)
        )
        ours, (others, _) = best_disaggregated(faster), _colocated(faster)
        if not others or ours.value(question.objective) > others[0].value(question.objective) * (1 + LEVEL):
            return times
    return None


def _faster(side: Side, times: float) -> Side:
    if times == float("inf"):
        law = replace(side.law, transfer_us=0.0)
        return replace(side, law=law, prices=replace(side.prices, nic_gb_per_s=FREE_GB_PER_S))
    return replace(side, prices=replace(side.prices, nic_gb_per_s=side.prices.nic_gb_per_s * times))


def _pipeline(question: Question, plan: Plan) -> dict[str, Any]:
    """One iteration: its length, the idle share of each side, and its first layers played out."""
    layers, m, times = question.model.num_layers, plan.micro_batches, (plan.t_a_us, plan.t_e_us, plan.t_c_us)
    length = float(iteration_us(*times, layers=layers, micro_batches=m))
    shown = min(layers, SHOWN_LAYERS)
    return {
        "iteration_us": length,
        "idle": {name: 1 - m * layers * one / length for name, one in zip(SIDES, times, strict=True)},
        "layers_shown": shown,
        "busy": [list(busy) for busy in timeline(*times, layers=shown, micro_batches=m)],
    }


def _of_answers(question: Question, plan: Plan) -> dict[str, float]:
    """The rate in whole answers, where their lengths are known."""
    context = question.context
    if not context.mean_answer:
        return {}
    return {
        "answers_per_s": plan.tokens_per_s / context.mean_answer,
        "longest_answer_s": context.longest_answer * plan.latency_us * 1e-6,
    }
