"""Build the parts of a run on this rank from its configuration: task, text, models, engine, learners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from importlib.resources import files
from pathlib import Path

import torch

from equilibra.core.errors import InputError
from equilibra.core.plan import Stage
from equilibra.execute.copies.copies import CopySetting
from equilibra.execute.copies.transfer import Path as CopyPath
from equilibra.execute.group import ExpertGroup, patient_group
from equilibra.execute.steps.balancer import Balancer, BalancerSetting
from equilibra.execute.steps.masters import float32_masters, masters_or_parameters
from equilibra.integrations.hf import ModelFolder, Replica, ShardedModel, Text, build_model, open_model_folder, text_of
from equilibra.integrations.hf.disaggregated import pool_model
from equilibra.integrations.reasoning_gym import reasoning_gym_task
from equilibra.integrations.routing_formats import model_from_config
from equilibra.integrations.served import Server, check_url
from equilibra.integrations.sglang.engine import SGLangEngine
from equilibra.integrations.vllm.engine import VLLMEngine, VLLMServerEngine, import_vllm
from equilibra.rl.algorithms import Algorithm, algorithm_named
from equilibra.rl.engine import Engine
from equilibra.rl.jsonl import jsonl_task
from equilibra.rl.learner import Learner, Skipped
from equilibra.rl.mismatch import unit_roundoff
from equilibra.rl.rollout import Rollout, RolloutSetting
from equilibra.rl.tasks import Task, TimedTask, reward_function
from equilibra.rollout.pool import Pool, PoolOfRanks
from equilibra.rollout.setting import PoolSetting
from equilibra.train.config import Option, TrainConfig

WEIGHTS = "engine-weights"
"""folder in the run folder for weights on their way to an engine, unless rollout.weights_folder is set"""
DEFAULT_OPTIONS: dict[str, dict[str, Option]] = {"spell_backward": {"min_word_len": 3, "max_word_len": 5}}
"""options of reasoning-gym tasks that a small model can learn"""
TOKENIZER_TEXTS = 512
"""problems that train a tokenizer, for a model folder without one"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """What a rank's models, learners and rollouts are built from."""

    config: TrainConfig
    group: ExpertGroup
    patient: ExpertGroup
    """`group` with a timeout long enough for rollouts and engines"""
    device: torch.device
    dtype: torch.dtype
    folder: ModelFolder
    task: Task
    text: Text
    algorithm: Algorithm


def model_folder_of(config: TrainConfig) -> ModelFolder:
    """The folder of the embedded model or of the user's.

    On CPUs vLLM has no kernel for heads of size 16. So under vLLM the embedded model has four heads of 32 instead of
    eight of 16.
    """
    if config.model.source == "embedded":
        name = "embedded_wide_heads" if config.rollout.engine == "vllm" else "embedded"
        return open_model_folder(Path(str(files("equilibra.train") / name)))
    return open_model_folder(config.model.source)


def task_of(config: TrainConfig) -> Task:
    """The problems, with the user's reward if given."""
    task, seed = config.task, config.run.seed
    options = {**DEFAULT_OPTIONS.get(task.name, {}), **task.options}
    make: Callable[[], Task] = partial(reasoning_gym_task, task.name, options, seed=seed)
    if task.kind == "jsonl":
        make = partial(jsonl_task, task.path, seed=seed)
    own = make()
    if task.reward:
        reward_function(task.reward)  # report errors now
        return TimedTask(own, partial(reward_function, task.reward, own.name), limit_s=task.score_timeout_s)
    if task.kind == "jsonl":
        return own  # only compares text: needs no time limit
    return TimedTask(own, make, limit_s=task.score_timeout_s)


def algorithm_of(config: TrainConfig) -> Algorithm:
    """The algorithm with its options; options of its loss are written loss.clip_low."""
    options = dict(config.algorithm.options)
    loss = {name.removeprefix("loss."): options.pop(name) for name in list(options) if name.startswith("loss.")}
    algorithm = algorithm_named(config.algorithm.name, loss=loss, **options)
    if config.rollout.window and not algorithm.windowed:
        raise InputError(
            f"rollout.window is {config.rollout.window}, but {algorithm.name} needs whole answers: use tppo, or 0"
        )
    return algorithm


