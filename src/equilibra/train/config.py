"""The configuration of a training run: one complete, typed, frozen value that checks itself.

A section of a file is a class, a key is a field. The docstring under a field says unit, meaning and allowed values: it
is what `equilibra train --options` prints. A value is checked when it is made, wherever it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from equilibra.core.errors import InputError
from equilibra.train.config_checks import check_choice, check_flag, check_number, check_table, check_text, check_whole

__all__ = [
    "ENGINES", "AlgorithmConfig", "BalanceConfig", "ClusterConfig", "DebugConfig", "ModelConfig", "OptimizerConfig",
    "Option", "RolloutConfig", "RunConfig", "TaskConfig", "TrainConfig", "WarmUpConfig",
]  # fmt: skip

# The section of the configuration about answers: who generates them, how many, how long.


ENGINES = ("embedded", "sglang", "vllm")
Option = str | int | float | bool
"""a value of `task.options`, `rollout.options` and `algorithm.options`"""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How answers are generated."""

    engine: str = "embedded"
    """who generates: embedded (batched sampling on the training ranks), sglang (servers) or vllm (on the ranks)"""
    prompts: int = 32
    """problems of a step, over all ranks, from 1 on"""
    answers: int = 8
    """answers to each problem, from 1 on"""
    max_prompt_tokens: int = 64
    """longest prompt, in tokens, from 1 on; a problem with a longer one is an error"""
    max_answer_tokens: int = 8
    """longest answer, in tokens, from 1 on; longer ones are cut off"""
    reward_cut_off: bool = False
    """true: answers that were cut off are rewarded for what they say; false: they get no reward"""
    temperature: float = 1.0
    """of sampling, more than 0"""
    window: int = 0
    """answer tokens that a step generates at most, the rest follows in later steps (T-PPO); 0: whole answers"""
    server: str = ""
    """sglang: address of the server, http://127.0.0.1:30000, or of several with commas, which ranks ask in turn"""
    server_timeout_s: float = 600.0
    """sglang: seconds for a batch of answers, for new weights, and for a server that is starting, more than 0"""
    timeout_s: float = 0.0
    """seconds that ranks wait for each other's rollouts and for engines that load weights, from 0 on; 0: those of run
    and twice those of a server (run.timeout_s + 2 x rollout.server_timeout_s)"""
    weights_folder: str = ""
    """sglang and vllm: folder that hands over new weights, seen by all; empty: engine-weights in the run folder"""
    mismatch: str = "stop"
    """when the engine's log-probabilities show other weights than the trainer's: stop the run, or warn and go on"""
    mismatch_limit: float = 0.0
    """mean difference of log-probabilities that is allowed, from 0 on; 0: what the number types explain"""
    options: Mapping[str, Option] = field(default_factory=dict)
    """vllm: further settings of vllm.LLM, as gpu_memory_utilization = 0.4"""

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
    """How long, on what, and what is kept."""

    seed: int = 0
    """of every random choice, from 0 on; the same seed gives the same run"""
    steps: int = 60
    """RL steps, from 1 on: each is a rollout and an update on it"""
    dtype: str = "float64"
    """numbers of the model: float64, float32 or bfloat16"""
    device: str = "auto"
    """auto (cuda where there is one), cpu or cuda"""
    timeout_s: float = 120.0
    """seconds after which a rank that is silent inside a training step is lost, more than 0"""
    checkpoint_timeout_s: float = 1800.0
    """the same while a checkpoint is written or read: seconds that the slowest disk may take, more than 0"""
    checkpoint_every: int = 20
    """steps between checkpoints; 0: only at the end and when the run is stopped"""
    keep: int = 2
    """newest checkpoints that are kept, from 1 on"""
    evaluate_every: int = 20
    """steps between evaluations on held-out problems; 0: only before the first and after the last step"""
    evaluate_problems: int = 256
    """held-out problems of an evaluation, from 1 on"""

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
    """The processes. Experts are sharded over one expert-parallel group of nodes x ranks_per_node ranks."""

    nodes: int = 2
    """nodes of an expert-parallel group, from 1 on; on one machine they are only pretended"""
    ranks_per_node: int = 2
    """ranks that share fast links, from 1 on"""
    groups: int = 1
    """expert-parallel groups (data parallelism), from 1 on"""

    def __post_init__(self) -> None:
        for one in fields(self):
            check_whole(f"cluster.{one.name}", getattr(self, one.name), low=1, high=65_536)

    @property
    def num_processes(self) -> int:
        """Ranks of all groups."""
        return self.nodes * self.ranks_per_node * self.groups


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is trained."""

    source: str = "embedded"
    """embedded (a small MoE, warmed up in the run) or a folder with a Hugging Face config.json, weights or none"""
    activation_checkpointing: bool = False
    """true: compute activations again in the backward pass and save their memory"""

    def __post_init__(self) -> None:
        check_text("model.source", self.source)
        check_flag("model.activation_checkpointing", self.activation_checkpointing)


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """The problems, and what an answer is worth."""

    kind: str = "reasoning-gym"
    """reasoning-gym (a generator of problems) or jsonl (a file of your own)"""
    name: str = "spell_backward"
    """the reasoning-gym task"""
    path: str = ""
    """file of a jsonl task: one {"question": ..., "answer": ...} per line"""
    reward: str = ""
    """your own reward, file.py:function; empty: the task's"""
    score_timeout_s: float = 30.0
    """seconds that scoring one answer may take, more than 0; an answer that takes longer gets no reward"""
    options: Mapping[str, Option] = field(default_factory=dict)
    """settings of the reasoning-gym task; of spell_backward, words have 3 to 5 letters if nothing is said"""

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
    """Supervised steps before the RL ones, for a model that cannot answer at all yet."""

    steps: int = 100
    """supervised steps of the embedded model; 0: none"""
    batch: int = 64
    """problems of a step, from 1 on"""
    lr: float = 3e-3
    """learning rate, more than 0"""
    smoothing: float = 0.5
    """share of the target that is spread over all tokens, from 0 to below 1: a model that is unsure explores"""
    cache: str = ""
    """folder that keeps warmed-up weights for later runs; empty: warm up in every run"""

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
    """optimizer steps that a rollout is split into, from 1 on"""
    epochs: int = 1
    """times that a rollout is trained on, from 1 on"""
    options: Mapping[str, Option] = field(default_factory=dict)
    """settings of the algorithm, which checks them; those of its loss as loss.clip_high = 0.28"""

    def __post_init__(self) -> None:
        check_text("algorithm.name", self.name)
        check_whole("algorithm.mini_batches", self.mini_batches, low=1)
        check_whole("algorithm.epochs", self.epochs, low=1)
        check_table("algorithm.options", self.options)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW."""

    lr: float = 6e-4
    """learning rate of the policy, from 0 on"""
    value_lr: float = 6e-4
    """learning rate of the value model, from 0 on"""
    weight_decay: float = 0.0
    """decoupled, from 0 on"""
    beta1: float = 0.9
    """decay of the mean of gradients, from 0 to below 1"""
    beta2: float = 0.99
    """decay of the mean of their squares, from 0 to below 1"""
    epsilon: float = 1e-8
    """added to the root of that mean, more than 0"""
    max_norm: float = 1.0
    """gradients of a larger norm are shortened to it, more than 0"""
    warm_up_steps: int = 0
    """optimizer steps in which the learning rate rises from 0; 0: at once"""
    max_skipped_steps: int = 3
    """optimizer steps in a row that are skipped because a gradient is NaN or infinite, from 0 on; one more ends the
    run"""

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
class BalanceConfig:
    """What the balancer may do."""

    planner: str = "equilibra"
    """who plans a step; static switches balancing off"""
    tokens_per_rank: int = 1024
    """token budget of a rank's part of a micro-batch, from 1 on"""
    spare_slots: int = 2
    """flash copies a rank can hold, from 0 on"""
    standing_slots: int = 2
    """standing copies a node may hold per layer, from 0 on"""
    prefetch_depth: int = 1
    """layers that copies come ahead, from 0 on"""
    max_moves_per_layer: int = -1
    """homes that may move per layer and step; -1: as many as pay"""
    path: str = "collective"
    """where flash copies come from: collective (the rank that is home), host (memory of the machine); on GPUs also ipc
    (the other GPU's memory), both (the two at once) or auto (as the plan needs)"""
    move_sequences: bool = True
    """whether sequences may run on other ranks than those that generated them"""

    def __post_init__(self) -> None:
        check_text("balance.planner", self.planner)
        check_whole("balance.tokens_per_rank", self.tokens_per_rank, low=1)
        for name in ("spare_slots", "standing_slots", "prefetch_depth"):
            check_whole(f"balance.{name}", getattr(self, name), low=0)
        check_whole("balance.max_moves_per_layer", self.max_moves_per_layer, low=-1)
        check_choice("balance.path", self.path, ("collective", "host", "ipc", "both", "auto"))
        check_flag("balance.move_sequences", self.move_sequences)


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """The loop cut in half."""

    record: str = ""
    """folder to write every rollout to; empty: none"""
    replay: str = ""
    """folder of such a recording to train from instead of a rollout; empty: generate"""

    def __post_init__(self) -> None:
        check_text("debug.record", self.record, empty=True)
        check_text("debug.replay", self.replay, empty=True)
        if self.record and self.replay:
            raise InputError("debug.record and debug.replay exclude each other: a replayed rollout is recorded already")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything a training run is told."""

    run: RunConfig = field(default_factory=RunConfig)
    """how long, on what, and what is kept"""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """the processes"""
    model: ModelConfig = field(default_factory=ModelConfig)
    """what is trained"""
    task: TaskConfig = field(default_factory=TaskConfig)
    """the problems, and what an answer is worth"""
    warm_up: WarmUpConfig = field(default_factory=WarmUpConfig)
    """supervised steps before the RL ones"""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """how answers are generated"""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """how a rollout becomes a loss"""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW"""
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    """what the balancer may do"""
    debug: DebugConfig = field(default_factory=DebugConfig)
    """the loop cut in half"""

    @property
    def rollout_timeout_s(self) -> float:
        """How long ranks wait for each other's rollouts and for engines that load weights."""
        return self.rollout.timeout_s or self.run.timeout_s + 2 * self.rollout.server_timeout_s

    def __post_init__(self) -> None:
        rows = self.rollout.max_prompt_tokens + self.rollout.max_answer_tokens - 1
        if rows > self.balance.tokens_per_rank:
            raise InputError(
                f"balance.tokens_per_rank = {self.balance.tokens_per_rank} cannot hold the longest sequence: "
                f"rollout.max_prompt_tokens + rollout.max_answer_tokens - 1 = {rows}; raise it, or shorten them"
            )
