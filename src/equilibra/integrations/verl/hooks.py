"""Hooks in verl's Megatron engine: wrappers around three of its functions.

    MegatronEngine.initialize               meanwhile, the planner is compiled; afterwards, MoE layers are balanced
    MegatronEngine.forward_backward_batch   begins and ends a pass, reports what its plan gains, and may verify it
    prepare_micro_batches                   afterwards, the pass is planned: all its routing is known

The last does not know its engine, so a context variable holds the one whose pass is running.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial, wraps
from types import ModuleType
from typing import Any

from equilibra.integrations.verl.contract import check_contract
from equilibra.integrations.verl.engine import BalancedEngine, balance_engine, warm_engine
from equilibra.integrations.verl.verify import verified

__all__ = ["hook"]

_running: ContextVar[BalancedEngine | None] = ContextVar("engine whose pass is running", default=None)
HOOKED = "equilibra_hooked"


def hook(verl: ModuleType) -> None:
    """Install the hooks in the Megatron engine's module, once."""
    if getattr(verl, HOOKED, False):
        return
    check_contract(importlib.import_module("verl").__version__)
    engine: Any = verl.MegatronEngine
    engine.initialize = _initialize(engine.initialize, verl)
    engine.forward_backward_batch = _pass(engine.forward_backward_batch)
    setattr(verl, "prepare_micro_batches", _planned(verl.prepare_micro_batches))  # noqa: B010 - mypy knows no such name
    setattr(verl, HOOKED, True)


def _initialize(initialize: Any, verl: ModuleType) -> Any:  # noqa: ANN401
    @wraps(initialize)
    def then_balance(self: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        warm_engine(self)
        result = initialize(self, *arguments, **options)
        self.equilibra = balance_engine(self, verl)
        return result

    return then_balance


def _pass(forward_backward_batch: Any) -> Any:  # noqa: ANN401
    @wraps(forward_backward_batch)
    def planned(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002 - verl's signature
        balanced: BalancedEngine | None = getattr(self, "equilibra", None)
        run = partial(forward_backward_batch, self, data, loss_function, forward_only)
        if balanced is None:
            return run()
        under_plan = partial(_under_plan, balanced, run, data, forward_only=forward_only)
        if forward_only or not balanced.to_verify:
            return balanced.report(under_plan())
        return balanced.report(verified(balanced, run, under_plan))

    return planned


def _under_plan(balanced: BalancedEngine, run: Callable[[], Any], data: Any, *, forward_only: bool) -> Any:  # noqa: ANN401
    balanced.begin(data, forward_only=forward_only)
    token = _running.set(balanced)
    try:
        return run()
    finally:
        _running.reset(token)
        balanced.end()


def _planned(prepare_micro_batches: Any) -> Any:  # noqa: ANN401
    @wraps(prepare_micro_batches)
    def then_plan(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        micro_batches, indices = prepare_micro_batches(*arguments, **options)
        if (balanced := _running.get()) is not None:
            balanced.plan(micro_batches)
        return micro_batches, indices

    return then_plan