def build_parts(config: TrainConfig, group: ExpertGroup, device: torch.device) -> Parts:
    """Collective: everything that depends only on the configuration."""
    folder, task = model_folder_of(config), task_of(config)
    problems = [task.problem(number) for number in range(TOKENIZER_TEXTS)] if not folder.has_tokenizer else []
    text = text_of(folder, [text for problem in problems for text in (problem.prompt, problem.answer)])
    _check_rollout(config, task, text)
    algorithm = algorithm_of(config)
    patient = patient_group(group, timeout_s=config.rollout_timeout_s, what="connecting for rollouts")
    return Parts(
        config=config, group=group, patient=patient, device=device, dtype=getattr(torch, config.run.dtype),
        folder=folder, task=task, text=text, algorithm=algorithm,
    )  # fmt: skip


def _check_rollout(config: TrainConfig, task: Task, text: Text) -> None:
    """Refuse now what would fail only after the warm-up."""
    rollout, number = config.rollout, config.algorithm.mini_batches
    groups = rollout.prompts * (rollout.answers if rollout.window else 1)
    if number > groups:
        raise InputError(
            f"algorithm.mini_batches = {number} needs as many groups of answers, but a step has {groups}: use fewer "
            "mini-batches, or more rollout.prompts"
        )
    if config.debug.replay:
        return
    check_engine(config)
    tokens = text.prompt(task.problem(0).prompt).size
    if tokens > rollout.max_prompt_tokens:
        raise InputError(
            f"a prompt of {task.name} has {tokens} tokens, but rollout.max_prompt_tokens is "
            f"{rollout.max_prompt_tokens}: raise it"
        )
    if task.num_held_out:
        task.held_out(min(config.run.evaluate_problems, task.num_held_out) - 1)  # fails if there are fewer


def build_model_of(parts: Parts, *, value: bool = False) -> ShardedModel:
    """Collective: the policy, or a value model that starts from the same weights."""
    config = parts.config
    copies = CopySetting(
        spare_slots=config.balance.spare_slots, prefetch_depth=config.balance.prefetch_depth,
        path=dict.fromkeys(Stage, CopyPath(config.balance.path)),
    )  # fmt: skip
    return build_model(
        parts.folder, parts.group, copies, seed=config.run.seed + value, dtype=parts.dtype, device=parts.device,
        value=value, checkpointing=config.model.activation_checkpointing,
    )  # fmt: skip


def build_learner(parts: Parts, model: ShardedModel, *, lr: float | None, value: bool = False) -> Learner:
    """A model with its balancer and optimizer; frozen without a learning rate."""
    config, chosen = parts.config, parts.config.optimizer
    optimizer, masters, planner = None, {}, config.balance.planner
    if lr is None:
        planner = "static"
        model.requires_grad_(requires_grad=False)
    else:
        masters = float32_masters(model)
        optimizer = torch.optim.AdamW(
            masters_or_parameters(model, masters), lr=lr, betas=(chosen.beta1, chosen.beta2), eps=chosen.epsilon,
            weight_decay=chosen.weight_decay,
        )  # fmt: skip
    setting = balancer_setting(config, planner)
    return Learner(
        model=model, balancer=Balancer(model.runtime, setting, optimizer=optimizer, masters=masters),
        optimizer=optimizer, pad=parts.text.pad, device=parts.device, temperature=config.rollout.temperature,
        max_norm=chosen.max_norm, lr=lr or 0.0, warm_up_steps=chosen.warm_up_steps, values=value,
        skipped=Skipped(chosen.max_skipped_steps),
    )  # fmt: skip


def balancer_setting(config: TrainConfig, planner: str) -> BalancerSetting:
    """How the planner plans a step."""
    balance = config.balance
    return BalancerSetting(
        tokens_per_rank=balance.tokens_per_rank, planner=planner, hardware=balance.hardware,
        move_sequences=balance.move_sequences, seed=config.run.seed, **balance.limits(),
    )  # fmt: skip


