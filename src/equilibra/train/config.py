"""The configuration of a training run: one complete, typed, frozen value that checks itself.

A section of a file is a class, a key is a field. The docstring under a field gives meaning, unit and allowed values;
`equilibra train --options` prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar

from equilibra.core.checks import check_choice, check_flag, check_number, check_table, check_text, check_whole
from equilibra.core.errors import InputError
from equilibra.core.limits import CopyLimits

__all__ = [
    "ENGINES", "AlgorithmConfig", "BalanceConfig", "ClusterConfig", "DebugConfig", "ModelConfig", "OptimizerConfig",
    "Option", "RolloutConfig", "RunConfig", "TaskConfig", "TrainConfig", "WarmUpConfig",
]  # fmt: skip

# The section of the configuration about answers: who generates them, how many, how long.


ENGINES = ("embedded", "sglang", "vllm")
Option = str | int | float | bool
"""value in `task.options`, `rollout.options` and `algorithm.options`"""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How answers are generated."""

    engine: str = "embedded"
    """embedded (batched sampling on the training ranks), sglang (servers) or vllm (on the ranks, or servers)"""
    prompts: int = 32
    """problems per step over all ranks, at least 1"""
    answers: int = 8
    """answers per problem, at least 1"""
    max_prompt_tokens: int = 64
    """longest prompt in tokens, at least 1; longer ones are an error"""
    max_answer_tokens: int = 8
    """longest answer in tokens, at least 1; longer ones are cut off"""
    reward_cut_off: bool = False
    """true: score cut-off answers too; false: they get no reward"""
    temperature: float = 1.0
    """sampling temperature, above 0"""
    window: int = 0
    """most answer tokens per step, the rest follows in later steps (T-PPO); 0: whole answers"""
    server: str = ""
    """sglang and vllm: address of the server, http://127.0.0.1:30000, or several with commas, dealt out to the ranks in
    turn; vllm without one runs on the ranks"""
    server_timeout_s: float = 600.0
    """servers: seconds for a batch of answers, for new weights, and for a server to start, above 0"""
    timeout_s: float = 0.0
    """seconds that ranks wait for each other's rollouts and for engines that load weights;
    0: run.timeout_s + 2 x rollout.server_timeout_s"""
    weights_folder: str = ""
    """sglang and vllm: shared folder for new weights; empty: engine-weights in the run folder"""
    mismatch: str = "stop"
    """if the engine's log-probabilities show other weights than the trainer's: stop, or warn and continue"""
    mismatch_limit: float = 0.0
    """allowed mean difference of log-probabilities, 0 or more; 0: what rounding explains"""
    options: Mapping[str, Option] = field(default_factory=dict)
    """vllm on the ranks: further settings of vllm.LLM, such as gpu_memory_utilization = 0.4"""

    def __post_init__(self) -> None:
        check_choice("rollout.engine", self.engine, ENGINES)
        for name in ("prompts", "answers", "max_prompt_tokens", "max_answer_tokens"):
            check_whole(f"rollout.{name}", getattr(self, name), low=1)
        check_number("rollout.temperature", self.temperature, above=0, high=1e3)
        check_whole("rollout.window", self.window, low=0)
        check_flag("rollout.reward_cut_off", self.reward_cut_off)
        for name in ("server", "weights_folder"):
            check_text(f"rollout.{name}", getattr(self, name), empty=True)
        check_number("rollout.server_timeout_s", self.server_timeout_s, above=0, high=1e6, below=True)
        check_number("rollout.timeout_s", self.timeout_s, high=1e6, below=True)
        check_choice("rollout.mismatch", self.mismatch, ("stop", "warn"))
        check_number("rollout.mismatch_limit", self.mismatch_limit)
        check_table("rollout.options", self.options)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Length of the run, device, checkpoints and evaluations."""

    seed: int = 0
    """seed of every random choice, 0 or more; the same seed gives the same run"""
    steps: int = 60
    """RL steps, at least 1: each is a rollout and an update on it"""
    dtype: str = "float64"
    """number type of the model: float64, float32 or bfloat16"""
    device: str = "auto"
    """auto (cuda if available), cpu or cuda"""
    timeout_s: float = 120.0
    """seconds without progress in a training step after which a rank counts as lost, above 0"""
    checkpoint_timeout_s: float = 1800.0
    """the same while a checkpoint is written or read: seconds that the slowest disk may take, above 0"""
    checkpoint_every: int = 20
    """steps between checkpoints; 0: only at the end and when the run is stopped"""
    keep: int = 2
    """checkpoints to keep, the newest, at least 1"""
    evaluate_every: int = 20
    """steps between evaluations on held-out problems; 0: only before the first and after the last step"""
    evaluate_problems: int = 256
    """held-out problems of an evaluation, at least 1"""

    def __post_init__(self) -> None:
        check_whole("run.seed", self.seed, low=0)
        check_choice("run.dtype", self.dtype, ("float64", "float32", "bfloat16"))
        check_choice("run.device", self.device, ("auto", "cpu", "cuda"))
        for name in ("timeout_s", "checkpoint_timeout_s"):
            check_number(f"run.{name}", getattr(self, name), above=0, high=1e6, below=True)
        for name in ("steps", "keep", "evaluate_problems", "checkpoint_every", "evaluate_every"):
            check_whole(f"run.{name}", getattr(self, name), low=0 if name.endswith("_every") else 1)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Processes of the run. An expert-parallel group has nodes x ranks_per_node ranks."""

    nodes: int = 2
    """nodes of an expert-parallel group, at least 1; simulated when all ranks are on one machine"""
    ranks_per_node: int = 2
    """ranks that share fast links, at least 1"""
    groups: int = 1
    """expert-parallel groups (data parallelism), at least 1"""

    def __post_init__(self) -> None:
        for one in fields(self):
            check_whole(f"cluster.{one.name}", getattr(self, one.name), low=1, high=65_536)

    @property
    def num_processes(self) -> int:
        return self.nodes * self.ranks_per_node * self.groups


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train."""

    source: str = "embedded"
    """embedded (a small MoE, warmed up in the run) or a folder with a Hugging Face config.json, weights optional"""
    activation_checkpointing: bool = False
    """true: recompute activations in the backward pass to save memory"""

    def __post_init__(self) -> None:
        check_text("model.source", self.source)
        check_flag("model.activation_checkpointing", self.activation_checkpointing)


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Problems and rewards."""

    kind: str = "reasoning-gym"
    """reasoning-gym (a generator of problems) or jsonl (a file of your own)"""
    name: str = "spell_backward"
    """the reasoning-gym task"""
    path: str = ""
    """file of a jsonl task: one {"question": ..., "answer": ...} per line"""
    reward: str = ""
    """your own reward, file.py:function; empty: the task's"""
    score_timeout_s: float = 30.0
    """seconds to score one answer, above 0; an answer that takes longer gets no reward"""
    options: Mapping[str, Option] = field(default_factory=dict)
    """settings of the reasoning-gym task; spell_backward defaults to words of 3 to 5 letters"""

    def __post_init__(self) -> None:
        check_choice("task.kind", self.kind, ("reasoning-gym", "jsonl"))
        for name in ("name", "path", "reward"):
            check_text(f"task.{name}", getattr(self, name), empty=True)
        check_number("task.score_timeout_s", self.score_timeout_s, above=0, high=1e6, below=True)
        check_table("task.options", self.options)
        if self.kind == "jsonl" and not self.path:
            raise InputError("task.kind jsonl needs a file of problems: set task.path")
        if self.kind == "reasoning-gym" and not self.name:
            raise InputError("task.kind reasoning-gym needs a task: set task.name, for example to chain_sum")
        file, _, function = self.reward.rpartition(":")
        if self.reward and not (file and function.isidentifier()):
            raise InputError(f"task.reward must be file.py:function, not {self.reward!r}")


