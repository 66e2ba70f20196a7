"""Warm-up: supervised steps on right answers, so that a fresh model answers at all before it is rewarded.

Tokens are routed live to the homes of their experts, without an auxiliary loss: the skew that grows is the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equilibra.execute.group import ExpertGroup
from equilibra.execute.steps.balancer import Balancer, BalancerSetting
from equilibra.execute.steps.gradients import clip_gradients
from equilibra.execute.steps.masters import float32_masters, masters_or_parameters
from equilibra.rl.learner import Language, padded, total_over
from equilibra.rl.observe import Observer
from equilibra.rl.rollout import Words, share_of_rank
from equilibra.rl.tasks.task import Task

__all__ = ["WarmUpSetting", "warm_up"]

FIRST_PROBLEM = 1 << 24
"""numbers of the problems of warm-up are far from those of RL"""
RAMP = 20
"""steps in which the learning rate rises"""


@dataclass(frozen=True, kw_only=True)
class WarmUpSetting:
    """How long and how."""

    steps: int
    """supervised steps"""
    batch: int
    """problems of a step, over all ranks"""
    lr: float
    """learning rate"""
    smoothing: float = 0.0
    """share of the target that is spread over all tokens"""


def warm_up(
    model: Language, task: Task, words: Words, setting: WarmUpSetting, *, pad: int, device: torch.device,
    observer: Observer,
) -> None:  # fmt: skip
    """Collective: train on right answers. The same weights come out whatever the number of ranks, but for rounding."""
    assert isinstance(model, nn.Module)
    group = model.runtime.group
    masters = float32_masters(model)
    learning = masters_or_parameters(model, masters)
    optimizer = torch.optim.AdamW(learning, lr=setting.lr, betas=(0.9, 0.99), weight_decay=0.0)
    balancer = Balancer(
        model.runtime, BalancerSetting(tokens_per_rank=1, planner="static"), optimizer=optimizer, masters=masters
    )
    try:
        for step in range(setting.steps):
            observer.stage("warm-up", step=0, done=step, total=setting.steps)
            for options in optimizer.param_groups:
                options["lr"] = setting.lr * min(1.0, (step + 1) / RAMP)
            own = _own_problems(group, task, words, setting, step)
            loss = _loss(model, own, setting.smoothing, pad, device)
            loss.backward()  # type: ignore[no-untyped-call]
            balancer.finish_gradients(model)
            clip_gradients(model, model.runtime, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        balancer.close()


def _own_problems(
    group: ExpertGroup, task: Task, words: Words, setting: WarmUpSetting, step: int
) -> list[tuple[Tensor, int]]:
    first = FIRST_PROBLEM + step * setting.batch
    own = [task.problem(first + i) for i in share_of_rank(setting.batch, group.world_rank, group.world_size)]
    pairs = [(words.prompt(problem.prompt), words.answer(problem.answer)) for problem in own]
    return [(torch.cat([torch.from_numpy(q), torch.from_numpy(a)]), len(q)) for q, a in pairs]


def _loss(
    model: Language, sequences: Sequence[tuple[Tensor, int]], smoothing: float, pad: int, device: torch.device
) -> Tensor:
    """Collective: this rank's share of the mean over all answer tokens."""
    inputs = padded(sequences, pad, device)
    count = total_over(model.runtime.group)(torch.tensor([len(inputs.targets)]).double().numpy())
    hidden = model.hidden(inputs.tokens_BT, inputs.mask_BT).flatten(0, 1)[inputs.predicting]
    logs = model.head(hidden).log_softmax(dim=-1)
    right, any_token = logs.gather(1, inputs.targets[:, None]).sum(), logs.mean(dim=-1).sum()
    return -((1 - smoothing) * right + smoothing * any_token) / float(count[0])
