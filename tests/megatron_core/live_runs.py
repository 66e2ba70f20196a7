"""A GPTModel whose routers choose as they are, without replay: as it is, and planned as every forward begins."""

from __future__ import annotations

from typing import Any

import torch
from tests.megatron_core import layer_runs, models
from tests.megatron_core.gpt_runs import Training, inputs

from equilibra.core.errors import InputError
from equilibra.cost.rates import Rates
from equilibra.integrations.megatron import MegatronSetting, balance

SKEW = 3.0


class LiveTraining(Training):
    """A model without routing replay."""

    def __init__(self, options: dict[str, Any], *, num_layers: int = 2, overlap: bool = False) -> None:
        options = {**options, "moe_enable_routing_replay": False}
        super().__init__(options, num_layers=num_layers, overlap=overlap)
        with torch.no_grad():  # some experts are chosen more often
            for layer in self.layers:
                layer.router.weight *= torch.linspace(0.2, SKEW, models.NUM_EXPERTS)[:, None]

    def balance_live(self, *, ranks_per_node: int | None = None) -> LiveTraining:
        setting = MegatronSetting(mode="live", spare_slots=2, rates=Rates.free(), ranks_per_node=ranks_per_node)
        self.live = balance(self.model, setting, optimizer=self.optimizer)
        return self

    def _replayed(self, model: Any, number: int, _routing: Any) -> Any:
        out = model(*inputs(number, self._begun))
        self._begun += 1
        return out, lambda tensor: (tensor.mean(), {"loss": tensor.detach().mean()})


class HistoryTraining(LiveTraining):
    """Planned from past steps."""

    def balance_history(self, *, moves: bool) -> HistoryTraining:
        setting = MegatronSetting(mode="history", standing_slots=2, history_steps=2, rates=Rates.free())
        self.live = balance(self.model, setting, optimizer=self.optimizer if moves else None)
        return self

    def step(self, number: int, **options: Any) -> float:
        if getattr(self, "live", None) is not None:
            self.steps.append(self.live.begin_from_past_steps())
        return super().step(number, **options)


def history_against_plain(
    options: dict[str, Any], expert_parallel: int, sabotage: str | None = None, *, moves: bool = False,
    overlap: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Losses of four steps, weights afterwards, and what was done."""
    models.join(expert_parallel)
    plain = LiveTraining(options)
    wanted = [plain.step(number) for number in range(4)]
    training = HistoryTraining(options, overlap=overlap).balance_history(moves=moves)
    layer_runs.break_something(sabotage)
    found = [training.step(number) for number in range(4)]
    training.live.end()
    training.balancer = training.live  # for the numbers of experts
    weights, steps = training.weights(), training.steps
    static, planned = training.live.history.take_imbalance()
    copies = training.live.copies.found
    return {
        "plain": wanted, "balanced": found, "first": steps[0], "static": static, "planned": planned,
        "standing": [step.plan.standing.num_copies for step in steps[1:]],
        "moves": sum(step.plan.migration.num_moves for step in steps[1:]), "memory": copies.memory_bytes(),
        "weights": max(float((value - weights[name]).abs().max()) for name, value in plain.weights().items()),
    }  # fmt: skip


def against_plain(options: dict[str, Any], expert_parallel: int, sabotage: str | None = None) -> dict[str, Any]:
    """Losses of three steps, weights afterwards, and what was done."""
    models.join(expert_parallel)
    plain = LiveTraining(options)
    wanted = [plain.step(number) for number in range(3)]
    training = LiveTraining(options).balance_live()
    layer_runs.break_something(sabotage)
    found = [training.step(number) for number in range(3)]
    weights = training.weights()
    live = training.live.live
    static, planned = live.take_imbalance()
    try:
        training.live.begin([])
        said = "nothing"
    except InputError as error:
        said = str(error)
    return {
        "plain": wanted, "balanced": found, "copies": live.num_copies, "static": static, "planned": planned,
        "said": said, "again": live.take_imbalance(),
        "weights": max(float((value - weights[name]).abs().max()) for name, value in plain.weights().items()),
    }  # fmt: skip
