"""Deployments for MegaScale-Infer's setups, simulated; the search against brute force; search time by problem size.

    python -m benchmarks.deployment [--output DIR] [--quick]

The paper's ratios are measurements of its system against others on its clusters. Ours compare two deployments under one
set of laws, each the best of its kind, so they answer another question; the notes say where the two differ.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
from tests.references import deployments

from benchmarks.suite import Row, Setting, Suite, environment, plain, run_sections, write_results
from equilibra.core.errors import InputError
from equilibra.core.model import MoEModel, model_named
from equilibra.cost.decode import Context, context_of_lengths, lognormal_context
from equilibra.cost.presets import prices_named
from equilibra.plan.deployment.answer import answer
from equilibra.plan.deployment.question import Plan, Question, Side
from equilibra.plan.deployment.search import best_colocated, best_disaggregated, layouts

RESULTS = Path(__file__).parent / "results"
PAPER_LENGTHS = context_of_lengths([159.0], [571.0])
"""the paper's median prompt and answer"""
PAPER_LATENCY_MS = 150.0
PAPER_MODELS = {"mixtral-8x22b": 8, "dbrx": 8, "scaled-moe-317b": 16}
"""the models, with the GPUs of a colocated deployment that holds each"""


def question_of(
    model: str, attention: str, experts: str, *, context: Context, latency_ms: float, max_ranks: int = 64
) -> Question:
    """Throughput per cost where the hardware differs, else per GPU."""
    return Question(
        model=model_named(model), attention=Side.of(prices_named(attention)), experts=Side.of(prices_named(experts)),
        context=context, latency_us=latency_ms * 1e3, max_ranks=max_ranks,
        objective="gpu" if attention == experts else "cost",
    )  # fmt: skip


def sides(plan: Plan) -> str:
    """Nodes x tensor-parallel GPUs of attention + experts."""
    return (
        f"{plan.attention_nodes}x{plan.attention_tensor} {plan.hardware[0]} + "
        f"{plan.expert_nodes}x{plan.expert_tensor} {plan.hardware[1]}"
    )


def paper(_setting: Setting) -> list[Row]:
    """The paper's models on 64 Ampere-class GPUs, and on H20 with L40S."""
    rows = []
    for attention, experts in (("a800", "a800"), ("h20", "l40s"), ("h20", "h20")):
        for model, ranks in PAPER_MODELS.items():
            question = question_of(model, attention, experts, context=PAPER_LENGTHS, latency_ms=PAPER_LATENCY_MS)
            found = answer(question)
            ours, objective = found.disaggregated, question.objective
            alike = replace(question, experts=question.attention)
            group = best_colocated(replace(alike, max_ranks=ranks, overlap=False))
            rows.append({
                "model": model, "deployment": sides(ours), "m": ours.micro_batches, "batch": ours.batch,
                "t_a_us": ours.t_a_us, "t_e_us": ours.t_e_us, "t_c_us": ours.t_c_us,
                "latency_ms": ours.latency_us * 1e-3, "tokens_per_s_and_gpu": ours.tokens_per_s_and_rank,
                "per": objective, "over_best_colocated": found.ratio[objective], "verdict": found.verdict,
                "over_one_group": ours.value(objective) / group.value(objective), "group_gpus": group.ranks,
                "paper_over_trt_llm": _paper_ratio(attention, experts), "limit": found.bound["batch"],
                "search_s": found.search_s,
            })  # fmt: skip
    return rows


def _paper_ratio(attention: str, experts: str) -> str | None:
    return {("a800", "a800"): "up to 1.90 per GPU", ("h20", "l40s"): "up to 1.86 per cost"}.get((attention, experts))


def zones(setting: Setting) -> list[Row]:
    """Where disaggregation wins and loses, for models, devices and answer lengths of RL."""
    rows = []
    tail = lognormal_context(prompt=500, median=4000, sigma=0.8, limit=32_768)
    cases = [
        (model, attention, experts, context, latency)
        for model in ("qwen3-30b-a3b", "gpt-oss-120b", "qwen3-235b-a22b", "deepseek-v3", "scaled-moe-317b")
        for attention, experts in (("h200", "h200"), ("h20", "l40s"))
        for context in (Context(mean=1024), tail)
        for latency in (50.0, 150.0)
    ]
    for model, attention, experts, context, latency in cases[:: 10 if setting.quick else 1]:
        row: Row = {"model": model, "hardware": f"{attention} + {experts}", "context": context.mean,
                    "deviation": context.deviation, "latency_limit_ms": latency}  # fmt: skip
        try:
            found = answer(question_of(model, attention, experts, context=context, latency_ms=latency, max_ranks=128))
        except InputError as error:
            rows.append({**row, "verdict": str(error).split(":")[0]})
            continue
        ratio = found.ratio.get(found.question.objective)
        rows.append({
            **row, "deployment": sides(found.disaggregated), "m": found.disaggregated.micro_batches,
            "per": found.question.objective, "over_best_colocated": ratio, "verdict": found.verdict,
            "links_to_win": found.to_json()["links_to_win"], "pace": found.bound["pace"],
        })  # fmt: skip
    return rows