@dataclass(frozen=True, kw_only=True)
class WarmUpConfig:
    """Supervised steps before RL, for a model that cannot answer yet."""

    steps: int = 100
    """supervised steps of the embedded model; 0: none"""
    batch: int = 64
    """problems per step, at least 1"""
    lr: float = 3e-3
    """learning rate, above 0"""
    smoothing: float = 0.5
    """label smoothing, from 0 to below 1: a less certain model explores more"""
    cache: str = ""
    """folder that caches warmed-up weights for later runs; empty: warm up in every run"""

    def __post_init__(self) -> None:
        check_whole("warm_up.steps", self.steps, low=0)
        check_whole("warm_up.batch", self.batch, low=1)
        check_number("warm_up.lr", self.lr, above=0)
        check_number("warm_up.smoothing", self.smoothing, high=1, below=True)
        check_text("warm_up.cache", self.cache, empty=True)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How a rollout becomes a loss."""

    name: str = "grpo"
    """grpo, ppo, gspo or tppo"""
    mini_batches: int = 2
    """optimizer steps per pass over a rollout, at least 1"""
    epochs: int = 1
    """passes over a rollout, at least 1"""
    options: Mapping[str, Option] = field(default_factory=dict)
    """settings of the algorithm; those of its loss as loss.clip_high = 0.28"""

    def __post_init__(self) -> None:
        check_text("algorithm.name", self.name)
        check_whole("algorithm.mini_batches", self.mini_batches, low=1)
        check_whole("algorithm.epochs", self.epochs, low=1)
        check_table("algorithm.options", self.options)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW."""

    lr: float = 6e-4
    """learning rate of the policy, 0 or more"""
    value_lr: float = 6e-4
    """learning rate of the value model, 0 or more"""
    weight_decay: float = 0.0
    """decoupled weight decay, 0 or more"""
    beta1: float = 0.9
    """decay of the first moment, from 0 to below 1"""
    beta2: float = 0.99
    """decay of the second moment, from 0 to below 1"""
    epsilon: float = 1e-8
    """added to the root of the second moment, above 0"""
    max_norm: float = 1.0
    """gradients are clipped to this norm, above 0"""
    warm_up_steps: int = 0
    """optimizer steps in which the learning rate rises linearly; 0: none"""
    max_skipped_steps: int = 3
    """consecutive optimizer steps that may be skipped for a NaN or infinite gradient; one more ends the run"""

    def __post_init__(self) -> None:
        for name in ("lr", "value_lr", "weight_decay"):
            check_number(f"optimizer.{name}", getattr(self, name))
        for name in ("beta1", "beta2"):
            check_number(f"optimizer.{name}", getattr(self, name), high=1, below=True)
        for name in ("epsilon", "max_norm"):
            check_number(f"optimizer.{name}", getattr(self, name), above=0)
        for name in ("warm_up_steps", "max_skipped_steps"):
            check_whole(f"optimizer.{name}", getattr(self, name), low=0)


