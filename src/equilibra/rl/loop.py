"""The training loop, on one screen.

    rollout -> reward -> log-prob (old log-probabilities) -> advantages -> update -> weights to the engine -> next plan

Log-prob and update replay the rollout's routing under one plan. Debug modes cut the loop in half: `source` may be a
recording instead of an engine, and every rollout may be written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from equilibra.core.errors import NonFiniteError
from equilibra.events.run import PlannerRecord
from equilibra.execute.group import ExpertGroup
from equilibra.execute.steps.balancer import Balancer, BalancerSetting
from equilibra.execute.steps.gradients import clip_gradients
from equilibra.execute.steps.masters import float32_masters, masters_or_parameters
from equilibra.rl.algorithms.algorithm import Algorithm
from equilibra.rl.learner import Batch, Language, Learner, padded, total_over
from equilibra.rl.loss import Total
from equilibra.rl.mismatch import Mismatch, MismatchCheck, measure_mismatch
from equilibra.rl.observe import Clock, Observer
from equilibra.rl.rollout import Words, share_of_rank
from equilibra.rl.sample import Sample
from equilibra.rl.tasks.task import Task
from equilibra.rl.updates import POLICY_SUMS, Critic, MiniBatches, policy_columns, policy_loss_of

__all__ = ["LoopSetting", "Source", "Trainer", "WarmUpSetting", "step_metrics", "train", "warm_up"]

# Warm-up: supervised steps on right answers, so that a fresh model answers at all before it is rewarded.
#
# Tokens are routed live to the homes of their experts, without an auxiliary loss: the skew that grows is the model's
# own.


FIRST_PROBLEM = 1 << 24
"""numbers of the problems of warm-up are far from those of RL"""
RAMP = 20
"""steps in which the learning rate rises"""


@dataclass(frozen=True, kw_only=True)
class WarmUpSetting:
    """How long and how."""

    steps: int
    """supervised steps"""
    batch: int
    """problems of a step, over all ranks"""
    lr: float
    """learning rate"""
    smoothing: float = 0.0
    """share of the target that is spread over all tokens"""


def warm_up(
    model: Language, task: Task, words: Words, setting: WarmUpSetting, *, pad: int, device: torch.device,
    observer: Observer,
) -> None:  # fmt: skip
    """Collective: train on right answers. The same weights come out whatever the number of ranks, but for rounding."""
    assert isinstance(model, nn.Module)
    group = model.runtime.group
    masters = float32_masters(model)
    learning = masters_or_parameters(model, masters)
    optimizer = torch.optim.AdamW(learning, lr=setting.lr, betas=(0.9, 0.99), weight_decay=0.0)
    balancer = Balancer(
        model.runtime, BalancerSetting(tokens_per_rank=1, planner="static"), optimizer=optimizer, masters=masters
    )
    try:
        for step in range(setting.steps):
            observer.stage("warm-up", step=0, done=step, total=setting.steps)
            for options in optimizer.param_groups:
                options["lr"] = setting.lr * min(1.0, (step + 1) / RAMP)
            own = _own_problems(group, task, words, setting, step)
            loss = _loss(model, own, setting.smoothing, pad, device)
            loss.backward()  # type: ignore[no-untyped-call]
            balancer.finish_gradients(model)
            clip_gradients(model, model.runtime, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        balancer.close()


def _own_problems(
    group: ExpertGroup, task: Task, words: Words, setting: WarmUpSetting, step: int
) -> list[tuple[Tensor, int]]:
    first = FIRST_PROBLEM + step * setting.batch
    own = [task.problem(first + i) for i in share_of_rank(setting.batch, group.world_rank, group.world_size)]
    pairs = [(words.prompt(problem.prompt), words.answer(problem.answer)) for problem in own]
    return [(torch.cat([torch.from_numpy(q), torch.from_numpy(a)]), len(q)) for q, a in pairs]


def _loss(
    model: Language, sequences: Sequence[tuple[Tensor, int]], smoothing: float, pad: int, device: torch.device
) -> Tensor:
    """Collective: this rank's share of the mean over all answer tokens."""
    inputs = padded(sequences, pad, device)
    count = total_over(model.runtime.group)(torch.tensor([len(inputs.targets)]).double().numpy())
    hidden = model.hidden(inputs.tokens_BT, inputs.mask_BT).flatten(0, 1)[inputs.predicting]
    logs = model.head(hidden).log_softmax(dim=-1)
    right, any_token = logs.gather(1, inputs.targets[:, None]).sum(), logs.mean(dim=-1).sum()
    return -((1 - smoothing) * right + smoothing * any_token) / float(count[0])


