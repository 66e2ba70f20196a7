"""The training loop, on one screen.

    rollout -> reward -> recompute old log-probabilities -> advantages -> update -> weights to the engine -> next plan

Recompute and update replay the rollout's routing under one plan. Debug modes cut the loop in half: `source` may be a
recording instead of an engine, and every rollout may be written down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from equilibra.measure.run import PlannerRecord
from equilibra.rl.algorithms.algorithm import Algorithm
from equilibra.rl.clock import Clock
from equilibra.rl.learner import Batch, Learner, total_over
from equilibra.rl.loss import Total
from equilibra.rl.observe import Observer
from equilibra.rl.sample import Sample
from equilibra.rl.updates import mini_batches_of, policy_columns, policy_loss_of, value_columns, value_loss_of

__all__ = ["LoopSetting", "Source", "Trainer", "train"]


class Source(Protocol):
    """Where samples come from: an engine, or a recording."""

    def samples(self, step: int, *, version: int, clock: Clock) -> list[Sample]:
        """Collective: this rank's samples of a step, rewarded."""
        ...

    def new_weights(self) -> None:
        """Collective: the policy has changed."""
        ...

    def held_out(self) -> float | None:
        """Collective: mean reward on held-out problems; None where nothing can be asked."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoopSetting:
    """How long and how often."""

    steps: int
    """to train until"""
    mini_batches: int
    """optimizer steps over the samples of a step"""
    epochs: int
    """times that all samples are gone through"""
    evaluate_every: int
    """steps between evaluations; also before the first and after the last; 0: never"""
    checkpoint_every: int
    """steps between checkpoints; also after the last"""
    max_answer_tokens: int
    """longest answer"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trainer:
    """Everything a run holds on one rank."""

    setting: LoopSetting
    """how long"""
    source: Source
    """samples"""
    algorithm: Algorithm
    """targets and losses"""
    policy: Learner
    """learns to answer"""
    critic: Learner | None
    """learns values, where the algorithm needs them"""
    reference: Learner | None
    """the policy at the beginning, where the loss has a divergence from it"""
    save: Callable[[int], None]
    """collective: write a checkpoint; the number of steps that are done"""
    keep_record: Callable[[int, PlannerRecord | None, Batch], None]
    """what happened in a step, for the report"""
    observer: Observer
    """told everything"""
    stop: Callable[[], bool]
    """collective: whether to end after this step"""


def train(trainer: Trainer, first_step: int) -> int:
    """Collective: train until the last step or until told to stop; returns the number of steps that are done."""
    setting, policy = trainer.setting, trainer.policy
    total = total_over(policy.model.runtime.group)
    every = setting.evaluate_every
    for step in range(first_step, setting.steps):
        clock = Clock(trainer.observer, step)
        if every and step % every == 0:
            _evaluate(trainer, step)
        samples = trainer.source.samples(step, version=step * setting.mini_batches * setting.epochs, clock=clock)
        mini_batches = mini_batches_of(samples, setting.mini_batches)
        with clock.stage("plan"):
            batch = policy.begin(samples, mini_batches)
        with clock.stage("recompute"):
            old = batch.logprobs()
            reference = trainer.reference.begin_live(samples).logprobs() if trainer.reference else None
            values, routing = _values(trainer.critic, samples)
        with clock.stage("advantages"):
            targets = trainer.algorithm.targets(samples, values, total)
            batch.give(policy_columns(
                samples, trainer.algorithm, targets, old, reference, mini_batches, setting.mini_batches, total,
                setting.max_answer_tokens,
            ))  # fmt: skip
        with clock.stage("update"):
            loss = partial(policy_loss_of, trainer.algorithm.loss)
            sums = [
                batch.update(mini_batch, loss) for _ in range(setting.epochs) for mini_batch in range(setting.mini_batches)
            ]
            if trainer.critic is not None and values is not None:
                again = trainer.critic.begin(samples, mini_batches, experts=routing)
                again.give(value_columns(
                    samples, trainer.algorithm, targets, values, mini_batches, setting.mini_batches, total
                ))  # fmt: skip
                value_loss = partial(value_loss_of, trainer.algorithm.value_clip)
                of_values = [again.update(m, value_loss) for _ in range(setting.epochs) for m in range(setting.mini_batches)]
                sums = [{**a, "value_loss": b["value_loss"]} for a, b in zip(sums, of_values, strict=True)]
        record = batch.step.record(seconds=clock.metrics()["seconds"])
        with clock.stage("weights"):
            trainer.source.new_weights()
        stopping = trainer.stop()
        last = stopping or step + 1 == setting.steps
        metrics = _metrics(samples, old, sums, batch, record, clock, total)
        if last or (step + 1) % setting.checkpoint_every == 0:
            with clock.stage("checkpoint"):
                trainer.save(step + 1)
        trainer.keep_record(step, record, batch)
        trainer.observer.step(step, {**metrics, **clock.metrics()})
        if stopping:
            return step + 1
    if every and first_step < setting.steps:
        _evaluate(trainer, setting.steps)
    return max(setting.steps, first_step)