def exact(setting: Setting) -> list[Row]:
    """The search against brute force on small instances: every layout, every batch, a simulated pipeline."""
    rng, rows = np.random.default_rng(0), []
    for ranks in (4, 6, 8):
        worst, slow_s, fast_s, solved = 0.0, 0.0, 0.0, 0
        for _ in range(2 if setting.quick else 20):
            question = _small(rng, ranks)
            start = perf_counter()
            best = deployments.best(question, most_batch=60)
            slow_s += perf_counter() - start
            if best is None:
                continue
            start = perf_counter()
            plan = best_disaggregated(question)
            fast_s += perf_counter() - start
            solved += 1
            worst = max(worst, 1 - plan.value(question.objective) / best[0])
        rows.append({"max_gpus": ranks, "instances": solved, "worst_below_brute_force": worst, "reach": 0.02,
                     "brute_force_s": slow_s, "search_s": fast_s})  # fmt: skip
    return rows


def _small(rng: np.random.Generator, ranks: int) -> Question:
    """Devices with memory for a few dozen sequences, and rates at which any part can be the slowest."""
    model = MoEModel(
        name="small", num_layers=int(rng.integers(1, 5)), hidden=64, expert_ffn=48, num_experts=6, top_k=2, num_heads=4,
        cache_heads=2, cache_values=64, score_width=64, outer_parameters=30_000,
    )  # fmt: skip
    sides_of = []
    for _ in range(2):
        room = rng.uniform(0.4, 2) * model.num_layers * model.num_experts * model.expert_bytes + 200_000
        prices = prices_named("h200").scaled(
            compute=10 ** rng.uniform(-4, 0), memory=10 ** rng.uniform(-3, 0), name="some", memory_bytes=int(room),
            ranks_per_node=int(rng.choice([1, 2, 4])), nic_gb_per_s=10 ** rng.uniform(-1, 2),
        )  # fmt: skip
        sides_of.append(Side.of(prices, cost_per_hour=rng.uniform(0.5, 5)))
    longest = rng.uniform(10, 200)
    return Question(
        model=model, attention=sides_of[0], experts=sides_of[1], latency_us=rng.uniform(300, 5000), max_ranks=ranks,
        context=Context(mean=longest / 2, deviation=rng.uniform(0, 0.3) * longest, longest=longest),
        objective=str(rng.choice(["gpu", "cost"])),
    )  # fmt: skip


def growth(setting: Setting) -> list[Row]:
    """Time of the search as GPUs and experts grow."""
    rows = []
    for model in ("mixtral-8x22b", "qwen3-30b-a3b", "kimi-k2"):
        for ranks in (64, 128) if setting.quick else (64, 128, 256, 512, 1024, 2048):
            question = question_of(model, "h200", "h200", context=Context(mean=4096), latency_ms=50, max_ranks=ranks)
            took = []
            for _ in range(1 if setting.quick else 3):
                start = perf_counter()
                plan = best_disaggregated(question)
                took.append(perf_counter() - start)
            rows.append({
                "model": model, "max_gpus": ranks, "layouts": int(np.size(layouts(question).micro_batches)),
                "search_s": float(np.median(took)), "reach_s": 1.0, "gpus_used": plan.ranks,
                "tokens_per_s_and_gpu": plan.tokens_per_s_and_rank,
            })  # fmt: skip
    return rows


DEPLOYMENT = Suite(
    name="deployment",
    title="Disaggregated rollout: deployments, simulated",
    intro="Times and throughput are simulated by the decode laws of `equilibra rollout plan`; only `search_s` and "
    "`brute_force_s` are measured. `over_best_colocated`: tokens per GPU or per cost (`per`) over those of the best "
    "colocated deployment under the same laws, with any expert and tensor parallelism and two ideally overlapped "
    "micro-batches. Costs are relative to an L20 (the paper's list).",
    sections={"paper": paper, "zones": zones, "exact": exact, "growth": growth},
    titles={
        "paper": "MegaScale-Infer's models and devices: prompts of 571, answers of 159 tokens, 150 ms (simulated)",
        "zones": "Where disaggregation wins, at most 128 GPUs (simulated)",
        "exact": "The search against brute force",
        "growth": "Time of the search",
    },
    notes={
        "paper": "`over_one_group`: over colocated GPUs of one group (at most 8, or 16 for the 317B model) without "
        "overlap, which is closer to the paper's baseline. `paper_over_trt_llm`: the best ratio over its models that "
        "the paper measured, of its system over TensorRT-LLM (per cost: on H20), on its own clusters (8 nodes of 8 "
        "Ampere GPUs of 80 GB; H20 and L40S), with other kernels, schedulers and lengths than this simulation. The "
        "ratios differ for three reasons. The paper's baselines are one group without overlap; ours is the best of "
        "all groups up to 64 GPUs. Ours has equally good kernels and transfers on both sides; part of the paper's "
        "gain is its fused kernels and its transfer library, which no law includes. And its baselines are limited to "
        "batches that fit one group's memory, where expert weights crowd out caches: that part shows in "
        "`over_one_group`, most for the largest model.",
        "zones": "`links_to_win`: the multiple of the network's bandwidth that disaggregation would need to win; "
        "`free`: only with transfers that take no time; empty in a dead zone, where no network would change it. The "
        "tail: prompts of 500, answers lognormal with median 4,000 and sigma 0.8, at most 32,768, in a batch that is "
        "kept full.",
    },
)


def main() -> None:
    """Run every section and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true")
    parsed = parser.parse_args()
    about = {"command": "python -m benchmarks.deployment" + " --quick" * parsed.quick, "measured_on": environment()}
    setting = Setting(traces=None, quick=parsed.quick)
    sections = {
        name: {**about, "rows": plain(rows)}
        for name, rows in run_sections(
            DEPLOYMENT, setting, list(DEPLOYMENT.sections), lambda text: print(text, file=sys.stderr)
        )
    }
    write_results(DEPLOYMENT, {"sections": sections}, parsed.output)


if __name__ == "__main__":
    main()
