"""Rollout: the problems of a step, their share on each rank, and the samples that come back.

Answers depend on the seed and on the numbers of step, group and answer alone: not on the number of ranks, nor on where
a run was interrupted.

A batch of prompts x answers is filled in one of two ways:
  whole answers    step s asks problems s * prompts ... (s + 1) * prompts - 1, each `answers` times
  windows (T-PPO)  each of prompts x answers places keeps its answer until it is finished, window by window; its next
                   problem has a number larger by the number of places
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import InputError
from equilibra.execute.group import ExpertGroup
from equilibra.rl.engine import Engine, Generation, Request, Sample
from equilibra.rl.learner import total_over
from equilibra.rl.observe import Clock
from equilibra.rl.recording import ModelShape, load_rollout
from equilibra.rl.tasks import Problem, Task, TimedTask


class Words(Protocol):
    """Converts text to tokens and back."""

    @property
    def end(self) -> int:
        """The end-of-text token."""

    def prompt(self, text: str) -> NDArray[np.int64]:
        """Tokens of a prompt."""

    def read(self, tokens: NDArray[np.int64]) -> str:
        """Text of an answer."""


@dataclass(frozen=True, kw_only=True)
class RolloutSetting:
    """What a step generates."""

    seed: int
    prompts: int
    answers: int
    """answers per prompt"""
    max_prompt_tokens: int
    max_answer_tokens: int
    """longer answers are cut off"""
    reward_cut_off: bool = False
    """whether cut-off answers are scored; otherwise they get no reward"""
    temperature: float
    window: int = 0
    """tokens generated per step and answer; 0: whole answers"""


def share_of_rank(total: int, rank: int, world: int) -> range:
    """A rank's contiguous part of range(total), as even as possible."""
    return range(total * rank // world, total * (rank + 1) // world)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """One rank's part of every step's rollout."""

    engine: Engine
    task: Task
    words: Words
    setting: RolloutSetting
    rank: int
    world: int

    def begin(self, step: int) -> list[Sample]:
        """Whole answers: this rank's samples of a step, still empty. A group is on one rank."""
        setting = self.setting
        groups = [step * setting.prompts + p for p in share_of_rank(setting.prompts, self.rank, self.world)]
        return [
            Sample(problem=group, group=group, number=number, prompt=self._prompt(self.task.problem(group)))
            for group in groups
            for number in range(setting.answers)
        ]

    def places(self) -> list[Sample]:
        """Windows: the first, still empty samples of this rank's places."""
        return [self._begun(place) for place in share_of_rank(self.num_places, self.rank, self.world)]

    @property
    def num_places(self) -> int:
        """Answers that grow at the same time, on all ranks."""
        return self.setting.prompts * self.setting.answers

    def here(self, samples: Sequence[Sample]) -> list[Sample]:
        """Windows: the samples that belong to this rank's places, in the order of places."""
        mine = set(share_of_rank(self.num_places, self.rank, self.world))
        found = [sample for sample in samples if sample.group % self.num_places in mine]
        return sorted(found, key=lambda sample: sample.group % self.num_places)

    def succeed(self, samples: Sequence[Sample]) -> list[Sample]:
        """Windows: keep unfinished answers, replace finished ones by new problems."""
        return [
            self._begun(sample.group + self.num_places) if sample.finished else replace(sample, reward=0.0)
            for sample in samples
        ]

    def _begun(self, number: int) -> Sample:
        return Sample(problem=number, group=number, number=0, prompt=self._prompt(self.task.problem(number)))

    def generate(self, samples: Sequence[Sample], *, version: int) -> list[Sample]:
        """Continue all samples to their end, or for a window.

        version: of the weights handed over; the version that the engine reports takes precedence.
        """
        requests = [self._request(sample) for sample in samples]
        said = self.engine.generate(requests, temperature=self.setting.temperature)
        return [self._grown(sample, one, version) for sample, one in zip(samples, said, strict=True)]

    def _request(self, sample: Sample) -> Request:
        """The next tokens of a sample; the noise of a token does not depend on the windows."""
        setting, first = self.setting, sample.answer.size
        random = np.random.default_rng([setting.seed, 0, sample.group, sample.number])
        noise = random.random(setting.max_answer_tokens)
        return Request(tokens=sample.tokens, noise=noise[first : first + setting.window if setting.window else None])

    def _grown(self, sample: Sample, said: Generation, version: int) -> Sample:
        full = sample.answer.size + said.tokens.size >= self.setting.max_answer_tokens
        return sample.grown(
            answer=said.tokens, logprobs=said.logprobs, experts=said.experts,
            version=version if said.version is None else said.version, finished=said.ended or full,
        )  # fmt: skip

    def rewarded(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with the rewards of finished answers."""
        return [
            replace(sample, reward=self._reward(self.task.problem(sample.problem), sample.answer))
            if sample.finished else sample
            for sample in samples
        ]  # fmt: skip

    def _reward(self, problem: Problem, answer: NDArray[np.int64]) -> float:
        ended = answer.size > 0 and answer[-1] == self.words.end
        if not ended and not self.setting.reward_cut_off:
            return 0.0
        return self.task.reward(problem, self.words.read(answer))

    def _prompt(self, problem: Problem) -> NDArray[np.int64]:
        tokens = self.words.prompt(problem.prompt)
        if not 0 < tokens.size <= self.setting.max_prompt_tokens:
            raise InputError(
                f"the prompt of problem {problem.number} of {self.task.name} has {tokens.size} tokens, but "
                f"rollout.max_prompt_tokens is {self.setting.max_prompt_tokens}: raise it, or remove the problem"
            )
        return tokens

    def held_out(self, count: int, total: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> dict[str, float]:
        """Collective: mean rewards on held-out problems, sampled as in training and greedily."""
        rewards = [self._held_out(count, temperature) for temperature in (self.setting.temperature, 0.0)]
        drawn, likeliest, number = total(np.array([*(sum(part) for part in rewards), len(rewards[0])])).tolist()
        return {
            "reward_held_out": drawn / max(number, 1.0), "reward_held_out_greedy": likeliest / max(number, 1.0)
        }  # fmt: skip

    def _held_out(self, count: int, temperature: float) -> list[float]:
        """Rewards of own held-out problems; the noise is the same in every evaluation."""
        seed, size = self.setting.seed, self.setting.max_answer_tokens
        problems = [self.task.held_out(n) for n in share_of_rank(count, self.rank, self.world)]
        requests = [
            Request(tokens=self._prompt(one), noise=np.random.default_rng([seed, 1, one.number]).random(size))
            for one in problems
        ]
        said = self.engine.generate(requests, temperature=temperature)
        return [self._reward(problem, one.tokens) for problem, one in zip(problems, said, strict=True)]


class Source:
    """Where the samples of a run come from."""

    carried: list[Sample] | None = None
    """windows: this rank's answers before the next step; None: whole answers"""

    def samples(self, step: int, *, version: int, clock: Clock) -> list[Sample]:
        """Collective: this rank's samples of a step, with rewards."""
        raise NotImplementedError

    def new_weights(self, version: int) -> None:
        """Collective: hand over the policy's weights. version: optimizer steps so far."""

    def held_out(self) -> dict[str, float]:
        """Collective: mean rewards on held-out problems; empty without an engine."""
        return {}

    def take_unscored(self) -> int:
        """Own answers since the last call that got no reward because scoring timed out."""
        return 0

    def resume(self, carried: Sequence[Sample]) -> None:
        """Windows: continue unfinished answers, whichever ranks had them."""


class EngineSource(Source):
    """Samples from an engine."""

    def __init__(
        self, rollout: Rollout, group: ExpertGroup, weights: Callable[[], Iterable[tuple[str, Tensor]]], *,
        num_held_out: int, windowed: bool, record: Callable[[int, Sequence[Sample]], object] | None = None,
    ) -> None:  # fmt: skip
        """group: with a timeout long enough for rollouts. weights: the policy's, by published names.

        record: called with every step and its samples.
        """
        self.rollout, self.group, self.weights, self.record = rollout, group, weights, record
        self.num_held_out, self.carried = num_held_out, rollout.places() if windowed else None

    def samples(self, step: int, *, version: int, clock: Clock) -> list[Sample]:
        with clock.stage("rollout"):
            begun = self.rollout.begin(step) if self.carried is None else self.carried
            grown = self.rollout.generate(begun, version=version)
        with clock.stage("reward"):
            rewarded = self.rollout.rewarded(grown)
        self.group.barrier(what="waiting for the rollouts of all ranks")
        if self.carried is not None:
            self.carried = self.rollout.succeed(rewarded)
        if self.record is not None:
            self.record(step, rewarded)
        return rewarded

    def new_weights(self, version: int) -> None:
        self.rollout.engine.load_weights(self.weights(), version=version)

    def held_out(self) -> dict[str, float]:
        return self.rollout.held_out(self.num_held_out, total_over(self.group))

    def take_unscored(self) -> int:
        task = self.rollout.task
        return task.take_unscored() if isinstance(task, TimedTask) else 0

    def resume(self, carried: Sequence[Sample]) -> None:
        if self.carried is not None:
            self.carried = self.rollout.here(carried)


class RecordedSource(Source):
    """Samples from recorded rollouts, with their rewards; there is no engine."""

    def __init__(self, folder: Path, group: ExpertGroup, model: ModelShape) -> None:
        self.folder, self.group, self.model = folder, group, model

    def samples(self, step: int, *, version: int, clock: Clock) -> list[Sample]:  # noqa: ARG002 - answers have their own
        with clock.stage("rollout"):
            return load_rollout(
                self.folder, step, rank=self.group.world_rank, world_size=self.group.world_size, model=self.model
            )
