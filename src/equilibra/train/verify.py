"""Does balancing change a run's numbers? Run its passes with and without it, and compare.

Both times the weights, the answers and their routing are the same, and nothing is trained. Compared are the
log-probabilities of the answers and the gradients of a policy loss with random advantages, which are never all zero.
Ranks run other sequences under another plan, so results agree up to rounding. The gradient of a group of weights may
differ by

    PER_LAYER x u x sqrt(layers)        relative to its norm; u: unit roundoff of the run's dtype

for an expert relative to the root mean square over the experts of its layer and part, as few tokens may reach it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import InputError
from equilibra.execute.steps.balancer import Balancer
from equilibra.integrations.hf import ShardedModel
from equilibra.rl.algorithms.algorithm import Target
from equilibra.rl.learner import Batch, Learner, total_over
from equilibra.rl.mismatch import mismatch_limit, unit_roundoff
from equilibra.rl.observe import Clock, Observer
from equilibra.rl.sample import Sample
from equilibra.rl.updates import MiniBatches, policy_columns, policy_loss_of
from equilibra.train.build import Parts, balancer_setting, build_model_of, build_parts
from equilibra.train.config import TrainConfig
from equilibra.train.worker import device_of, joined_group, source_of

__all__ = ["FILE", "Difference", "read_differences", "run_verify"]

FILE = "verify.json"
PER_LAYER = 16.0
"""relative difference of a gradient that one layer explains, in unit roundoffs"""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far two passes are apart in one respect."""

    what: str
    found: float
    allowed: float
    """what rounding explains"""

    @property
    def is_rounding(self) -> bool:
        return self.found <= self.allowed


def read_differences(folder: Path) -> tuple[list[Difference], dict[str, Any]]:
    """What `run_verify` found, and what it compared."""
    found = json.loads((folder / FILE).read_text())
    return [Difference(**one) for one in found.pop("differences")], found


def run_verify(
    config: TrainConfig, folder: Path, *, resume: bool, observer: Observer, stop: Callable[[], bool],
    say: Callable[[str], None] = print, cut: Callable[[int], None] = lambda _step: None,
) -> None:  # fmt: skip
    """Collective: compare, and write the result to the folder on world rank 0. Arguments as of `run_worker`."""
    del resume, stop, say, cut
    device = device_of(config)
    with joined_group(config, device) as group:
        parts = build_parts(config, group, device)
        model = build_model_of(parts)
        source = source_of(parts, model, folder)
        observer.stage("weights", step=0)
        source.new_weights(0)
        samples = source.samples(0, version=0, clock=Clock(observer, 0))
        observer.stage("update", step=0)
        plain, _ = _passes(parts, model, samples, "static")
        balanced, batch = _passes(parts, model, samples, config.balance.planner)
        total = total_over(group)
        about = {
            "planner": config.balance.planner, "dtype": config.run.dtype, "ranks": group.world_size,
            "sequences": int(total(np.array([len(samples)]))[0]),
            "imbalance_static": batch.step.static_imbalance, "imbalance": batch.step.planned_imbalance,
        }  # fmt: skip
        found = {"differences": [asdict(one) for one in _compared(parts, plain, balanced)], **about}
        if group.world_rank == 0:
            (folder / FILE).write_text(json.dumps(found))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Passes:
    logprobs: list[NDArray[np.float64]]
    """of own samples"""
    gradients: dict[str, Tensor]
    """by parameter; experts are stacked"""


class _Keep(torch.optim.Optimizer):
    """Keeps the gradients of a step instead of taking it."""

    def __init__(self, model: ShardedModel) -> None:
        super().__init__(model.parameters(), {})
        self.model, self.found = model, dict[str, Tensor]()

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        del closure
        named = self.model.named_parameters()
        self.found = {name: value.grad.detach().double() for name, value in named if value.grad is not None}


def _passes(parts: Parts, model: ShardedModel, samples: Sequence[Sample], planner: str) -> tuple[_Passes, Batch]:
    """Collective: log-probabilities and gradients under a planner. Homes stay: the balancer gets no optimizer."""
    keep = _Keep(model)
    with Balancer(model.runtime, balancer_setting(parts.config, planner)) as balancer:
        learner = Learner(
            model=model, balancer=balancer, optimizer=keep, pad=parts.text.pad, device=parts.device,
            temperature=parts.config.rollout.temperature, max_norm=float("inf"),
        )  # fmt: skip
        minis = MiniBatches.of(samples, 1, 1)
        batch = learner.begin(samples, minis.of_sample)
        old = batch.logprobs()
        rng = np.random.default_rng([parts.config.run.seed, parts.group.world_rank])
        targets = [Target(advantages=rng.normal(size=numbers.size)) for numbers in old]
        total, algorithm = total_over(parts.group), parts.algorithm
        longest = parts.config.rollout.max_answer_tokens
        batch.give(policy_columns(samples, algorithm, targets, old, old, minis, total, longest))
        batch.update(0, partial(policy_loss_of, algorithm.loss))
    return _Passes(logprobs=old, gradients=keep.found), batch


def _compared(parts: Parts, plain: _Passes, balanced: _Passes) -> Iterator[Difference]:
    """Collective: log-probabilities, then gradients by kind of weight; the same on every rank."""
    roundoff = unit_roundoff(parts.dtype, parts.device.type)
    layers = parts.folder.config.num_hidden_layers
    total = total_over(parts.group)
    apart = [np.abs(a - b) for a, b in zip(plain.logprobs, balanced.logprobs, strict=True)]
    flat = np.concatenate([np.zeros(0), *apart])
    summed, count = total(np.array([flat.sum(), flat.size])).tolist()
    yield Difference(
        what="log-probabilities, mean", found=summed / max(count, 1.0),
        allowed=mismatch_limit([roundoff], num_layers=layers, temperature=parts.config.rollout.temperature),
    )  # fmt: skip
    allowed = PER_LAYER * roundoff * sqrt(layers)
    if set(plain.gradients) != set(balanced.gradients):
        raise InputError("some weights have a gradient only with or only without balancing: is a part of them frozen?")
    worst: dict[str, float] = {}
    for name, one in plain.gradients.items():
        off = balanced.gradients[name] - one
        kind = _kind(name)
        if kind == "experts":  # [H, ...] of this rank
            norms_2H = torch.stack([part.flatten(1).norm(dim=1) for part in (one, off)])
            size = float(norms_2H[0].square().mean().sqrt())
            found = float(norms_2H[1].max()) / size if size else float(norms_2H[1].max())
        else:
            found = float(off.norm()) / (float(one.norm()) or 1.0)
        worst[kind] = max(worst.get(kind, 0.0), found)
    kinds = ("experts", "routers", "other weights")
    every = parts.group.gather(np.array([[worst.get(kind, 0.0) for kind in kinds]]), what="comparing gradients")
    largest = np.concatenate(every).max(axis=0).tolist()
    yield from (
        Difference(what=f"gradients of {kind}", found=found, allowed=allowed)
        for kind, found in zip(kinds, largest, strict=True)
    )


def _kind(name: str) -> str:
    if ".experts." in name or ".weights." in name:
        return "experts"
    return "routers" if ".router." in name or ".gate." in name else "other weights"
