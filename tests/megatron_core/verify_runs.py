"""`verify` on a small GPTModel under Megatron's schedule, DDP and DistributedOptimizer: a user's own micro-batches."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from tests.megatron_core import layer_runs, models
from tests.megatron_core.gpt_runs import Case, Training

from equilibra.core.errors import EquilibraError
from equilibra.core.plan import Stage
from equilibra.integrations.megatron import MegatronSetting, balance, verify


def verified(case: Case) -> dict[str, Any]:
    """Two steps verified, with an update between them: tables, what was raised, and what the plans did."""
    models.join(case.expert_parallel, case.pipeline, tensor=case.tensor, context=case.context)
    training = Training(case.options, num_layers=case.num_layers, overlap=case.overlap, gather=case.gather)
    training.balance(
        case.homes, spare_slots=case.spare_slots, standing_slots=case.standing_slots, per_node=case.per_node
    )
    if case.sabotage == "leave gradients behind":
        sys.modules[verify.__module__].exchange = lambda *_: ()
    else:
        layer_runs.break_something(case.sabotage)
    said: list[str] = []
    found: dict[str, Any] = {"said": said, "error": "", "differences": [], "moves": 0, "copies": 0}
    for number in range(2):
        routing = training.routing(number)
        run = partial(training.passes, number, routing)
        try:
            found["differences"] += verify(training.balancer, training.model, routing, run, say=said.append)
        except EquilibraError as error:
            found["error"] = f"{type(error).__name__}: {error}"
            break
        plan = training.balancer._last.plan
        found["moves"] += plan.migration.num_moves
        found["copies"] += plan.stages[Stage.UPDATE].num_copies + plan.standing.num_copies
        training.optimizer.step()
    return found


def refused() -> list[str]:
    """What cannot be verified."""
    models.join(2)
    said = []
    for options, setting in (({}, MegatronSetting(mode="live")), ({"hidden_dropout": 0.1}, MegatronSetting())):
        model = models.gpt(models.config(**options))
        try:
            verify(balance(model, setting), model, [], lambda: torch.zeros(1))
            said.append("nothing")
        except EquilibraError as error:
            said.append(str(error))
    return said
