"""Rollout: which problems a step asks, who asks them, and what came back.

Everything depends on the seed and on numbers of steps, groups and answers alone. So the same answers come whatever the
number of ranks is and wherever a run was interrupted.

Two ways of filling a batch of prompts x answers:
  whole answers    step s asks problems s * prompts ... (s + 1) * prompts - 1, each `answers` times
  windows (T-PPO)  there are prompts x answers places; a place keeps its answer until it is finished, window by window,
                   and then goes on to the problem that is as many numbers further as there are places
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import InputError
from equilibra.execute.group import ExpertGroup
from equilibra.rl.engine import Engine, Generation, Request
from equilibra.rl.learner import total_over
from equilibra.rl.observe import Clock
from equilibra.rl.recording import ModelShape, load_rollout, save_rollout
from equilibra.rl.sample import Sample
from equilibra.rl.tasks.task import Problem, Task
from equilibra.rl.tasks.timed import TimedTask

__all__ = ["EngineSource", "RecordedSource", "Recording", "Rollout", "RolloutSetting", "Words", "share_of_rank"]

# Where samples come from: an engine that answers now, or a recording of what one answered.


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A folder that every rollout is written to."""

    folder: Path
    """made if it is not there"""
    model: ModelShape
    """that answers"""
    about: Mapping[str, object]
    """task and seed, for people"""


class EngineSource:
    """Asks the engine; unfinished answers are carried from window to window."""

    def __init__(
        self, rollout: Rollout, group: ExpertGroup, weights: Callable[[], Iterable[tuple[str, Tensor]]], *,
        num_held_out: int, windowed: bool, record: Recording | None = None,
    ) -> None:  # fmt: skip
        """Hold an engine.

        group: the ranks, with the patience that rollouts and engines need. weights: the policy's, by published names.
        record: where every rollout is written down.
        """
        self.rollout, self.group, self.weights, self.record = rollout, group, weights, record
        self.num_held_out, self.windowed = num_held_out, windowed
        self.carried: list[Sample] = rollout.places() if windowed else []
        """windows: what this rank's places hold before the next step"""

    def samples(self, step: int, *, version: int, clock: Clock) -> list[Sample]:
        """Collective in the sense that every rank does its part."""
        with clock.stage("rollout"):
            begun = self.carried if self.windowed else self.rollout.begin(step)
            grown = self.rollout.generate(begun, version=version)
        with clock.stage("reward"):
            rewarded = self.rollout.rewarded(grown)
        self.group.barrier(what="waiting for the rollouts of all ranks")
        if self.windowed:
            self.carried = self.rollout.succeed(rewarded)
        if self.record is not None:
            save_rollout(
                self.record.folder, step, rewarded, rank=self.group.world_rank, world_size=self.group.world_size,
                model=self.record.model, about=self.record.about,
            )  # fmt: skip
        return rewarded

    def new_weights(self, version: int) -> None:
        """Collective: the engine takes the policy's weights."""
        self.rollout.engine.load_weights(self.weights(), version=version)

    def held_out(self) -> dict[str, float]:
        """Collective: mean rewards on held-out problems."""
        return self.rollout.held_out(self.num_held_out, total_over(self.group))

    def take_unscored(self) -> int:
        """Own answers since the last call that got no reward because scoring them did not end in time."""
        task = self.rollout.task
        return task.take_unscored() if isinstance(task, TimedTask) else 0

    def resume(self, carried: Sequence[Sample]) -> None:
        """Go on with answers that any ranks had under way."""
        self.carried = self.rollout.here(carried)


class RecordedSource:
    """Reads what a rollout wrote down; nobody is asked anything."""

    def __init__(self, folder: Path, group: ExpertGroup, model: ModelShape) -> None:
        self.folder, self.group, self.model = folder, group, model

    def samples(self, step: int, *, version: int, clock: Clock) -> list[Sample]:  # noqa: ARG002 - answers have their own
        """Own part of a step."""
        with clock.stage("rollout"):
            return load_rollout(
                self.folder, step, rank=self.group.world_rank, world_size=self.group.world_size, model=self.model
            )

    def new_weights(self, version: int) -> None:
        """Nobody takes them."""

    def held_out(self) -> dict[str, float]:
        """Nobody can be asked."""
        return {}

    def take_unscored(self) -> int:
        """Rewards are recorded, too."""
        return 0


class Words(Protocol):
    """From words to tokens and back."""

    @property
    def end(self) -> int:
        """Token that ends an answer."""

    def prompt(self, text: str) -> NDArray[np.int64]:
        """Tokens of a question."""

    def answer(self, text: str) -> NDArray[np.int64]:
        """Tokens of an answer, with the one that ends it."""

    def read(self, tokens: NDArray[np.int64]) -> str:
        """Text of an answer."""


@dataclass(frozen=True, kw_only=True)
class RolloutSetting:
    """How a batch is filled."""

    seed: int
    """of all noise"""
    prompts: int
    """different problems of a step"""
    answers: int
    """answers to each"""
    max_prompt_tokens: int
    """longest prompt"""
    max_answer_tokens: int
    """an answer is cut off here"""
    reward_cut_off: bool = False
    """whether an answer that was cut off is rewarded for what it says"""
    temperature: float
    """answers are drawn with"""
    window: int = 0
    """tokens generated per step and answer, 0: whole answers"""


