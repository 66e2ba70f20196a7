"""The injection and shape of every run, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

TIMEOUT_S = 6.0
"""run.timeout_s, run.checkpoint_timeout_s and rollout.timeout_s of every run"""
STEPS = 3

INJECTIONS = {
    "kill": "SIGKILL of a rank",
    "stop": "SIGSTOP of a rank, for good",
    "pause": "SIGSTOP of a rank, SIGCONT 0.1 to 8 s later",
    "slow": "a rank runs 25 ms of every 100 ms, for 4 s",
    "full": "the disk of all ranks becomes full",
    "limit": "a rank can write no more (RLIMIT_FSIZE)",
    "term": "SIGTERM to the program",
    "interrupt": "SIGINT to the program",
    "term-all": "SIGTERM to the program and all ranks",
}
WEIGHTS = {
    "kill": 28, "stop": 14, "pause": 12, "slow": 8, "full": 14, "limit": 10, "term": 5, "interrupt": 5, "term-all": 4,
}  # fmt: skip
OF_A_RANK = ("kill", "stop", "pause", "slow", "full", "limit")
"""injections at a stage; the rank does them to itself"""
STAGES = (
    "checkpoint", "checkpoint", "checkpoint", "migrate", "migrate", "segment", "evaluate", "rollout", "reward", "plan",
    "logprob", "advantages", "update", "update", "weights", "report",
)  # fmt: skip
STEPS_OF = {"evaluate": (0, 2, 3), "report": (3,), "migrate": (0, 1), "segment": (0,)}
"""steps of stages that not every step has; for migrations, how many came before"""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A kind of run; all runs of a kind end with the same numbers."""

    nodes: int
    """nodes per group"""
    ranks_per_node: int
    """ranks per node"""
    groups: int
    """expert-parallel groups"""
    standing: int = 2
    """standing copies that a node may hold; without any, homes move between nodes"""
    path: str
    """path of flash copies"""
    algorithm: str

    @property
    def world(self) -> int:
        """Ranks of all groups."""
        return self.nodes * self.ranks_per_node * self.groups

    @property
    def name(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}x{self.groups}-{self.path}-{self.algorithm}"


SHAPES = (
    Shape(nodes=1, ranks_per_node=2, groups=1, path="collective", algorithm="grpo"),
    Shape(nodes=1, ranks_per_node=2, groups=1, path="host", algorithm="tppo"),
    Shape(nodes=2, ranks_per_node=1, groups=1, standing=0, path="collective", algorithm="grpo"),
    Shape(nodes=2, ranks_per_node=2, groups=1, path="host", algorithm="grpo"),
    Shape(nodes=1, ranks_per_node=2, groups=2, path="collective", algorithm="grpo"),
    Shape(nodes=1, ranks_per_node=2, groups=2, path="host", algorithm="grpo"),
    Shape(nodes=2, ranks_per_node=1, groups=2, standing=0, path="collective", algorithm="tppo"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run and its injection."""

    number: int
    """number in the series"""
    shape: Shape
    injection: str
    """one of INJECTIONS"""
    rank: int
    """the rank it happens to"""
    stage: str = ""
    """the stage it happens at; empty: at a moment of the clock"""
    step: int = 0
    """step of the stage"""
    share: float = 0.0
    """the moment, as a share of the undisturbed run's seconds or, at a stage, of its first 50 ms"""
    pause_s: float = 0.0
    """until SIGCONT"""


def draw(seed: int, number: int, *, can_fill: bool = True) -> Case:
    """A case of a series, determined by the seed and the number."""
    random = Random(f"{seed} {number}")
    shape = random.choice(SHAPES)
    injection = random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    if injection == "full" and not can_fill:
        injection = "limit"
    targeted = injection in OF_A_RANK and random.random() < 0.5
    stage = random.choice(STAGES) if targeted else ""
    able = [
        one for one in SHAPES if (one.path == "host" or stage != "segment") and (not one.standing or stage != "migrate")
    ]
    shape = shape if shape in able else random.choice(able)
    return Case(
        number=number, shape=shape, injection=injection, rank=random.randrange(shape.world), stage=stage,
        step=random.choice(STEPS_OF.get(stage, range(STEPS))), share=random.random(),
        pause_s=random.uniform(0.1, 8.0) if injection == "pause" else 0.0,
    )  # fmt: skip


def overrides(shape: Shape, model: str, problems: str, reward: str) -> list[str]:
    """The options of `equilibra train`."""
    options = {
        "run.steps": STEPS, "run.checkpoint_every": 1, "run.evaluate_every": 2, "run.evaluate_problems": 2,
        "run.timeout_s": TIMEOUT_S, "run.checkpoint_timeout_s": TIMEOUT_S, "run.device": "cpu",
        "cluster.nodes": shape.nodes, "cluster.ranks_per_node": shape.ranks_per_node, "cluster.groups": shape.groups,
        "model.source": model, "task.kind": "jsonl", "task.path": problems, "task.reward": reward,
        "warm_up.steps": 1, "warm_up.batch": 4, "rollout.prompts": 4, "rollout.answers": 2,
        "rollout.max_answer_tokens": 4, "rollout.reward_cut_off": "true", "rollout.timeout_s": TIMEOUT_S,
        "rollout.window": 2 if shape.algorithm == "tppo" else 0,
        "algorithm.name": shape.algorithm, "algorithm.mini_batches": 1,
        "optimizer.lr": 3e-3, "optimizer.value_lr": 3e-3,
        "balance.path": shape.path, "balance.standing_slots": shape.standing, "balance.tokens_per_rank": 96,
    }  # fmt: skip
    return [f"{name}={value}" for name, value in options.items()]
