"""One rank of a training run: join the others, build, warm up or resume, train, save.

Every rank calls `run_worker` with the same configuration; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT identify it, as
under torchrun.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils import logging as transformers_logging

from equilibra.core.errors import InputError
from equilibra.core.placement import Cluster
from equilibra.execute.group import ExpertGroup, join_expert_group
from equilibra.execute.state.published import logical_weights
from equilibra.execute.steps.balancer import Balancer, BalancerSetting
from equilibra.execute.steps.gradients import check_replicated, clip_gradients
from equilibra.execute.steps.masters import float32_masters, masters_or_parameters
from equilibra.integrations.hf import ShardedModel
from equilibra.rl.learner import Learner, total_over
from equilibra.rl.loop import Critic, Trainer, train
from equilibra.rl.loss import Divergence
from equilibra.rl.mismatch import MismatchCheck, mismatch_limit, unit_roundoff
from equilibra.rl.observe import Observer
from equilibra.rl.recording import ModelShape, save_rollout
from equilibra.rl.rollout import EngineSource, RecordedSource, Source, share_of_rank
from equilibra.rl.tasks import TimedTask
from equilibra.rl.vocabulary import padded
from equilibra.rollout.pool import PoolOfRanks
from equilibra.train.build import Parts, build_learner, build_model_of, build_parts, build_rollout
from equilibra.train.config import TrainConfig
from equilibra.train.last_step import LastStep
from equilibra.train.state import State

FIRST_PROBLEM = 1 << 24
"""number of the first warm-up problem, far from those of RL"""
RAMP = 20
"""warm-up steps in which the learning rate rises"""


def run_worker(
    config: TrainConfig, folder: Path, *, resume: bool, observer: Observer, stop: Callable[[], bool],
    cut: Callable[[int], None] = lambda _step: None,
) -> None:  # fmt: skip
    """Train in a run folder that all ranks share.

    resume: continue from the folder's last checkpoint. stop: whether this rank was told to stop. cut: drops the metrics
    of this step and later ones. observer and cut matter on world rank 0 only.
    """
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    device = device_of(config)
    with joined_group(config, device) as group:
        observer.stage("start", step=0)
        parts = build_parts(config, group, device)
        model = build_model_of(parts)
        policy, critic, reference = _learners(parts, model, folder, observer, resume=resume)
        learners = [learner for learner in (policy, critic, reference) if learner is not None]
        source = source_of(parts, model, folder)
        state = State(folder, policy, critic, keep=config.run.keep, timeout_s=config.run.checkpoint_timeout_s)
        first = 0
        if resume:
            observer.stage("checkpoint", step=0)
            first, carried = state.load(windowed=source.carried is not None, say=observer.note)
            source.resume(carried)
        else:
            state.forget_halves()  # of an attempt that ended before its first checkpoint was complete
        for learner in learners:
            check_replicated(learner.model, learner.model.runtime)  # type: ignore[arg-type]
        cut(first)
        last = LastStep(parts, folder)

        def stopping() -> bool:
            """Collective: whether any rank was told to stop."""
            return bool(np.concatenate(group.gather(np.array([stop()]), what="asking whether to stop")).any())

        trainer = Trainer(
            steps=config.run.steps, evaluate_every=config.run.evaluate_every,
            checkpoint_every=config.run.checkpoint_every, mini_batches=config.algorithm.mini_batches,
            epochs=config.algorithm.epochs, max_answer_tokens=config.rollout.max_answer_tokens,
            places=config.rollout.prompts * config.rollout.answers if parts.algorithm.windowed else 0,
            source=source, check=_check(parts, source, observer), algorithm=parts.algorithm, policy=policy,
            critic=None if critic is None else Critic(critic), reference=reference,
            save=lambda step: state.save(step, source.carried), keep_record=last.keep, observer=observer, stop=stopping,
        )  # fmt: skip
        done = train(trainer, first)
        observer.stage("report", step=done)
        model.save(folder / "model", parts.text.files(), overwrite=True)
        last.write()
        state.close()
        if isinstance(source, EngineSource) and isinstance(source.rollout.engine, PoolOfRanks):
            source.rollout.engine.close()
        if isinstance(parts.task, TimedTask):
            parts.task.close()
        for learner in learners:
            learner.balancer.close()


def _learners(
    parts: Parts, model: ShardedModel, folder: Path, observer: Observer, *, resume: bool
) -> tuple[Learner, Learner | None, Learner | None]:
    """Collective: the policy; a value model that starts from its weights, if the algorithm needs values; and the policy
    at the start of RL, if the loss has a divergence from it.
    """
    optimizer, start = parts.config.optimizer, folder / "start"
    fresh = not resume and not parts.folder.has_weights
    compares = parts.algorithm.loss.divergence is not Divergence.NONE
    value = build_model_of(parts, value=True) if parts.algorithm.needs_values else None
    if fresh:
        _prepare(parts, model, observer)
    if (compares and not resume) or (value is not None and fresh):
        model.save(start, parts.text.files(), overwrite=True)
    if value is not None and fresh:
        value.load(start, head=False)
    policy, critic, reference = build_learner(parts, model, lr=optimizer.lr), None, None
    if value is not None:
        critic = build_learner(parts, value, lr=optimizer.value_lr, value=True)
    if compares:
        initial = build_model_of(parts)
        initial.load(start)
        reference = build_learner(parts, initial, lr=None)
    return policy, critic, reference


def device_of(config: TrainConfig) -> torch.device:
    """The device of this rank."""
    if config.run.device == "cpu" or (config.run.device == "auto" and not torch.cuda.is_available()):
        if config.balance.path in ("ipc", "both"):
            raise InputError(
                f"balance.path = {config.balance.path} needs GPUs, but the run is on cpu: use collective, host or auto"
            )
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("run.device is cuda, but torch finds no GPU: use cpu or auto")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    except RuntimeError as error:
        if "busy or unavailable" not in str(error):
            raise
        raise InputError(
            f"GPU {device.index} accepts no further process: its compute mode is exclusive (nvidia-smi -q -d COMPUTE); "
            "give every rank its own GPU, start MPS (nvidia-cuda-mps-control -d), or change the mode (nvidia-smi -c 0)"
        ) from error
    return device


@contextmanager
def joined_group(config: TrainConfig, device: torch.device) -> Iterator[ExpertGroup]:
    """Join the other ranks."""
    given = dist.is_initialized()  # by the program that called us
    world = dist.get_world_size() if given else int(os.environ.get("WORLD_SIZE", "1"))
    if world != config.cluster.num_processes:
        raise InputError(
            f"{world} processes were started, but cluster.nodes x ranks_per_node x groups is "
            f"{config.cluster.num_processes}: start that many, or change cluster.*"
        )
    if world > 1 and not given:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=config.run.timeout_s))
    cluster = Cluster(num_nodes=config.cluster.nodes, ranks_per_node=config.cluster.ranks_per_node)
    failed = True
    try:
        with join_expert_group(cluster, timeout_s=config.run.timeout_s) as group:
            yield group
        failed = False
    finally:
        nccl = dist.is_initialized() and dist.get_backend() == dist.Backend.NCCL
        if dist.is_initialized() and not given and not (failed and nccl):  # NCCL would wait for lost ranks
            dist.destroy_process_group()


def _prepare(parts: Parts, model: ShardedModel, observer: Observer) -> None:
    """Collective: warm up a fresh model, or load it from the cache."""
    setting = parts.config.warm_up
    cached = Path(setting.cache) / _warm_up_key(parts) if setting.cache else None
    if cached is not None and (cached / "config.json").is_file():
        model.load(cached)
    elif setting.steps:
        _warm_up(parts, model, observer)
        if cached is not None:
            model.save(cached, parts.text.files(), overwrite=True)


def _warm_up(parts: Parts, model: ShardedModel, observer: Observer) -> None:
    """Collective: supervised steps on right answers, so that a fresh model answers at all.

    Tokens are routed live and without an auxiliary loss, so the load grows as skewed as the model makes it. Apart from
    rounding, the weights do not depend on the number of ranks.
    """
    setting = parts.config.warm_up
    masters = float32_masters(model)
    learning = masters_or_parameters(model, masters)
    optimizer = torch.optim.AdamW(learning, lr=setting.lr, betas=(0.9, 0.99), weight_decay=0.0)
    static = BalancerSetting(tokens_per_rank=1, planner="static")
    with Balancer(model.runtime, static, optimizer=optimizer, masters=masters) as balancer:
        for step in range(setting.steps):
            observer.stage("warm-up", step=0, done=step, total=setting.steps)
            for options in optimizer.param_groups:
                options["lr"] = setting.lr * min(1.0, (step + 1) / RAMP)
            loss = _supervised_loss(parts, model, _own_problems(parts, FIRST_PROBLEM + step * setting.batch))
            loss.backward()  # type: ignore[no-untyped-call]
            balancer.finish_gradients(model)
            clip_gradients(model, model.runtime, 1.0)
            optimizer.step()
            optimizer.zero_grad()


def _own_problems(parts: Parts, first: int) -> list[tuple[Tensor, int]]:
    """(tokens, prompt length) of this rank's problems of a warm-up step, numbered from `first`."""
    share = share_of_rank(parts.config.warm_up.batch, parts.group.world_rank, parts.group.world_size)
    own = [parts.task.problem(first + i) for i in share]
    pairs = [(parts.text.prompt(problem.prompt), parts.text.answer(problem.answer)) for problem in own]
    return [(torch.cat([torch.from_numpy(q), torch.from_numpy(a)]), len(q)) for q, a in pairs]


