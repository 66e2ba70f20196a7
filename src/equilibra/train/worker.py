"""One rank of a training run: join the others, build, warm up or resume, train, save.

Every rank of a run calls `run_worker` with the same configuration. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say
who it is, as under torchrun.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from equilibra.core.errors import InputError
from equilibra.execute.group import ExpertGroup, join_expert_group
from equilibra.execute.state.stream import logical_weights
from equilibra.integrations.hf import ShardedModel
from equilibra.rl.critic import Critic
from equilibra.rl.learner import Learner
from equilibra.rl.loop import LoopSetting, Source, Trainer, train
from equilibra.rl.loss import Divergence
from equilibra.rl.observe import Observer
from equilibra.rl.recording import ModelShape
from equilibra.rl.sources import EngineSource, RecordedSource, Recording
from equilibra.rl.warm_up import WarmUpSetting, warm_up
from equilibra.train.build import Parts, build_learner, build_model_of, build_parts, build_rollout, cluster_of
from equilibra.train.config import TrainConfig
from equilibra.train.last_step import LastStep
from equilibra.train.state import State

__all__ = ["run_worker"]


def run_worker(
    config: TrainConfig, folder: Path, *, resume: bool, observer: Observer, stop: Callable[[], bool],
    say: Callable[[str], None] = print, cut: Callable[[int], None] = lambda _step: None,
) -> None:  # fmt: skip
    """Train in a run folder; all ranks share it.

    resume: go on from the folder's last checkpoint. stop: whether this rank was told to end. say: a line for people.
    cut: forget what was reported of this and later steps. observer, say and cut matter on world rank 0 only.
    """
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    device = _device(config)
    with _joined(config, device) as group:
        observer.stage("start", step=0)
        parts = build_parts(config, group, device)
        model = build_model_of(parts)
        value = build_model_of(parts, value=True) if parts.algorithm.needs_values else None
        if not resume and not parts.folder.has_weights:
            _warm_up(parts, model, value, folder, observer)
        policy = build_learner(parts, model, lr=config.optimizer.lr)
        critic = None if value is None else build_learner(parts, value, lr=config.optimizer.value_lr, value=True)
        reference = _reference(parts, model, folder, resume=resume)
        source = _source(parts, model, folder)
        state = State(folder, policy, critic, keep=config.run.keep)
        first = 0
        if resume:
            observer.stage("checkpoint", step=0)
            first, carried = state.load(windowed=parts.algorithm.windowed, say=say)
            if isinstance(source, EngineSource) and parts.algorithm.windowed:
                source.resume(carried)
        cut(first)
        observer.stage("weights", step=first)
        source.new_weights()
        last = LastStep(parts, folder)

        def save(step: int) -> None:
            state.save(step, source.carried if isinstance(source, EngineSource) else [])

        trainer = Trainer(
            setting=_loop(config), source=source, algorithm=parts.algorithm, policy=policy,
            critic=None if critic is None else Critic(critic),
            reference=reference, save=save, keep_record=last.keep, observer=observer, stop=_agreed(group, stop),
        )  # fmt: skip
        done = train(trainer, first)
        observer.stage("report", step=done)
        model.save(folder / "model", parts.text.files(), overwrite=True)
        last.write()
        state.close()
        for learner in (policy, critic, reference):
            if learner is not None:
                learner.balancer.close()


def _device(config: TrainConfig) -> torch.device:
    if config.run.device == "cpu" or (config.run.device == "auto" and not torch.cuda.is_available()):
        if config.balance.path in ("ipc", "both"):
            raise InputError(
                f"balance.path = {config.balance.path} is between GPUs, the run is on cpu: use collective, host or auto"
            )
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("run.device is cuda, and torch sees none here: use cpu, or auto")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@contextmanager
def _joined(config: TrainConfig, device: torch.device) -> Iterator[ExpertGroup]:
    """The ranks of the run, connected."""
    given = dist.is_initialized()  # somebody else's program has joined the ranks already
    world = dist.get_world_size() if given else int(os.environ.get("WORLD_SIZE", "1"))
    if world != config.cluster.num_processes:
        raise InputError(
            f"{world} processes were started, the configuration has {config.cluster.num_processes} (nodes x "
            "ranks_per_node x groups): start as many, or set cluster.nodes, cluster.ranks_per_node and cluster.groups"
        )
    if world > 1 and not given:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=config.run.timeout_s))
    try:
        yield join_expert_group(cluster_of(config), timeout_s=config.run.timeout_s)
    finally:
        if dist.is_initialized() and not given:
            dist.destroy_process_group()


def _agreed(group: ExpertGroup, stop: Callable[[], bool]) -> Callable[[], bool]:
    """Collective: whether any rank was told to end."""

    def agreed() -> bool:
        said = group.gather(np.array([stop()]), what="asking whether to stop")
        return bool(np.concatenate(said).any())

    return agreed


def _warm_up(parts: Parts, model: ShardedModel, value: ShardedModel | None, folder: Path, observer: Observer) -> None:
    """Collective: teach a fresh model to answer at all; a value model starts from the same weights."""
    setting = parts.config.warm_up
    cached = Path(setting.cache) / _warm_up_key(parts) if setting.cache else None
    if cached is not None and (cached / "config.json").is_file():
        model.load(cached)
    elif setting.steps:
        steps = WarmUpSetting(steps=setting.steps, batch=setting.batch, lr=setting.lr, smoothing=setting.smoothing)
        warm_up(model, parts.task, parts.text, steps, pad=parts.text.pad, device=parts.device, observer=observer)
        if cached is not None:
            model.save(cached, parts.text.files(), overwrite=True)
    if value is not None or parts.algorithm.loss.divergence is not Divergence.NONE:
        model.save(folder / "start", parts.text.files(), overwrite=True)
    if value is not None:
        value.load_trunk(folder / "start")


def _warm_up_key(parts: Parts) -> str:
    """Names everything that warmed-up weights depend on."""
    config = parts.config
    about = [asdict(config.task), asdict(config.warm_up), config.run.seed, config.run.dtype, parts.text.digest()]
    text = json.dumps([*about, parts.folder.config.to_dict()], sort_keys=True, default=str)
    return sha256(text.encode()).hexdigest()[:16]


def _reference(parts: Parts, model: ShardedModel, folder: Path, *, resume: bool) -> Learner | None:
    """Collective: the policy as it was when RL began, if the loss looks at it."""
    if parts.algorithm.loss.divergence is Divergence.NONE:
        return None
    start = folder / "start"
    if not resume and parts.folder.has_weights:
        model.save(start, parts.text.files(), overwrite=True)
    frozen = build_model_of(parts)
    frozen.load(start)
    return build_learner(parts, frozen, lr=None)


def _source(parts: Parts, model: ShardedModel, folder: Path) -> Source:
    config, runtime, spec = parts.config, model.runtime, parts.folder.spec
    shape = ModelShape(
        family=parts.folder.family.model_type, num_layers=len(runtime.weights), num_experts=spec.num_experts,
        top_k=spec.top_k, vocabulary=parts.folder.config.vocab_size, tokenizer=parts.text.digest(),
    )  # fmt: skip
    if config.debug.replay:
        return RecordedSource(Path(config.debug.replay), parts.group, shape)
    record = None
    if config.debug.record:
        about = {"task": parts.task.name, "seed": config.run.seed}
        record = Recording(folder=Path(config.debug.record), model=shape, about=about)
    return EngineSource(
        build_rollout(parts, folder), parts.group, lambda: logical_weights(runtime, model.naming, model.dense()),
        num_held_out=min(config.run.evaluate_problems, parts.task.num_held_out), windowed=parts.algorithm.windowed,
        record=record,
    )  # fmt: skip


def _loop(config: TrainConfig) -> LoopSetting:
    run = config.run
    return LoopSetting(
        steps=run.steps, mini_batches=config.algorithm.mini_batches, epochs=config.algorithm.epochs,
        evaluate_every=run.evaluate_every, checkpoint_every=run.checkpoint_every,
        max_answer_tokens=config.rollout.max_answer_tokens,
    )  # fmt: skip
