"""The configuration of a training run: one complete, typed, frozen value that checks itself.

A section of a file is a class, a key is a field. The docstring under a field gives meaning, unit and allowed values;
`equilibra train --options` prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, get_type_hints

from equilibra.core.checks import (
    CopyLimits,
    check_choice,
    check_flag,
    check_number,
    check_table,
    check_text,
    check_whole,
)
from equilibra.core.errors import InputError

__all__ = [
    "ENGINES", "AlgorithmConfig", "BalanceConfig", "ClusterConfig", "DebugConfig", "ModelConfig", "OptimizerConfig",
    "Option", "RolloutConfig", "RunConfig", "TaskConfig", "TrainConfig", "WarmUpConfig",
]  # fmt: skip

ENGINES = ("embedded", "disaggregated", "sglang", "vllm")
Option = str | int | float | bool
"""value in `task.options`, `rollout.options` and `algorithm.options`"""
Count = Annotated[int, partial(check_whole, low=1)]
Whole = Annotated[int, partial(check_whole, low=0)]
Ranks = Annotated[int, partial(check_whole, low=1, high=65_536)]
NotNegative = Annotated[float, check_number]
Positive = Annotated[float, partial(check_number, above=0)]
BelowOne = Annotated[float, partial(check_number, high=1, below=True)]
Seconds = Annotated[float, partial(check_number, above=0, high=1e6, below=True)]
Text = Annotated[str, check_text]
OF_TYPE = {bool: check_flag, str: partial(check_text, empty=True), Mapping[str, Option]: check_table}
"""checks of fields that are annotated with a plain type"""


class Section:
    """A section of a file. Checks of a field come from its annotation, else from its type."""

    section: ClassVar[str]
    checks: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, section: str) -> None:
        kinds = get_type_hints(cls, include_extras=True)
        found = {name: getattr(kind, "__metadata__", (OF_TYPE.get(kind),))[0] for name, kind in kinds.items()}
        cls.section, cls.checks = f"{section}.", {name: check for name, check in found.items() if check is not None}

    def __post_init__(self) -> None:
        for name, check in self.checks.items():
            check(f"{self.section}{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Section, section="rollout"):
    """How answers are generated."""

    engine: Annotated[str, partial(check_choice, choices=ENGINES)] = "embedded"
    """embedded (a whole model on every training rank), disaggregated (processes for attention and for experts), sglang
    (servers) or vllm (on the ranks, or servers)"""
    prompts: Count = 32
    """problems per step over all ranks, at least 1"""
    answers: Count = 8
    """answers per problem, at least 1"""
    max_prompt_tokens: Count = 64
    """longest prompt in tokens, at least 1; longer ones are an error"""
    max_answer_tokens: Count = 8
    """longest answer in tokens, at least 1; longer ones are cut off"""
    reward_cut_off: bool = False
    """true: score cut-off answers too; false: they get no reward"""
    temperature: Annotated[float, partial(check_number, above=0, high=1e3)] = 1.0
    """sampling temperature, above 0"""
    window: Whole = 0
    """most answer tokens per step, the rest follows in later steps (T-PPO); 0: whole answers"""
    server: str = ""
    """sglang and vllm: address of the server, http://127.0.0.1:30000, or several with commas, dealt out to the ranks in
    turn; vllm without one runs on the ranks"""
    server_timeout_s: Seconds = 600.0
    """servers: seconds for a batch of answers, for new weights, and for a server to start, above 0"""
    timeout_s: Annotated[float, partial(check_number, high=1e6, below=True)] = 0.0
    """seconds that ranks wait for each other's rollouts and for engines that load weights;
    0: run.timeout_s + 2 x rollout.server_timeout_s"""
    weights_folder: str = ""
    """sglang and vllm: shared folder for new weights; empty: engine-weights in the run folder"""
    mismatch: Annotated[str, partial(check_choice, choices=("stop", "warn"))] = "stop"
    """if the engine's log-probabilities show that it lacks the trainer's weights: stop, or warn and continue"""
    mismatch_limit: NotNegative = 0.0
    """allowed mean difference of log-probabilities, 0 or more; 0: what rounding explains"""
    options: Mapping[str, Option] = field(default_factory=dict)
    """vllm on the ranks: further settings of vllm.LLM, such as gpu_memory_utilization = 0.4; disaggregated: attention,
    experts (processes), micro_batches, places, kv_tokens, page, prefill_tokens, spare_slots, threads, transport,
    devices"""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section, section="run"):
    """Length of the run, device, checkpoints and evaluations."""

    seed: Whole = 0
    """seed of every random choice, 0 or more; the same seed gives the same run"""
    steps: Count = 60
    """RL steps, at least 1: each is a rollout and an update on it"""
    dtype: Annotated[str, partial(check_choice, choices=("float64", "float32", "bfloat16"))] = "float64"
    """number type of the model: float64, float32 or bfloat16"""
    device: Annotated[str, partial(check_choice, choices=("auto", "cpu", "cuda"))] = "auto"
    """auto (cuda if available), cpu or cuda"""
    timeout_s: Seconds = 120.0
    """seconds without progress in a training step after which a rank counts as lost, above 0"""
    checkpoint_timeout_s: Seconds = 1800.0
    """the same while a checkpoint is written or read; allows for the slowest disk, above 0"""
    checkpoint_every: Whole = 20
    """steps between checkpoints; 0: only at the end and when the run is stopped"""
    keep: Count = 2
    """checkpoints to keep, the newest, at least 1"""
    evaluate_every: Whole = 20
    """steps between evaluations on held-out problems; 0: only before the first and after the last step"""
    evaluate_problems: Count = 256
    """held-out problems of an evaluation, at least 1"""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(Section, section="cluster"):
    """Processes of the run. An expert-parallel group has nodes x ranks_per_node ranks."""

    nodes: Ranks = 2
    """nodes of an expert-parallel group, at least 1; simulated when all ranks are on one machine"""
    ranks_per_node: Ranks = 2
    """ranks that share fast links, at least 1"""
    groups: Ranks = 1
    """expert-parallel groups (data parallelism), at least 1"""

    @property
    def num_processes(self) -> int:
        return self.nodes * self.ranks_per_node * self.groups


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section, section="model"):
    """The model to train."""

    source: Text = "embedded"
    """embedded (a small MoE, warmed up in the run) or a folder with a Hugging Face config.json, weights optional"""
    activation_checkpointing: bool = False
    """true: recompute activations in the backward pass to save memory"""


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Section, section="task"):
    """Problems and rewards."""

    kind: Annotated[str, partial(check_choice, choices=("reasoning-gym", "jsonl"))] = "reasoning-gym"
    """reasoning-gym (a generator of problems) or jsonl (a file of your own)"""
    name: str = "spell_backward"
    """the reasoning-gym task"""
    path: str = ""
    """file of a jsonl task: one {"question": ..., "answer": ...} per line"""
    reward: str = ""
    """your own reward, file.py:function; empty: the task's"""
    score_timeout_s: Seconds = 30.0
    """seconds to score one answer, above 0; an answer that takes longer gets no reward"""
    options: Mapping[str, Option] = field(default_factory=dict)
    """settings of the reasoning-gym task; spell_backward defaults to words of 3 to 5 letters"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "jsonl" and not self.path:
            raise InputError("task.kind jsonl needs a file of problems: set task.path")
        if self.kind == "reasoning-gym" and not self.name:
            raise InputError("task.kind reasoning-gym needs a task: set task.name, for example to chain_sum")
        file, _, function = self.reward.rpartition(":")
        if self.reward and not (file and function.isidentifier()):
            raise InputError(f"task.reward must be file.py:function, not {self.reward!r}")


@dataclass(frozen=True, kw_only=True)
class WarmUpConfig(Section, section="warm_up"):
    """Supervised steps before RL, for a model that cannot answer yet."""

    steps: Whole = 100
    """supervised steps of the embedded model; 0: none"""
    batch: Count = 64
    """problems per step, at least 1"""
    lr: Positive = 3e-3
    """learning rate, above 0"""
    smoothing: BelowOne = 0.5
    """label smoothing, from 0 to below 1: a less certain model explores more"""
    cache: str = ""
    """folder that caches warmed-up weights for later runs; empty: warm up in every run"""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(Section, section="algorithm"):
    """How a rollout becomes a loss."""

    name: Text = "grpo"
    """grpo, ppo, gspo or tppo"""
    mini_batches: Count = 2
    """optimizer steps per pass over a rollout, at least 1"""
    epochs: Count = 1
    """passes over a rollout, at least 1"""
    options: Mapping[str, Option] = field(default_factory=dict)
    """settings of the algorithm; those of its loss as loss.clip_high = 0.28"""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section, section="optimizer"):
    """AdamW."""

    lr: NotNegative = 6e-4
    """learning rate of the policy, 0 or more"""
    value_lr: NotNegative = 6e-4
    """learning rate of the value model, 0 or more"""
    weight_decay: NotNegative = 0.0
    """decoupled weight decay, 0 or more"""
    beta1: BelowOne = 0.9
    """decay of the first moment, from 0 to below 1"""
    beta2: BelowOne = 0.99
    """decay of the second moment, from 0 to below 1"""
    epsilon: Positive = 1e-8
    """added to the root of the second moment, above 0"""
    max_norm: Positive = 1.0
    """gradients are clipped to this norm, above 0"""
    warm_up_steps: Whole = 0
    """optimizer steps in which the learning rate rises linearly; 0: none"""
    max_skipped_steps: Whole = 3
    """consecutive optimizer steps that may be skipped for a NaN or infinite gradient; one more ends the run"""


@dataclass(frozen=True, kw_only=True)
class BalanceConfig(CopyLimits, Section, section="balance"):
    """What the balancer may do."""

    planner: Text = "equilibra"
    """planner of every step; static switches balancing off"""
    hardware: Text = "auto"
    """prices that the planner uses: auto (those of this GPU, if known), a preset (a100, h100, h200, b200, nvl72), or a
    file written by equilibra doctor or calibrate"""
    tokens_per_rank: Count = 1024
    """tokens of a micro-batch per rank, at least 1"""
    prefetch_depth: Whole = 1
    """layers ahead of which copies are fetched, 0 or more"""
    path: Annotated[str, partial(check_choice, choices=("collective", "host", "ipc", "both", "auto"))] = "collective"
    """how flash copies travel: collective (sent by the home rank) or host (through host memory); on GPUs also ipc (read
    from the other GPU's memory), both (host and ipc at once) or auto (as the plan needs)"""
    move_sequences: bool = True
    """true: sequences may run on other ranks than the ones that generated them"""

    def __post_init__(self) -> None:
        CopyLimits.__post_init__(self)
        Section.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class DebugConfig(Section, section="debug"):
    """Record rollouts, or train on recorded ones."""

    record: str = ""
    """folder to record every rollout in; empty: none"""
    replay: str = ""
    """folder of recorded rollouts to train on; empty: generate"""

    def __post_init__(self) -> None:
        super().__post_init__()
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
