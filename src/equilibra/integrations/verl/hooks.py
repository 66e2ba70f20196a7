"""Hooks in verl's Megatron engine: wrappers around four of its functions.

    MegatronEngine.initialize               meanwhile, the planner is compiled; afterwards, MoE layers are balanced
    MegatronEngine.forward_backward_batch   begins and ends a pass, and reports what its plan gains
    prepare_micro_batches                   afterwards, the pass is planned: all its routing is known
    rearrange_micro_batches                 afterwards, with `spread_sequences`, sequences change micro-batches

The last two do not know their engine, so a context variable holds the one whose pass is running.

`spread_sequences` swaps sequences of similar cost between a rank's micro-batches (`plan/spread.py`) where that evens
out the load of the expert-parallel ranks. Number, order and token limit of micro-batches stay verl's. All processes
with the same sequences (tensor, context and pipeline parallelism) find the same swaps. Beside planned copies it gains
nothing measurable (`benchmarks/verl_micro_batches.py`), so it is off by default.
"""

from __future__ import annotations

import importlib
from contextvars import ContextVar
from functools import wraps
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.cluster import Cluster
from equilibra.core.load import SequenceLoad
from equilibra.core.placement import contiguous
from equilibra.integrations.executor.balancer import count_routing
from equilibra.integrations.verl.contract import MICRO_BATCHES, check_contract
from equilibra.integrations.verl.engine import BalancedEngine, balance_engine, warm_engine
from equilibra.plan.pack import DENSE_COST
from equilibra.plan.spread import spread_experts

__all__ = ["hook", "spread", "spread_partitions"]

_running: ContextVar[BalancedEngine | None] = ContextVar("engine whose pass is running", default=None)
HOOKED = "equilibra_hooked"
SIMILAR = 0.05
"""sequences may be swapped if their costs differ by less than this share of the mean"""


def hook(verl: ModuleType) -> None:
    """Install the hooks in the Megatron engine's module, once."""
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
        warm_engine(self)
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
        token = _running.set(balanced)
        try:
            output = forward_backward_batch(self, data, loss_function, forward_only)
        finally:
            _running.reset(token)
            balanced.end()
        return balanced.report(output)

    return planned


def _planned(prepare_micro_batches: Any) -> Any:  # noqa: ANN401
    @wraps(prepare_micro_batches)
    def then_plan(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        micro_batches, indices = prepare_micro_batches(*arguments, **options)
        if (balanced := _running.get()) is not None:
            balanced.plan(micro_batches)
        return micro_batches, indices

    return then_plan


def _spread(rearrange_micro_batches: Any) -> Any:  # noqa: ANN401
    @wraps(rearrange_micro_batches)
    def then_spread(batch: Any, max_token_len: int, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        made = rearrange_micro_batches(batch, max_token_len, *arguments, **options)
        balanced = _running.get()
        if balanced is None or not balanced.setting.spread_sequences or not balanced.replays:
            return made
        return spread(balanced, batch, max_token_len, made, force_group_size=options.get("force_group_size", 1))

    return then_spread


def spread(
    balanced: BalancedEngine, batch: Any, max_token_len: int, made: tuple[Any, Any], *, force_group_size: int = 1  # noqa: ANN401
) -> tuple[Any, Any]:  # fmt: skip
    """The result of `rearrange_micro_batches` with sequences swapped; unchanged where groups must stay together."""
    micro_batches, partitions = made
    routed = batch["routed_experts"]
    if force_group_size > 1 or len(partitions) < 2 or not routed.is_nested:
        return made
    num_layers, top_k = routed.shape[2:]  # those of other pipeline stages too
    ids = [[part[:, layer] for layer in range(num_layers)] for part in routed.cpu().unbind()]
    num_experts, cluster = balanced.balancer.model.num_experts, balanced.balancer.group.cluster
    sequences = SequenceLoad(
        tokens_SLE=count_routing(ids, num_layers=num_layers, num_experts=num_experts, top_k=top_k),
        length_of_sequence=batch["input_ids"].offsets().diff().cpu().numpy().astype(np.int64),
    )
    changed = spread_partitions(sequences, cluster, partitions, max_token_len)
    return [
        micro_batch if new == old else balanced.verl.tu.index_select_tensor_dict(batch, new)
        for micro_batch, old, new in zip(micro_batches, partitions, changed, strict=True)
    ], changed


def spread_partitions(
    sequences: SequenceLoad, cluster: Cluster, partitions: list[list[int]], max_token_len: int
) -> list[list[int]]:
    """The sequences of each micro-batch after swaps: as many as before, within the token limit."""
    micro_batch_of_sequence: NDArray[np.int64] = np.empty(sequences.num_sequences, np.int64)
    for micro_batch, members in enumerate(partitions):
        micro_batch_of_sequence[members] = micro_batch
    lengths = sequences.length_of_sequence
    cost = DENSE_COST * lengths + lengths**2
    homes = contiguous(cluster, num_layers=sequences.num_layers, num_experts=sequences.num_experts)
    rounded = cost // max(int(SIMILAR * cost.mean()), 1)
    spread_experts(sequences, homes, micro_batch_of_sequence, rounded, len(partitions), 1, max_token_len)
    return [np.flatnonzero(micro_batch_of_sequence == m).tolist() for m in range(len(partitions))]
