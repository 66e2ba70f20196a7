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
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.cluster import Cluster
from equilibra.core.load import SequenceLoad
from equilibra.core.placement import contiguous
from equilibra.integrations.planned.counts import count_routing
from equilibra.integrations.verl.contract import MICRO_BATCHES, check_contract
from equilibra.integrations.verl.engine import BalancedEngine, balance_engine
from equilibra.plan.pack import DENSE_COST
from equilibra.plan.spread import spread_experts

if TYPE_CHECKING:
    from equilibra.integrations.verl.engine import BalancedEngine

__all__ = ["hook", "loads_of", "spread", "spread_partitions"]

# Sequences spread over a rank's micro-batches, so that no micro-batch has the same hot experts throughout.
#
# Symbols: S sequences, L layers, E experts.
#
# verl makes the micro-batches: how many there are on all data-parallel ranks, the token limit, their order. Then
# sequences of like cost are swapped between micro-batches of this rank (`plan/spread.py`), where that brings the load
# of
# every expert-parallel rank closer to its share and keeps the limit. All processes that hold the same sequences
# (tensor,
# context and pipeline parallelism) find the same. With planned copies it brings nothing that could be measured
# (`benchmarks/verl_micro_batches.py`), so it is off unless asked for.


LIKE = 0.05
"""sequences whose costs differ by less than this share of a mean sequence may be swapped"""


def spread(
    balanced: BalancedEngine, batch: Any, max_token_len: int, made: tuple[Any, Any], *, force_group_size: int = 1  # noqa: ANN401
) -> tuple[Any, Any]:  # fmt: skip
    """What `rearrange_micro_batches` returned, with sequences swapped; as it was where groups must stay together."""
    micro_batches, partitions = made
    if force_group_size > 1 or len(partitions) < 2 or not batch["routed_experts"].is_nested:
        return made
    sequences = loads_of(batch["routed_experts"], batch["input_ids"], balanced.balancer.num_experts)
    cluster = balanced.balancer.group.cluster
    changed = spread_partitions(sequences, cluster, partitions, max_token_len)
    return [
        micro_batch if new == old else balanced.verl.tu.index_select_tensor_dict(batch, new)
        for micro_batch, old, new in zip(micro_batches, partitions, changed, strict=True)
    ], changed


def loads_of(routed: Any, input_ids: Any, num_experts: int) -> SequenceLoad:  # noqa: ANN401 - jagged tensors
    """Counts of every sequence in all layers that were recorded; those of other pipeline stages too."""
    layers, top_k = routed.shape[2:]
    by_sequence = [[part[:, layer] for layer in range(layers)] for part in routed.cpu().unbind()]
    counts = count_routing(by_sequence, num_layers=layers, num_experts=num_experts, top_k=top_k)
    lengths = input_ids.offsets().diff().cpu().numpy().astype(np.int64)
    return SequenceLoad(tokens_SLE=counts, length_of_sequence=lengths)


def spread_partitions(
    sequences: SequenceLoad, cluster: Cluster, partitions: list[list[int]], max_token_len: int
) -> list[list[int]]:
    """Lists of sequences, one for each micro-batch, with as many in each as before, and never above the limit."""
    micro_batch_of_sequence: NDArray[np.int64] = np.empty(sequences.num_sequences, np.int64)
    for micro_batch, members in enumerate(partitions):
        micro_batch_of_sequence[members] = micro_batch
    lengths = sequences.length_of_sequence
    cost = DENSE_COST * lengths + lengths**2
    homes = contiguous(cluster, num_layers=sequences.num_layers, num_experts=sequences.num_experts)
    in_steps = cost // max(int(LIKE * cost.mean()), 1)
    spread_experts(sequences, homes, micro_batch_of_sequence, in_steps, len(partitions), 1, max_token_len)
    return [np.flatnonzero(micro_batch_of_sequence == m).tolist() for m in range(len(partitions))]


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