@dataclass(frozen=True, kw_only=True)
class BalanceConfig(CopyLimits):
    """What the balancer may do."""

    section: ClassVar[str] = "balance."

    planner: str = "equilibra"
    """who plans a step; static switches balancing off"""
    hardware: str = "auto"
    """prices that plans are made for: auto (those of the GPU, where it is known), a preset (a100, h100, h200, b200,
    nvl72), or a file that equilibra doctor or calibrate wrote"""
    tokens_per_rank: int = 1024
    """token budget of a rank's part of a micro-batch, from 1 on"""
    prefetch_depth: int = 1
    """layers that copies come ahead, from 0 on"""
    path: str = "collective"
    """where flash copies come from: collective (the rank that is home), host (memory of the machine); on GPUs also ipc
    (the other GPU's memory), both (the two at once) or auto (as the plan needs)"""
    move_sequences: bool = True
    """whether sequences may run on other ranks than those that generated them"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_text("balance.planner", self.planner)
        check_text("balance.hardware", self.hardware)
        check_whole("balance.tokens_per_rank", self.tokens_per_rank, low=1)
        check_whole("balance.prefetch_depth", self.prefetch_depth, low=0)
        check_choice("balance.path", self.path, ("collective", "host", "ipc", "both", "auto"))
        check_flag("balance.move_sequences", self.move_sequences)


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """Record rollouts, or train on recorded ones."""

    record: str = ""
    """folder to record every rollout in; empty: none"""
    replay: str = ""
    """folder of recorded rollouts to train on; empty: generate"""

    def __post_init__(self) -> None:
        check_text("debug.record", self.record, empty=True)
        check_text("debug.replay", self.replay, empty=True)
        if self.record and self.replay:
            raise InputError("debug.record and debug.replay exclude each other: a replayed rollout is recorded already")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The complete configuration of a training run."""

    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    warm_up: WarmUpConfig = field(default_factory=WarmUpConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def rollout_timeout_s(self) -> float:
        """Seconds that ranks wait for each other's rollouts and for engines that load weights."""
        return self.rollout.timeout_s or self.run.timeout_s + 2 * self.rollout.server_timeout_s

    def __post_init__(self) -> None:
        rows = self.rollout.max_prompt_tokens + self.rollout.max_answer_tokens - 1
        if rows > self.balance.tokens_per_rank:
            raise InputError(
                f"balance.tokens_per_rank = {self.balance.tokens_per_rank} cannot hold the longest sequence: "
                f"rollout.max_prompt_tokens + rollout.max_answer_tokens - 1 = {rows}; raise it, or lower them"
            )
