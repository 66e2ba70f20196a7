"""A GPTModel whose routers choose as they are, without replay: as it is, and planned live or from past steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tests.megatron_core import layer_runs, models
from tests.megatron_core.gpt_runs import Training, inputs

from equilibra.core.errors import InputError
from equilibra.cost.rates import Rates
from equilibra.integrations.megatron import MegatronSetting, balance

SKEW = 3.0
STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train without replay."""

    mode: str = "live"
    expert_parallel: int = 4
    per_node: int | None = None
    """expert-parallel ranks that count as a node"""
    options: dict[str, Any] = field(default_factory=dict)
    """of Megatron's configuration"""
    moves: bool = False
    """homes may move"""
    pipeline: int = 1
    num_layers: int = 2
    overlap: bool = False
    """gradients are reduced during backward"""
    gives_optimizer: bool = True
    """to `balance`; its steps then plan the next one in the background"""
    begins: int = STEPS
    """steps that are begun; later ones forget to"""
    sabotage: str | None = None


class LiveTraining(Training):
    """A model without routing replay."""

    def __init__(self, options: dict[str, Any], **shape: Any) -> None:
        super().__init__({**options, "moe_enable_routing_replay": False}, **shape)
        with torch.no_grad():  # some experts are chosen more often
            for layer in self.layers:
                layer.router.weight *= torch.linspace(0.2, SKEW, models.NUM_EXPERTS)[:, None]

    def _replayed(self, model: Any, number: int, _routing: Any) -> Any:
        out = model(*inputs(number, self._begun))
        self._begun += 1
        return out, lambda tensor: (tensor.mean(), {"loss": tensor.detach().mean()})


def against_plain(case: Case) -> dict[str, Any]:
    """Losses of a few steps, weights afterwards, and what was done."""
    models.join(case.expert_parallel, case.pipeline)
    plain = LiveTraining(case.options, num_layers=case.num_layers)
    wanted = [plain.step(number) for number in range(STEPS)]
    training = LiveTraining(case.options, num_layers=case.num_layers, overlap=case.overlap)
    setting = MegatronSetting(
        mode=case.mode, rates=Rates.free(), history_steps=2, ranks_per_node=case.per_node,
        max_moves_per_layer=-1 if case.moves else 0,
    )  # fmt: skip
    balancer = balance(training.model, setting, optimizer=training.optimizer if case.gives_optimizer else None)
    layer_runs.break_something(case.sabotage)
    if case.sabotage == "keep old standing copies":
        del training.optimizer.step
    found, begun, observed = [], [], []
    for number in range(STEPS):
        if number < case.begins:
            begun.append(balancer.begin_from_past_steps())
        found.append(training.step(number))
        if not case.gives_optimizer and number % 2:
            balancer.prepare_from_past_steps()  # or else `begin` does it
        if balancer.live is not None:
            observed.append(balancer.live.take_imbalance())
    balancer.end()
    training.balancer = balancer  # for the numbers of experts
    weights, steps = training.weights(), [step for step in begun if step is not None]
    copies = balancer.copies.found
    return {
        "plain": wanted, "balanced": found, "layers": len(training.layers),
        "begun": [step is not None for step in begun],
        "standing": [step.plan.standing.num_copies for step in steps],
        "flash": balancer.live.num_copies if balancer.live else 0,
        "observed": observed if balancer.live else [balancer.history.take_imbalance()],
        "again": (balancer.live or balancer.history).take_imbalance(),
        "moves": sum(step.plan.migration.num_moves for step in steps),
        "memory": copies.memory_bytes() if copies else {}, "said": said_by(balancer),
        "weights": max(float((value - weights[name]).abs().max()) for name, value in plain.weights().items()),
    }  # fmt: skip


def said_by(balancer: Any) -> str:
    try:
        balancer.begin([])
    except InputError as error:
        return str(error)
    return "nothing"
