"""Steps of NeMo-RL's stand-in, as it is and with planned passes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from tests.megatron_core import layer_runs, models, nemo_stand_in
from tests.megatron_core.gpt_runs import Training
from torch import Tensor

from equilibra.cost.rates import Rates
from equilibra.integrations.megatron import MegatronSetting, visits
from equilibra.integrations.nemo_rl import training as nemo

RUN = visits.MegatronVisits.run


@dataclass(frozen=True, kw_only=True)
class Case:
    options: dict[str, Any] = field(default_factory=dict)
    """of Megatron's configuration"""
    unrouted: float = 0.0
    """share of tokens without a route"""
    sabotage: str | None = None


def modules() -> dict[str, ModuleType]:
    """NeMo-RL's modules, as far as the adapter looks at them."""
    found = {name: ModuleType(name) for name in (nemo.TRAIN, nemo.REPLAY, nemo.WORKER)}
    for module in (found[nemo.TRAIN], found[nemo.WORKER]):
        setattr(module, nemo.PASS, nemo_stand_in.megatron_forward_backward)
    setattr(found[nemo.REPLAY], nemo.ROUTES, nemo_stand_in.build_router_replay_assignments)
    return found


def against_plain(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """Losses of all passes and weights after two steps, planned and not; rows of this rank; metrics."""
    models.join(2)
    return {name: _against_plain(case) for name, case in cases.items()}


def _against_plain(case: Case) -> dict[str, Any]:
    plain = nemo_stand_in.Worker(Training(case.options), nemo_stand_in.megatron_forward_backward, case.unrouted)
    of_nemo, rows = modules(), list[int]()
    sys.modules.update(of_nemo)
    passes = nemo.install(MegatronSetting(spare_slots=2, rates=Rates.free()))
    worker = nemo_stand_in.Worker(Training(case.options), getattr(of_nemo[nemo.WORKER], nemo.PASS), case.unrouted)

    def counted(self: Any, homes: Any, of_rank: Tensor, count: Tensor, probs: Tensor) -> Any:
        rows.append(int(count.sum()))
        return RUN(self, homes, of_rank, count, probs)

    visits.MegatronVisits.run = counted  # type: ignore[method-assign]
    layer_runs.break_something(case.sabotage)
    for step in range(2):
        plain.train(step)
        worker.train(step)
    visits.MegatronVisits.run = RUN  # type: ignore[method-assign]
    weights = worker.training.weights()
    return {
        "plain": plain.said, "planned": worker.said, "rows": rows, "metrics": passes.metrics,
        "weights": max(
            float((value - weights[name]).abs().max()) for name, value in plain.training.weights().items()
        ),
    }  # fmt: skip