def _evaluate(trainer: Trainer, step: int) -> None:
    trainer.observer.stage("evaluate", step=step)
    reward = trainer.source.held_out()
    if reward is not None:
        trainer.observer.evaluated(step, {"reward_held_out": reward})


def _values(
    critic: Learner | None, samples: Sequence[Sample]
) -> tuple[list[NDArray[np.float64]] | None, list[NDArray[np.int32]] | None]:
    """Values of own samples, and the experts they went to: the update replays them, balanced."""
    return (None, None) if critic is None else critic.begin_live(samples).logprobs_and_experts()


def _metrics(
    samples: Sequence[Sample], old: Sequence[NDArray[np.float64]], sums: Sequence[Mapping[str, float]], batch: Batch,
    record: PlannerRecord | None, clock: Clock, total: Total,
) -> dict[str, float]:  # fmt: skip
    """Collective: what is reported of a step, the same on all ranks but for what world rank 0 measured."""
    finished = [sample for sample in samples if sample.finished]
    apart = [
        np.abs(numbers - sample.logprobs)[sample.fresh :] for sample, numbers in zip(samples, old, strict=True)
    ]  # fmt: skip
    own = [
        float(len(samples)), float(len(finished)), sum(sample.reward for sample in finished),
        sum(sample.num_rows for sample in samples), sum(sample.answer.size - sample.fresh for sample in samples),
        sum(float(part.sum()) for part in apart),
    ]  # fmt: skip
    count, num_finished, reward, rows, fresh, difference = total(np.array(own)).tolist()
    group = batch.learner.model.runtime.group
    largest = group.gather(np.array([max((float(part.max(initial=0.0)) for part in apart), default=0.0)]), what="mismatch")
    names = [name for name in sums[0] if name != "gradient_norm"]
    shares = total(np.array([[one[name] for name in names] for one in sums])).mean(axis=0)
    found = dict(zip(names, shares.tolist(), strict=True))
    weight = found.pop("weight")
    for name in ("policy", "kl", "divergence", "entropy", "clipped"):
        found[name] /= weight or 1.0
    seconds = clock.metrics()["seconds"]
    return {
        "reward": reward / max(num_finished, 1.0), **found,
        "gradient_norm": float(np.mean([one["gradient_norm"] for one in sums])),
        "tokens": rows, "tokens_per_s": rows / seconds, "answer_tokens": fresh / max(count, 1.0),
        "finished": num_finished / max(count, 1.0), "mismatch_mean": difference / max(fresh, 1.0),
        "mismatch_max": float(np.concatenate(largest).max()),
        "tokens_without_routing": float(batch.step.tokens_without_routing),
        "imbalance_static": batch.step.static_imbalance, "imbalance": batch.step.planned_imbalance,
        "copies": 0.0 if record is None else record.metrics["copies_per_layer"],
        "moves": float(batch.step.plan.migration.num_moves),
        "exposed": 0.0 if record is None else record.metrics["exposed_overhead_s"] / seconds,
    }  # fmt: skip
