"""The training loop on one screen, and below it what a step gives to the losses and reports.

    rollout -> reward -> log-prob (old log-probabilities) -> advantages -> update -> weights to the engine -> next plan

Log-prob and update replay the rollout's routing under one plan. `source` may be a recording instead of an engine.

For an update, columns [A, C] of numbers per answer token go from each sample's rank to the rank that runs it:

    policy    old log-probability, advantage, weight, reference log-probability
    value     old value, return, weight
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import InputError, NonFiniteError
from equilibra.events.run import PlannerRecord
from equilibra.rl.algorithms import Algorithm, Target
from equilibra.rl.engine import Sample
from equilibra.rl.learner import Batch, Learner, LossSums, Predictions, total_over
from equilibra.rl.loss import Divergence, LossSetting, Total, policy_loss, token_weights, value_loss
from equilibra.rl.mismatch import Mismatch, MismatchCheck, measure_mismatch
from equilibra.rl.observe import Clock, Observer
from equilibra.rl.rollout import Source

POLICY_SUMS = ("loss", "policy", "kl", "divergence", "entropy", "clipped", "weight")
"""statistics of the policy loss; a rank whose group ran nothing reports none"""

Numbers = Sequence[NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trainer:
    """The parts of a run on one rank, its length, and how often things happen."""

    steps: int
    """RL steps of the whole run"""
    mini_batches: int
    """optimizer steps per pass over a step's samples"""
    epochs: int
    """passes over a step's samples"""
    evaluate_every: int
    """steps between evaluations; 0: only before the first and after the last step"""
    checkpoint_every: int
    """steps between checkpoints; 0: only after the last step"""
    max_answer_tokens: int
    """longest answer, in tokens"""
    places: int = 0
    """answers that grow at the same time, window by window; 0: whole answers"""
    source: Source
    algorithm: Algorithm
    policy: Learner
    critic: Critic | None
    """None: the algorithm needs no values"""
    reference: Learner | None
    """the initial policy; None: the loss has no divergence from it"""
    check: MismatchCheck | None
    """compares the engine's weights; None: answers come from a recording"""
    save: Callable[[int], None]
    """collective: write a checkpoint; takes the number of finished steps"""
    keep_record: Callable[[int, PlannerRecord | None, Batch], None]
    """keeps the step's record for the report"""
    observer: Observer
    stop: Callable[[], bool]
    """collective: whether to stop after this step"""

    def version(self, done: int) -> int:
        """Version of the weights after `done` steps: the number of optimizer steps."""
        return done * self.mini_batches * self.epochs

    def evaluates(self, step: int) -> bool:
        return step == 0 or bool(self.evaluate_every and step % self.evaluate_every == 0)

    def saves(self, done: int) -> bool:
        return done == self.steps or bool(self.checkpoint_every and done % self.checkpoint_every == 0)