def build_rollout(parts: Parts, run: Path) -> Rollout:
    """Build this rank's engine and its share of the rollout. run: the run folder."""
    rollout = parts.config.rollout
    setting = RolloutSetting(
        seed=parts.config.run.seed, prompts=rollout.prompts, answers=rollout.answers,
        max_prompt_tokens=rollout.max_prompt_tokens, max_answer_tokens=rollout.max_answer_tokens,
        temperature=rollout.temperature, window=rollout.window, reward_cut_off=rollout.reward_cut_off,
    )  # fmt: skip
    return Rollout(
        engine=build_engine(parts, run), task=parts.task, words=parts.text, setting=setting,
        rank=parts.group.world_rank, world=parts.group.world_size,
    )  # fmt: skip


def check_engine(config: TrainConfig) -> None:
    """Refuse now an engine that cannot be used."""
    rollout = config.rollout
    if rollout.engine == "sglang" or rollout.server:
        _addresses(rollout.server)
    if rollout.engine == "vllm" and not rollout.server:
        import_vllm()
    if rollout.server and rollout.engine in ("embedded", "disaggregated"):
        raise InputError(
            f"rollout.server is for sglang and vllm, but rollout.engine is {rollout.engine}: set one of them"
        )
    if rollout.engine == "disaggregated":
        longest, room = rollout.max_prompt_tokens + rollout.max_answer_tokens, pool_setting(config).kv_tokens
        if longest > room:
            raise InputError(
                f"rollout.max_prompt_tokens + rollout.max_answer_tokens is {longest}, but an attention process has "
                f"{room} tokens of KV cache: raise kv_tokens in rollout.options"
            )
    elif rollout.options and (rollout.engine != "vllm" or rollout.server):
        raise InputError(
            "rollout.options are for the disaggregated engine and vLLM on the ranks, but rollout.engine is "
            f"{rollout.engine}{' with rollout.server' if rollout.server else ''}: remove them"
        )


def pool_setting(config: TrainConfig) -> PoolSetting:
    """The processes of a disaggregated engine."""
    options = dict(config.rollout.options)
    known = {one.name for one in fields(PoolSetting)}
    if unknown := options.keys() - known:
        raise InputError(
            f"rollout.options has no {', '.join(sorted(unknown))} for the disaggregated engine: use "
            f"{', '.join(sorted(known))}"
        )
    return PoolSetting(**options)  # type: ignore[arg-type]  # checks their types


def _addresses(text: str) -> list[str]:
    found = [check_url(part.strip()) for part in text.split(",") if part.strip()]
    if not found:
        raise InputError("rollout.engine sglang needs a server: set rollout.server, for example http://127.0.0.1:30000")
    return found


def build_engine(parts: Parts, run: Path) -> Engine:
    """The engine of this rank: embedded, attention and expert processes, vLLM, or servers. run: the run folder."""
    rollout, text, group = parts.config.rollout, parts.text, parts.patient
    if rollout.engine == "embedded":
        return Replica(parts.folder, dtype=parts.dtype, device=parts.device, end=text.end, pad=text.pad)
    if rollout.engine == "disaggregated":
        model = pool_model(parts.folder, dtype=parts.dtype, device=parts.device, end=text.end)
        setting = pool_setting(parts.config)
        start = partial(Pool, setting, model, timeout_s=parts.config.run.timeout_s)
        return PoolOfRanks(group, start, roundoff=unit_roundoff(parts.dtype, setting.device_of(0, model).type))
    folder = Path(rollout.weights_folder) if rollout.weights_folder else run / WEIGHTS
    shapes = model_from_config(parts.folder.config.to_dict())
    dtype = torch.float32 if rollout.engine == "vllm" and parts.dtype == torch.float64 else parts.dtype
    files = {"config.json": parts.folder.config_file(dtype), **text.files()}
    vocabulary = parts.folder.config.vocab_size
    if rollout.engine == "vllm" and not rollout.server:
        return VLLMEngine(
            group, shapes, end=text.end, vocabulary=vocabulary, folder=folder, files=files,
            max_tokens=rollout.max_prompt_tokens + rollout.max_answer_tokens, dtype=str(dtype).removeprefix("torch."),
            options=rollout.options,
        )  # fmt: skip
    servers = [Server(url=url, timeout_s=rollout.server_timeout_s) for url in _addresses(rollout.server)]
    engine = VLLMServerEngine if rollout.engine == "vllm" else SGLangEngine
    return engine(
        servers=servers, group=group, model=shapes, vocabulary=vocabulary, end=text.end, folder=folder, files=files,
        dtype=dtype,
    )  # fmt: skip