# What is reported of a step. Sums over ranks are taken in the order of ranks: everybody reports the same.


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


class Source(Protocol):
    """Where samples come from: an engine, or a recording."""

    def samples(self, step: int, *, version: int, clock: Clock) -> list[Sample]:
        """Collective: own samples of a step, rewarded."""

    def new_weights(self, version: int) -> None:
        """Collective: the policy has changed; version: the number of optimizer steps before."""

    def held_out(self) -> dict[str, float]:
        """Collective: mean rewards on held-out problems; empty where nothing can be asked."""

    def take_unscored(self) -> int:
        """Own answers since the last call that got no reward because scoring them did not end in time."""


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
    """steps between evaluations; also before the first and after the last step"""
    checkpoint_every: int
    """steps between checkpoints, 0: only after the last step"""
    max_answer_tokens: int
    """longest answer"""
    places: int = 0
    """answers that grow at the same time, window by window; 0: answers are whole"""

    def version(self, done: int) -> int:
        """Of the weights after so many steps: optimizer steps before."""
        return done * self.mini_batches * self.epochs

    def evaluates(self, step: int) -> bool:
        """Whether held-out problems are asked before this step."""
        return step == 0 or bool(self.evaluate_every and step % self.evaluate_every == 0)

    def saves(self, done: int) -> bool:
        """Whether a checkpoint is written after so many steps."""
        return done == self.steps or bool(self.checkpoint_every and done % self.checkpoint_every == 0)


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
    critic: Critic | None
    """learns values, where the algorithm needs them"""
    reference: Learner | None
    """the policy at the beginning, where the loss has a divergence from it"""
    check: MismatchCheck | None
    """of the engine's weights; None: answers come from a recording"""
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
    setting, algorithm, source, critic = trainer.setting, trainer.algorithm, trainer.source, trainer.critic
    total = total_over(trainer.policy.model.runtime.group)
    loss = partial(policy_loss_of, algorithm.loss)
    for step in range(first_step, setting.steps):
        if setting.evaluates(step):
            _evaluate(trainer, step)
        clock = Clock(trainer.observer, step)
        samples = source.samples(step, version=setting.version(step), clock=clock)
        parts = MiniBatches.of(samples, setting.mini_batches, setting.epochs, places=setting.places)
        with clock.stage("plan"):
            batch = trainer.policy.begin(samples, parts.of_sample)
        with clock.stage("logprob"):
            old = batch.logprobs()
            apart = measure_mismatch(samples, old, trainer.policy.model.runtime.group)
            if trainer.check is not None:
                trainer.check(apart, step=step, version=setting.version(step))
            reference = trainer.reference.begin_live(samples).logprobs() if trainer.reference is not None else None
            values = critic.values(samples) if critic is not None else None
        with clock.stage("advantages"):
            targets = algorithm.targets(samples, values, total)
            batch.give(
                policy_columns(samples, algorithm, targets, old, reference, parts, total, setting.max_answer_tokens)
            )
        with clock.stage("update"), _named(step):
            sums = [batch.update(mini_batch, loss) for mini_batch in parts.order]
            if critic is not None:
                sums = critic.update(samples, algorithm, targets, parts, total, sums)
        record = batch.step.record(seconds=clock.metrics()["seconds"])
        with clock.stage("weights"):
            source.new_weights(setting.version(step + 1))
        metrics = step_metrics(samples, apart, sums, batch, record, clock.metrics()["seconds"], total)
        metrics["rewards_timed_out"] = float(total(np.array([source.take_unscored()], np.float64))[0])
        trainer.keep_record(step, record, batch)
        trainer.observer.step(step, {**metrics, **clock.metrics()})  # before the checkpoint: what is saved was reported
        stopping = trainer.stop()
        if stopping or setting.saves(step + 1):
            trainer.observer.stage("checkpoint", step=step)
            trainer.save(step + 1)
        if stopping and step + 1 < setting.steps:  # after the last step there is only the evaluation left
            return step + 1
    _evaluate(trainer, setting.steps)
    return setting.steps


@contextmanager
def _named(step: int) -> Iterator[None]:
    """Say in which step a gradient was not finite."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"step {step + 1}: {error}") from error


def _evaluate(trainer: Trainer, step: int) -> None:
    trainer.observer.stage("evaluate", step=step)
    rewards = trainer.source.held_out()
    if rewards:
        trainer.observer.evaluated(step, rewards)