def train(trainer: Trainer, first_step: int) -> int:
    """Collective: train until the last step or until told to stop; returns the number of finished steps."""
    algorithm, source, critic = trainer.algorithm, trainer.source, trainer.critic
    total = total_over(trainer.policy.model.runtime.group)
    loss = partial(policy_loss_of, algorithm.loss)
    trainer.observer.stage("weights", step=first_step)
    source.new_weights(trainer.version(first_step))
    for step in range(first_step, trainer.steps):
        if trainer.evaluates(step):
            _evaluate(trainer, step)
        clock = Clock(trainer.observer, step)
        samples = source.samples(step, version=trainer.version(step), clock=clock)
        parts = MiniBatches.of(samples, trainer.mini_batches, trainer.epochs, places=trainer.places)
        with clock.stage("plan"):
            batch = trainer.policy.begin(samples, parts.of_sample)
        with clock.stage("logprob"):
            old = batch.logprobs()
            apart = measure_mismatch(samples, old, trainer.policy.model.runtime.group)
            if trainer.check is not None:
                trainer.check(apart, step=step, version=trainer.version(step))
            reference = trainer.reference.begin_live(samples).logprobs() if trainer.reference is not None else None
            values = critic.values(samples) if critic is not None else None
        with clock.stage("advantages"):
            targets = algorithm.targets(samples, values, total)
            longest = trainer.max_answer_tokens
            batch.give(policy_columns(samples, algorithm, targets, old, reference, parts, total, longest))
        with clock.stage("update"), _named(step):
            sums = [batch.update(mini_batch, loss) for mini_batch in parts.order]
            if critic is not None:
                sums = critic.update(samples, algorithm, targets, parts, total, sums)
        record = batch.step.record(seconds=clock.metrics()["seconds"])
        with clock.stage("weights"):
            source.new_weights(trainer.version(step + 1))
        metrics = step_metrics(samples, apart, sums, batch, record, clock.metrics()["seconds"], total)
        metrics["rewards_timed_out"] = float(total(np.array([source.take_unscored()], np.float64))[0])
        trainer.keep_record(step, record, batch)
        trainer.observer.step(step, {**metrics, **clock.metrics()})  # before the checkpoint: what is saved was reported
        stopping = trainer.stop()
        if stopping or trainer.saves(step + 1):
            trainer.observer.stage("checkpoint", step=step)
            trainer.save(step + 1)
        if stopping and step + 1 < trainer.steps:  # after the last step only the evaluation is left
            return step + 1
    _evaluate(trainer, trainer.steps)
    return trainer.steps