def _supervised_loss(parts: Parts, model: ShardedModel, sequences: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Collective: this rank's share of the mean over all answer tokens."""
    inputs = padded(sequences, parts.text.pad, parts.device)
    count = total_over(model.runtime.group)(np.array([len(inputs.targets)], np.float64))
    hidden = model.hidden(inputs.tokens_BT, inputs.mask_BT).flatten(0, 1)[inputs.predicting]
    logs = model.head(hidden).log_softmax(dim=-1)
    right, any_token = logs.gather(1, inputs.targets[:, None]).sum(), logs.mean(dim=-1).sum()
    smoothing = parts.config.warm_up.smoothing
    return -((1 - smoothing) * right + smoothing * any_token) / float(count[0])


def _warm_up_key(parts: Parts) -> str:
    config = parts.config
    about = [asdict(config.task), asdict(config.warm_up), config.run.seed, config.run.dtype, parts.text.digest()]
    text = json.dumps([*about, parts.folder.config.to_dict()], sort_keys=True, default=str)
    return sha256(text.encode()).hexdigest()[:16]


def source_of(parts: Parts, model: ShardedModel, folder: Path) -> Source:
    """Where the run's answers come from."""
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
        record = partial(
            save_rollout, Path(config.debug.record), rank=parts.group.world_rank, world_size=parts.group.world_size,
            model=shape, about=about,
        )  # fmt: skip

    def weights() -> Iterator[tuple[str, Tensor]]:
        wait = partial(parts.patient.barrier, what="waiting for a rank that hands weights over")
        return logical_weights(runtime, model.naming, model.dense(), wait=wait)

    return EngineSource(
        build_rollout(parts, folder), parts.patient, weights,
        num_held_out=min(config.run.evaluate_problems, parts.task.num_held_out), windowed=parts.algorithm.windowed,
        record=record,
    )  # fmt: skip


def _check(parts: Parts, source: Source, observer: Observer) -> MismatchCheck | None:
    """Checks the engine's weights; None for a recording, which may be of any weights."""
    if not isinstance(source, EngineSource):
        return None
    rollout = parts.config.rollout
    roundoffs = (source.rollout.engine.roundoff, unit_roundoff(parts.dtype, parts.device.type))
    limit = rollout.mismatch_limit or mismatch_limit(
        roundoffs, num_layers=parts.folder.config.num_hidden_layers, temperature=rollout.temperature
    )
    return MismatchCheck(limit=limit, stop=rollout.mismatch == "stop", say=observer.note)