def share_of_rank(total: int, rank: int, world: int) -> range:
    """The part of 0 to total - 1 that a rank takes: neighbours, as even as possible."""
    return range(total * rank // world, total * (rank + 1) // world)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """One rank's part of every step's rollout."""

    engine: Engine
    """of this rank"""
    task: Task
    """asks and rewards"""
    words: Words
    """between text and tokens"""
    setting: RolloutSetting
    """what a batch is"""
    rank: int
    """of all ranks"""
    world: int
    """ranks"""

    def begin(self, step: int) -> list[Sample]:
        """Whole answers: this rank's samples of a step, none of them begun. A group is on one rank."""
        setting = self.setting
        groups = [step * setting.prompts + p for p in share_of_rank(setting.prompts, self.rank, self.world)]
        return [
            Sample(problem=group, group=group, number=number, prompt=self._prompt(self.task.problem(group)))
            for group in groups
            for number in range(setting.answers)
        ]

    def places(self) -> list[Sample]:
        """Windows: what this rank's places begin with."""
        return [self._begun(place) for place in share_of_rank(self.num_places, self.rank, self.world)]

    @property
    def num_places(self) -> int:
        """Answers that grow at the same time, on all ranks."""
        return self.setting.prompts * self.setting.answers

    def here(self, samples: Sequence[Sample]) -> list[Sample]:
        """Windows: those of any samples that are in this rank's places, in the order of places."""
        mine = set(share_of_rank(self.num_places, self.rank, self.world))
        found = [sample for sample in samples if sample.group % self.num_places in mine]
        return sorted(found, key=lambda sample: sample.group % self.num_places)

    def succeed(self, samples: Sequence[Sample]) -> list[Sample]:
        """Windows: unfinished answers go on, finished ones are replaced."""
        return [
            self._begun(sample.group + self.num_places) if sample.finished else replace(sample, reward=0.0)
            for sample in samples
        ]

    def _begun(self, number: int) -> Sample:
        return Sample(problem=number, group=number, number=0, prompt=self._prompt(self.task.problem(number)))

    def generate(self, samples: Sequence[Sample], *, version: int) -> list[Sample]:
        """Let the engine go on with all samples, to their end or for a window.

        version: of the weights that it was given; what it says itself comes first.
        """
        setting = self.setting
        requests = [
            Request(tokens=sample.tokens, noise=_noise(setting, sample)[self._from_to(sample)]) for sample in samples
        ]
        said = self.engine.generate(requests, temperature=setting.temperature)
        return [self._grown(sample, one, version) for sample, one in zip(samples, said, strict=True)]

    def _from_to(self, sample: Sample) -> slice:
        first, limit = sample.answer.size, self.setting.max_answer_tokens
        return slice(first, min(first + self.setting.window, limit) if self.setting.window else limit)

    def _grown(self, sample: Sample, said: Generation, version: int) -> Sample:
        full = sample.answer.size + said.tokens.size >= self.setting.max_answer_tokens
        return sample.grown(
            answer=said.tokens, logprobs=said.logprobs, experts=said.experts,
            version=version if said.version is None else said.version, finished=said.ended or full,
        )  # fmt: skip

    def rewarded(self, samples: Sequence[Sample]) -> list[Sample]:
        """With the rewards of finished answers."""
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
                f"the prompt of problem {problem.number} of {self.task.name} has {tokens.size} tokens: allow at least "
                f"that many with rollout.max_prompt_tokens, now {self.setting.max_prompt_tokens}, or take it out"
            )
        return tokens

    def held_out(self, count: int, total: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> dict[str, float]:
        """Collective: mean reward of answers to held-out problems, drawn as in training and as likely as can be."""
        rewards = [self._held_out(count, temperature) for temperature in (self.setting.temperature, 0.0)]
        drawn, likeliest, number = total(np.array([*(sum(part) for part in rewards), len(rewards[0])])).tolist()
        return {
            "reward_held_out": drawn / max(number, 1.0), "reward_held_out_greedy": likeliest / max(number, 1.0)
        }  # fmt: skip

    def _held_out(self, count: int, temperature: float) -> list[float]:
        """Rewards of own held-out problems, always with the same noise."""
        setting = self.setting
        problems = [self.task.held_out(n) for n in share_of_rank(count, self.rank, self.world)]
        noise = [
            np.random.default_rng([setting.seed, 1, problem.number]).random(setting.max_answer_tokens)
            for problem in problems
        ]
        requests = [
            Request(tokens=self._prompt(problem), noise=own) for problem, own in zip(problems, noise, strict=True)
        ]
        said = self.engine.generate(requests, temperature=temperature)
        return [self._reward(problem, one.tokens) for problem, one in zip(problems, said, strict=True)]


def _noise(setting: RolloutSetting, sample: Sample) -> NDArray[np.float64]:
    """One number for every token that the answer may have, the same in whichever windows it is generated."""
    random = np.random.default_rng([setting.seed, 0, sample.group, sample.number])
    return random.random(setting.max_answer_tokens)
