"""Small RL runs on this test's ranks: what was reported of them, to be compared."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from equilibra.core.errors import NonFiniteError
from equilibra.rl import loop
from equilibra.rl.learner import LossSums
from equilibra.rl.observe import Observer
from equilibra.train.config import (
    AlgorithmConfig,
    BalanceConfig,
    ClusterConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    TaskConfig,
    TrainConfig,
    WarmUpConfig,
)
from equilibra.train.worker import run_worker

ALONE = ClusterConfig(nodes=1, ranks_per_node=1)
NODES = ClusterConfig(nodes=2, ranks_per_node=2)
GROUPS = ClusterConfig(nodes=1, ranks_per_node=2, groups=2)
REWARD = f"{Path(__file__).with_name('spread_reward.py')}:spread"
"""in a file that loads nothing: every rank has a process of its own for it"""
TIMES = ("seconds", "tokens_per_s", "exposed")
"""reported numbers that are measured"""
ABOUT_PLANS = ("imbalance", "imbalance_static", "copies", "moves")
"""reported numbers that differ between planners and clusters"""


class Notes(Observer):
    """Keeps everything that was reported."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.held_out: list[tuple[int, float]] = []
        self.said: list[str] = []

    def step(self, step, metrics):
        self.steps.append({"step": step, **metrics})

    def evaluated(self, step, metrics):
        self.held_out.append((step, metrics["reward_held_out"]))

    def note(self, text):
        self.said.append(text)


def small(model: Path, *, algorithm: str = "grpo", cluster: ClusterConfig = NODES, **changes: Any) -> TrainConfig:
    """A run of a few seconds; changes are sections, or keys of them as section__key."""
    window = {"window": 3} if algorithm == "tppo" else {}
    config = TrainConfig(
        run=RunConfig(steps=3, dtype="float64", evaluate_every=2, evaluate_problems=6, checkpoint_every=1),
        cluster=cluster,
        model=ModelConfig(source=str(model)),
        task=TaskConfig(name="chain_sum", options={"max_terms": 3, "max_digits": 2}, reward=REWARD),
        warm_up=WarmUpConfig(steps=3, batch=8),
        rollout=RolloutConfig(prompts=6, answers=2, max_answer_tokens=7, reward_cut_off=True, **window),
        algorithm=AlgorithmConfig(name=algorithm, mini_batches=2),
        optimizer=OptimizerConfig(lr=3e-3, value_lr=3e-3),
        balance=BalanceConfig(tokens_per_rank=128),
    )
    for name, value in changes.items():
        section, _, key = name.partition("__")
        config = replace(config, **{section: replace(getattr(config, section), **{key: value}) if key else value})
    return config


def run(config: TrainConfig, folder: Path, resume: bool = False, stop_after: int | None = None) -> Notes:
    """Called on every rank."""
    notes = Notes()
    run_worker(
        config, folder, resume=resume, observer=notes,
        stop=lambda: stop_after is not None and len(notes.steps) >= stop_after,
    )  # fmt: skip
    return notes


def run_all(configs: dict[str, TrainConfig], folder: Path) -> dict[str, Notes]:
    """Called on every rank: one run after another, each in a folder of its own."""
    made = {}
    for name, config in configs.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        made[name] = run(config, folder / name)
    return made


def run_with_nan(config: TrainConfig, folder: Path, steps: tuple[int, ...]) -> tuple[Notes, str]:
    """Called on every rank: the loss of the last rank is NaN in some steps. What was reported, and how it ended."""
    notes, loss_of = Notes(), loop.policy_loss_of

    def loss(*values: Any) -> LossSums:
        share = loss_of(*values)
        bad = len(notes.steps) in steps and dist.get_rank() == dist.get_world_size() - 1
        return replace(share, loss=share.loss * float("nan")) if bad else share

    loop.policy_loss_of = loss
    try:
        run_worker(config, folder, resume=False, observer=notes, stop=lambda: False)
    except NonFiniteError as error:
        return notes, str(error)
    finally:
        loop.policy_loss_of = loss_of
    return notes, ""


def comparable(step: dict[str, float], *, plans: bool = False) -> dict[str, float]:
    """What must be the same in two runs; plans: also what is said of plans."""
    left_out = TIMES if plans else (*TIMES, *ABOUT_PLANS)
    return {name: value for name, value in step.items() if not name.startswith(left_out)}


def largest_gap(first: Notes, second: Notes, *, plans: bool = False) -> float:
    """The largest relative difference of anything reported; plans: also of what is said of plans.

    Mismatches are left out: they are differences of numbers that agree but for rounding.
    """
    assert [note["step"] for note in first.steps] == [note["step"] for note in second.steps]
    assert [step for step, _ in first.held_out] == [step for step, _ in second.held_out]
    gaps = [abs(a - b) for (_, a), (_, b) in zip(first.held_out, second.held_out, strict=True)]
    for one, other in zip(first.steps, second.steps, strict=True):
        a, b = comparable(one, plans=plans), comparable(other, plans=plans)
        assert a.keys() == b.keys()
        gaps += [abs(a[name] - b[name]) / max(1.0, abs(a[name])) for name in a if not name.startswith("mismatch")]
    return max(gaps)


class Killed(Notes):
    """Ends the process at a moment of the run, as the operating system would."""

    def __init__(self, stage: str, step: int) -> None:
        super().__init__()
        self.moment = (stage, step)

    def stage(self, name, *, step, done=0, total=0):
        if (name, step) == self.moment:
            os.kill(os.getpid(), signal.SIGKILL)


def run_until_killed(config: TrainConfig, folder: Path, stage: str, step: int, victims: tuple[int, ...]) -> None:
    """Called on every rank: the victims die when they come to the stage of the step."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    notes = Killed(stage, step) if rank in victims else Notes()
    run_worker(config, folder, resume=False, observer=notes, stop=lambda: False)


def same_run(first: Notes, second: Notes, *, from_step: int) -> bool:
    """Whether two runs reported the same, to the bit, plans included, from a step on."""
    one = [comparable(note, plans=True) for note in first.steps if note["step"] >= from_step]
    other = [comparable(note, plans=True) for note in second.steps if note["step"] >= from_step]
    late = [[pair for pair in notes.held_out if pair[0] > from_step] for notes in (first, second)]
    return one == other and late[0] == late[1]
