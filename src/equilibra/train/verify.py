"""Does balancing change a run's numbers? Run the passes of a step with and without balancing, and compare.

Both use the same weights, answers and routing; nothing is trained. Compared are the log-probabilities of the answers
and the gradients of a policy loss. Its advantages are random, because real ones may all be zero. Under another plan
ranks run other sequences, so results agree up to rounding (`integrations.differences`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import InputError
from equilibra.execute.steps.balancer import Balancer
from equilibra.integrations.differences import Difference, apart, gradient_limit, largest, of_all_ranks
from equilibra.integrations.hf import ShardedModel
from equilibra.rl.algorithms import Target
from equilibra.rl.engine import Sample
from equilibra.rl.learner import Batch, Learner, total_over
from equilibra.rl.loop import MiniBatches, policy_columns, policy_loss_of
from equilibra.rl.mismatch import mismatch_limit, unit_roundoff
from equilibra.rl.observe import Clock, Observer
from equilibra.train.build import Parts, balancer_setting, build_model_of, build_parts
from equilibra.train.config import TrainConfig
from equilibra.train.worker import device_of, joined_group, source_of

FILE = "verify.json"


def read_differences(folder: Path) -> tuple[list[Difference], dict[str, Any]]:
    """What `run_verify` found, and what it compared."""
    found = json.loads((folder / FILE).read_text())
    return [Difference(**one) for one in found.pop("differences")], found


def run_verify(config: TrainConfig, folder: Path, *, observer: Observer, **_others: object) -> None:
    """Collective: compare, and write the result to the folder on world rank 0. Takes the arguments of `run_worker`."""
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
    off = [np.abs(a - b) for a, b in zip(plain.logprobs, balanced.logprobs, strict=True)]
    flat = np.concatenate([np.zeros(0), *off])
    summed, count = total(np.array([flat.sum(), flat.size])).tolist()
    yield Difference(
        what="log-probabilities, mean", found=summed / max(count, 1.0),
        allowed=mismatch_limit([roundoff], num_layers=layers, temperature=parts.config.rollout.temperature),
    )  # fmt: skip
    if set(plain.gradients) != set(balanced.gradients):
        raise InputError("some weights have a gradient only with or only without balancing: is a part of them frozen?")
    found: dict[str, dict[str, float]] = {kind: {} for kind in ("experts", "routers", "other weights")}
    for name, one in plain.gradients.items():
        kind, other = _kind(name), balanced.gradients[name]
        if kind == "experts":  # [H, ...] of this rank
            first = parts.group.rank * len(one)
            names = [f"{name}, expert {first + slot}" for slot in range(len(one))]
            found[kind] |= dict(zip(names, apart(one, other), strict=True))
        else:
            found[kind][name] = apart([one], [other])[0]
    allowed = gradient_limit(roundoff, num_layers=layers)
    yield from of_all_ranks([largest(f"gradients of {kind}", by_name, allowed) for kind, by_name in found.items()])


def _kind(name: str) -> str:
    if ".experts." in name or ".weights." in name:
        return "experts"
    return "routers" if ".router." in name or ".gate." in name else "other weights"
