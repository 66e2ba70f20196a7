"""One training step of a contender, as in the loop of `equilibra train`, with the time of every stage.

Evaluation, checkpoints and reporting are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from benchmarks.runtime.clock import Stages
from benchmarks.train.contenders import Contender
from equilibra.core.plan import Stage
from equilibra.events.schema import Kind
from equilibra.execute.group import ExpertGroup
from equilibra.execute.state.published import logical_weights
from equilibra.execute.steps.step import measured_record
from equilibra.rl.algorithms import Algorithm
from equilibra.rl.engine import Sample
from equilibra.rl.learner import Batch, routing_of, total_over
from equilibra.rl.loop import MiniBatches, policy_columns, policy_loss_of
from equilibra.rl.rollout import Rollout


@dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """A rollout and its rewards."""

    grown: list[Sample]
    """answers before rewards"""
    samples: list[Sample]
    """with rewards to train on"""
    seconds: dict[str, float]
    """seconds of its stages"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """What a contender did with a rollout."""

    seconds: dict[str, float]
    """seconds of its stages on the slowest rank; plan has all of the balancer's `begin` but moving homes"""
    parts: dict[str, float]
    """seconds of the parts of plan and move: counts, planner, move, arm, send"""
    about: dict[str, float]
    """imbalance, copies and so on"""
    logprobs: list[NDArray[np.float64]]
    """recomputed, of own samples"""
    gradient_norm: float
    """mean over mini-batches"""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A step that was planned while rewards were computed, in seconds of the slowest rank."""

    prepare: float
    """counts"""
    reward: float
    """rewards, with the planner in the background"""
    begin: float
    """waiting for the plan, moving, arming"""
    reward_alone: float
    """rewards, with nothing in the background"""

    @property
    def exposed(self) -> float:
        """Seconds that planning and moving add to the rewards."""
        return self.prepare + self.reward + self.begin - self.reward_alone


@dataclass(frozen=True, kw_only=True, eq=False)
class Bench:
    """What contenders share on this rank."""

    rollout: Rollout
    """the engine and its task"""
    algorithm: Algorithm
    """targets and loss"""
    group: ExpertGroup
    """both ranks"""
    mini_batches: int
    """optimizer steps of a step"""
    seed: int
    """seed of rewards"""

    def answers(self, number: int) -> Answers:
        """Collective: the rollout of a step. Training rewards are random: the model has learnt nothing."""
        clock = Stages(self.group)
        with clock.stage("rollout"):
            grown = self.rollout.generate(self.rollout.begin(number), version=0)
        with clock.stage("reward"):
            samples = self.rollout.rewarded(grown)
        samples = [replace(sample, reward=self._reward(sample)) for sample in samples]
        return Answers(grown=grown, samples=samples, seconds=self.largest(clock.seconds))

    def _reward(self, sample: Sample) -> float:
        return float(np.random.default_rng([self.seed, 4, sample.group, sample.number]).random())

    def train(self, contender: Contender, answers: Answers) -> Trained:
        """Collective: plan, log-prob, advantages, update, weights to the engine."""
        learner, samples, clock = contender.learner, answers.samples, Stages(self.group)
        total, parts = total_over(self.group), MiniBatches.of(samples, self.mini_batches, epochs=1)
        experts = contender.experts(samples)
        with clock.stage("plan"):
            start = perf_counter()
            batch = learner.begin(samples, parts.of_sample, experts=experts)
            began = perf_counter() - start
        with clock.stage("logprob"):
            old = batch.logprobs()
        with clock.stage("advantages"):
            targets = self.algorithm.targets(samples, None, total)
            longest = self.rollout.setting.max_answer_tokens
            batch.give(policy_columns(samples, self.algorithm, targets, old, None, parts, total, longest))
        with clock.stage("update"):
            loss = partial(policy_loss_of, self.algorithm.loss)
            norms = [batch.update(mini_batch, loss)["gradient_norm"] for mini_batch in parts.order]
        with clock.stage("weights"):
            model = contender.model
            self.rollout.engine.load_weights(logical_weights(model.runtime, model.naming, model.dense()), version=0)
        events = self._events(batch)
        moved, seconds = _busiest(events, Kind.MIGRATION), self.largest(clock.seconds)
        spent = contender.spent
        of_begin = self.largest({
            "counts": spent.prepare, "planner": spent.planner, "move": moved,
            "arm": max(spent.begin - spent.prepare - spent.planner - moved, 0.0), "send": began - spent.begin,
        })  # fmt: skip
        return Trained(
            seconds={**seconds, "plan": seconds["plan"] - moved, "move": moved}, parts=of_begin,
            about=_about(batch, events), logprobs=old, gradient_norm=float(np.mean(norms)),
        )  # fmt: skip

    def _events(self, batch: Batch) -> NDArray[np.void]:
        """Collective: what all ranks recorded of a step."""
        mine = batch.step.runtime.recorder.taken()
        return np.concatenate(self.group.gather(mine, what="gathering events of the step"))

    def begun(self, contender: Contender, answers: Answers) -> dict[str, float]:
        """Collective: only begin a step; returns seconds of planning and moving, and how many homes moved."""
        samples, clock = answers.samples, Stages(self.group)
        experts = contender.experts(samples)
        parts = MiniBatches.of(samples, self.mini_batches, epochs=1)
        with clock.stage("seconds"):
            batch = contender.learner.begin(samples, parts.of_sample, experts=experts)
        return {
            **self.largest(clock.seconds), "move": _busiest(self._events(batch), Kind.MIGRATION),
            "moves": float(batch.step.plan.migration.num_moves),
        }  # fmt: skip

    def prepared(self, contender: Contender, answers: Answers) -> Prepared:
        """Collective: begin a step that was planned while rewards were computed, without training."""
        samples = answers.samples
        routing = routing_of(contender.experts(samples), contender.model.runtime.spec.num_experts)
        parts, clock = MiniBatches.of(samples, self.mini_batches, epochs=1), Stages(self.group)
        with clock.stage("reward_alone"):
            self.rollout.rewarded(answers.grown)
        with clock.stage("prepare"):
            contender.learner.balancer.prepare(routing, parts.of_sample)
        with clock.stage("reward"):
            self.rollout.rewarded(answers.grown)
        with clock.stage("begin"):
            contender.learner.balancer.begin()
        return Prepared(**self.largest(clock.seconds))

    def largest(self, values: dict[str, float]) -> dict[str, float]:
        """Collective: each value of the rank where it is largest."""
        said = self.group.gather(np.array([list(values.values())]), what="comparing times")
        return dict(zip(values, np.concatenate(said).max(axis=0).tolist(), strict=True))


def _busiest(events: NDArray[np.void], kind: Kind) -> float:
    """Seconds of a kind of event on the rank with most of it."""
    chosen = events[events["kind"] == kind]
    return float(np.bincount(chosen["rank"], chosen["end_us"] - chosen["start_us"], minlength=1).max()) * 1e-6


def _about(batch: Batch, events: NDArray[np.void]) -> dict[str, float]:
    """Statistics of the plan, and the exposed time from the recorder."""
    step = batch.step
    record = measured_record(
        step.plan, step.armed.load, events, memory={}, seconds=0.0, num_tokens=step.num_tokens
    )  # fmt: skip
    return {
        "static_imbalance": step.static_imbalance,
        "imbalance": step.planned_imbalance,
        "moves": float(step.plan.migration.num_moves),
        "flash_copies": float(sum(step.plan.stages[stage].num_copies for stage in Stage)),
        "micro_batches": float(step.plan.num_micro_batches),
        "tokens": float(step.num_tokens),
        "experts_s": _busiest(events, Kind.EXPERTS),
        "exposed_s": record.metrics["exposed_overhead_s"],
    }
