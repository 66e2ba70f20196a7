"""Memory: what the fullest rank holds at the worst moment. Imbalance runs out of memory before it runs out of time.

Parts: weights, accumulated gradients, optimizer state (spread over data-parallel replicas), the buffers of spare slots,
standing copies, and activations. With activation recompute a rank keeps the input of every layer of every micro-batch
in flight, and the insides of one layer: those of the experts grow with the rows the rank computes, so the hottest rank
needs most. Logits are taken to be computed in pieces and do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibra.core.model import MoEModel

__all__ = ["MemoryNeed", "dense_activation_bytes", "expert_activation_bytes", "memory_need"]

DENSE_ACTIVATIONS = 16
"""values of width `hidden` that attention, norms and the router of a layer keep per token for the backward pass"""


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """What a rank is asked to hold."""

    layers: int
    """MoE layers on the rank"""
    experts_at_home: int
    """experts of one layer at home on the rank"""
    dense_replicas: int
    """ranks that hold the same dense weights and share their optimizer state"""
    expert_replicas: int
    """ranks that hold the same experts and share their optimizer state"""
    slots_in_flight: int
    """spare slots, in all buffers"""
    standing_copies: int
    """standing copies on the fullest rank, all layers"""
    micro_batches_in_flight: int
    """forward passes whose backward pass has not run"""
    activation_recompute: bool
    """whether activations are computed anew in the backward pass"""


def dense_activation_bytes(model: MoEModel) -> int:
    """Activations of one token in one layer, without its experts."""
    return (DENSE_ACTIVATIONS * model.hidden + 2 * model.attention_width) * model.weight_bytes


def expert_activation_bytes(model: MoEModel) -> int:
    """Activations of one row in one layer: input, both halves of the first product, their product, output."""
    return (2 * model.hidden + 3 * model.expert_ffn) * model.weight_bytes


def memory_need(
    model: MoEModel, need: MemoryNeed, tokens_MR: NDArray[np.float64], rows_LMR: NDArray[np.float64]
) -> dict[str, float]:
    """Bytes by what they hold, on the rank and in the micro-batch that need most."""
    dense = need.layers * model.dense_parameters + model.outer_parameters + model.embedding_parameters
    experts = need.layers * need.experts_at_home * model.expert_parameters
    copy_bytes = model.expert_bytes + model.expert_gradient_bytes
    dense_MR = tokens_MR * float(dense_activation_bytes(model))
    rows_MR = rows_LMR.max(axis=0) if need.activation_recompute else rows_LMR.sum(axis=0)
    expert_MR = rows_MR * float(expert_activation_bytes(model))
    if need.activation_recompute:
        kept_MR = tokens_MR * float(need.layers * model.hidden * model.weight_bytes)
        busiest_MR = kept_MR * need.micro_batches_in_flight + dense_MR + expert_MR
    else:
        busiest_MR = (dense_MR * need.layers + expert_MR) * need.micro_batches_in_flight
    worst = np.unravel_index(int(busiest_MR.argmax()), busiest_MR.shape)
    of_experts = float(expert_MR[worst]) * (1 if need.activation_recompute else need.micro_batches_in_flight)
    return {
        "weights": float((dense + experts) * model.weight_bytes),
        "gradients": float((dense + experts) * model.gradient_bytes),
        "optimizer": float((dense / need.dense_replicas + experts / need.expert_replicas) * model.state_bytes),
        "spare_slots": float(need.slots_in_flight * copy_bytes),
        "standing_copies": float(need.standing_copies * copy_bytes),
        "activations_experts": of_experts,
        "activations_other": float(busiest_MR[worst]) - of_experts,
    }
