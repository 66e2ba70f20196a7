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

    def __init__(self, options: dict[str, Any], *, num_layers: int = 2) -> None:
        super().__init__({**options, "moe_enable_routing_replay": False}, num_layers=num_layers)
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