@contextmanager
def _named(step: int) -> Iterator[None]:
    """Add the step to the error of a gradient that is not finite."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"step {step + 1}: {error}") from error


def _evaluate(trainer: Trainer, step: int) -> None:
    trainer.observer.stage("evaluate", step=step)
    rewards = trainer.source.held_out()
    if rewards:
        trainer.observer.evaluated(step, rewards)


@dataclass(frozen=True, kw_only=True, eq=False)
class MiniBatches:
    """Which samples share an optimizer step: by group, whatever the plan and the number of ranks."""

    of_sample: NDArray[np.int64]
    """[S] mini-batch of each own sample"""
    number: int
    epochs: int
    """passes over all mini-batches"""

    @classmethod
    def of(cls, samples: Sequence[Sample], number: int, epochs: int, *, places: int = 0) -> MiniBatches:
        """Deal groups out in turn.

        places: answers that grow window by window. A place's groups are `places` apart, so places are dealt out
        instead: by group alone a mini-batch could be empty.
        """
        turns = [sample.group % places if places else sample.group for sample in samples]
        chosen = np.array(turns, np.int64) % number
        return cls(of_sample=chosen, number=number, epochs=epochs)

    @property
    def order(self) -> list[int]:
        return list(range(self.number)) * self.epochs


def _weights(
    masks: Sequence[NDArray[np.bool_]], parts: MiniBatches, setting: LossSetting, total: Total, max_length: int
) -> list[NDArray[np.float64]]:
    """[A] token weights of every sample within its mini-batch."""
    found: dict[int, NDArray[np.float64]] = {}
    for mini_batch in range(parts.number):
        chosen = np.flatnonzero(parts.of_sample == mini_batch).tolist()
        weights = token_weights([masks[i] for i in chosen], setting, total, max_length)
        found.update(zip(chosen, weights, strict=True))
    return [found[i] for i in range(len(masks))]


def policy_columns(
    samples: Sequence[Sample], algorithm: Algorithm, targets: Sequence[Target], old: Numbers, reference: Numbers | None,
    parts: MiniBatches, total: Total, max_length: int,
) -> list[NDArray[np.float64]]:  # fmt: skip
    """Collective: [A, 4] of every own sample."""
    masks = [algorithm.policy_mask(sample) for sample in samples]
    weights = _weights(masks, parts, algorithm.loss, total, max_length)
    if reference is None:
        if algorithm.loss.divergence is not Divergence.NONE:
            raise InputError(f"a loss with divergence {algorithm.loss.divergence} needs a reference policy")
        reference = old
    return [
        np.stack([old[i], targets[i].advantages, weights[i], reference[i]], axis=1) for i in range(len(samples))
    ]  # fmt: skip


def value_columns(
    samples: Sequence[Sample], algorithm: Algorithm, targets: Sequence[Target], values: Numbers, parts: MiniBatches,
    total: Total,
) -> list[NDArray[np.float64]]:  # fmt: skip
    """Collective: [A, 3] of every own sample."""
    masks = [algorithm.value_mask(sample) for sample in samples]
    weights = _weights(masks, parts, LossSetting(), total, 1)
    returns = [values[i] if target.returns is None else target.returns for i, target in enumerate(targets)]
    return [np.stack([values[i], returns[i], weights[i]], axis=1) for i in range(len(samples))]


def policy_loss_of(setting: LossSetting, predictions: Predictions, columns_NC: Tensor) -> LossSums:
    """The policy loss of a micro-batch, from its columns."""
    old, advantages, weights, reference = columns_NC.unbind(dim=1)
    part = policy_loss(
        predictions.logprobs, old, advantages, weights, predictions.sequence, setting,
        reference_T=None if setting.divergence is Divergence.NONE else reference, entropy_T=predictions.entropy,
    )  # fmt: skip
    return LossSums(loss=part.loss, sums={name: float(getattr(part, name).detach()) for name in POLICY_SUMS})


def value_loss_of(clip: float, predictions: Predictions, columns_NC: Tensor) -> LossSums:
    """The value loss of a micro-batch, from its columns."""
    old, returns, weights = columns_NC.unbind(dim=1)
    loss = value_loss(predictions.logprobs, old, returns, weights, clip)
    return LossSums(loss=loss, sums={"value_loss": float(loss.detach())})


class Critic:
    """A value model with its own experts, balancer and optimizer.

    The rollout knows nothing of its routing. So the pass that computes the values of a step is routed live and
    recorded; the update replays that routing, planned and balanced like the policy's.
    """

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self._values: list[NDArray[np.float64]] = []
        self._experts: list[NDArray[np.int32]] = []

    def values(self, samples: Sequence[Sample]) -> list[NDArray[np.float64]]:
        """Collective: values [A] of every own sample, forward only."""
        self._values, self._experts = self.learner.begin_live(samples).logprobs_and_experts()
        return self._values

    def update(
        self, samples: Sequence[Sample], algorithm: Algorithm, targets: Sequence[Target], parts: MiniBatches,
        total: Total, sums: Sequence[Mapping[str, float]],
    ) -> list[dict[str, float]]:  # fmt: skip
        """Collective: train towards the returns, after `values` of the same samples; extends the policy's sums."""
        batch = self.learner.begin(samples, parts.of_sample, experts=self._experts)
        batch.give(value_columns(samples, algorithm, targets, self._values, parts, total))
        loss = partial(value_loss_of, algorithm.value_clip)
        updates = [batch.update(mini_batch, loss) for mini_batch in parts.order]
        return [
            {**of_policy, "value_loss": own.get("value_loss", 0.0), "skipped": of_policy["skipped"] + own["skipped"]}
            for own, of_policy in zip(updates, sums, strict=True)
        ]


def step_metrics(
    samples: Sequence[Sample], apart: Mismatch, sums: Sequence[Mapping[str, float]], batch: Batch,
    record: PlannerRecord | None, seconds: float, total: Total,
) -> dict[str, float]:  # fmt: skip
    """Collective: the metrics of a step, equal on all ranks except for `record`, which only world rank 0 has."""
    answers = _of_answers(samples, total)
    return {
        **answers,
        **_of_losses(sums, total),
        "mismatch_mean": apart.mean,
        "mismatch_max": apart.largest,
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
    """Means over the optimizer steps; a rank whose group ran nothing of one reports no sums for it."""
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
