"""Hooks in verl's Megatron engine: four names are replaced by functions that call them.

    MegatronEngine.initialize               then the model's MoE layers are balanced
    MegatronEngine.forward_backward_batch   a pass begins, ends, and says what its plan is worth
    prepare_micro_batches                   then the pass is planned: all its routing is known
    rearrange_micro_batches                 if sequences are to be spread over micro-batches

The last two are functions that do not know their engine: the one whose pass is under way.
"""

from __future__ import annotations

import importlib
from contextvars import ContextVar
from functools import wraps
from types import ModuleType
from typing import Any

from equilibra.integrations.verl.contract import MICRO_BATCHES, check_contract
from equilibra.integrations.verl.engine import BalancedEngine, balance_engine
from equilibra.integrations.verl.micro_batches import spread

__all__ = ["hook"]

_under_way: ContextVar[BalancedEngine | None] = ContextVar("engine whose pass is under way", default=None)
HOOKED = "equilibra_hooked"


def hook(verl: ModuleType) -> None:
    """Put the hooks into the module of the Megatron engine, once."""
    if getattr(verl, HOOKED, False):
        return
    check_contract(importlib.import_module("verl").__version__)
    utils = importlib.import_module(MICRO_BATCHES)
    engine: Any = verl.MegatronEngine
    engine.initialize = _initialize(engine.initialize, verl)
    engine.forward_backward_batch = _pass(engine.forward_backward_batch)
    setattr(verl, "prepare_micro_batches", _planned(verl.prepare_micro_batches))  # noqa: B010 - mypy knows no such name
    setattr(utils, "rearrange_micro_batches", _spread(utils.rearrange_micro_batches))  # noqa: B010
    setattr(verl, HOOKED, True)


def _initialize(initialize: Any, verl: ModuleType) -> Any:  # noqa: ANN401
    @wraps(initialize)
    def then_balance(self: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        result = initialize(self, *arguments, **options)
        self.equilibra = balance_engine(self, verl)
        return result

    return then_balance


def _pass(forward_backward_batch: Any) -> Any:  # noqa: ANN401
    @wraps(forward_backward_batch)
    def planned(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002 - verl's signature
        balanced: BalancedEngine | None = getattr(self, "equilibra", None)
        if balanced is None:
            return forward_backward_batch(self, data, loss_function, forward_only)
        balanced.begin(data, forward_only=forward_only)
        token = _under_way.set(balanced)
        try:
            output = forward_backward_batch(self, data, loss_function, forward_only)
        finally:
            _under_way.reset(token)
            balanced.end()
        return balanced.report(output)

    return planned


def _planned(prepare_micro_batches: Any) -> Any:  # noqa: ANN401
    @wraps(prepare_micro_batches)
    def then_plan(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        micro_batches, indices = prepare_micro_batches(*arguments, **options)
        if (balanced := _under_way.get()) is not None:
            balanced.plan(micro_batches)
        return micro_batches, indices

    return then_plan


def _spread(rearrange_micro_batches: Any) -> Any:  # noqa: ANN401
    @wraps(rearrange_micro_batches)
    def then_spread(batch: Any, max_token_len: int, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        made = rearrange_micro_batches(batch, max_token_len, *arguments, **options)
        balanced = _under_way.get()
        if balanced is None or not balanced.setting.spread_sequences or not balanced.replays:
            return made
        return spread(balanced, batch, max_token_len, made, force_group_size=options.get("force_group_size", 1))

    return then_spread
