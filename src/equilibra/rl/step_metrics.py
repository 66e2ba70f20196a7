"""What is reported of a step. Sums over ranks are taken in the order of ranks: everybody reports the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from equilibra.events.run import PlannerRecord
from equilibra.rl.learner import Batch
from equilibra.rl.loss import Total
from equilibra.rl.mismatch import Mismatch
from equilibra.rl.sample import Sample
from equilibra.rl.updates import POLICY_SUMS

__all__ = ["step_metrics"]


def step_metrics(
    samples: Sequence[Sample], apart: Mismatch, sums: Sequence[Mapping[str, float]], batch: Batch,
    record: PlannerRecord | None, seconds: float, total: Total,
) -> dict[str, float]:  # fmt: skip
    """Collective: the numbers of a step. What was measured (`record`) is known on world rank 0 only."""
    answers = _of_answers(samples, total)
    return {
        **answers,
        **_of_losses(sums, total),
        **apart.metrics(),
        **_of_plan(batch, record, seconds),
        "tokens_per_s": answers["tokens"] / seconds,
    }


def _of_answers(samples: Sequence[Sample], total: Total) -> dict[str, float]:
    finished = [sample for sample in samples if sample.finished]
    own = [
        len(samples), len(finished), sum(sample.reward for sample in finished),
        sum(sample.num_rows for sample in samples), sum(sample.answer.size - sample.fresh for sample in samples),
    ]  # fmt: skip
    count, num_finished, reward, rows, fresh = total(np.array(own, np.float64)).tolist()
    return {
        "reward": reward / max(num_finished, 1.0), "finished": num_finished / max(count, 1.0), "tokens": rows,
        "answer_tokens": fresh / max(count, 1.0),
    }  # fmt: skip


def _of_losses(sums: Sequence[Mapping[str, float]], total: Total) -> dict[str, float]:
    """Means over the optimizer steps of this step. A rank whose group ran nothing of one has no sums of it."""
    names = [*POLICY_SUMS, *(name for name in ("value_loss",) if name in sums[0])]
    shares = total(np.array([[one.get(name, 0.0) for name in names] for one in sums], np.float64)).mean(axis=0)
    found = dict(zip(names, shares.tolist(), strict=True))
    weight = found.pop("weight")
    for name in ("policy", "kl", "divergence", "entropy", "clipped"):
        found[name] /= weight or 1.0
    norms = np.array([one["gradient_norm"] for one in sums])  # the same on all ranks
    taken = norms[np.isfinite(norms)]
    return {
        **found, "gradient_norm": float(taken.mean()) if taken.size else float("nan"),
        "skipped_steps": sum(one["skipped"] for one in sums),
    }  # fmt: skip


def _of_plan(batch: Batch, record: PlannerRecord | None, seconds: float) -> dict[str, float]:
    step = batch.step
    measured = {} if record is None else record.metrics
    return {
        "tokens_without_routing": float(step.tokens_without_routing),
        "imbalance_static": step.static_imbalance,
        "imbalance": step.planned_imbalance,
        "copies": measured.get("copies_per_layer", 0.0),
        "moves": float(step.plan.migration.num_moves),
        "exposed": measured.get("exposed_overhead_s", 0.0) / seconds,
    }
