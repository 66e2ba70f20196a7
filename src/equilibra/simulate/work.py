"""Work: exact rows, traffic, copies and memory of every rank under a plan, not yet priced.

Symbols: L layers, M micro-batches, R ranks. Rows are (token, expert) pairs. A pair computed away from its source rank
crosses NVLink (inside a node) or the network (across nodes), once to be dispatched and once back.

Memory: weights, accumulated gradients, optimizer state (sharded over data-parallel replicas), spare slots, standing
copies and activations. Under activation recompute a rank keeps the input of every layer of every micro-batch in flight
and the internals of one layer. Logits are assumed to be computed in pieces and do not count.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibra.core.kernel import inlined, kernel
from equilibra.core.load import StepLoad
from equilibra.core.model import MoEModel
from equilibra.core.plan import Stage, StepPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class StageWork:
    """Work of one stage of a plan. A link's load is that of its busier direction."""

    rows_LMR: NDArray[np.float64]
    """[L, M, R] pairs each rank computes"""
    instances_LMR: NDArray[np.float64]
    """[L, M, R] instances on each rank: homes, standing and flash copies"""
    inside_LMR: NDArray[np.float64]
    """[L, M, R] pairs on each rank's links inside the node"""
    across_LMR: NDArray[np.float64]
    """[L, M, R] pairs on each rank's share of the network"""
    mean_inside_LM: NDArray[np.float64]
    """[L, M] mean pairs per rank inside nodes"""
    mean_across_LM: NDArray[np.float64]
    """[L, M] mean pairs per rank across nodes"""
    flash_LMR: NDArray[np.float64]
    """[L, M, R] flash copies on each rank's links, in their busier direction"""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerMoves:
    """Experts moved once a step, counted on the busiest rank of each layer."""

    standing_2L: NDArray[np.float64]
    """[2, L] standing copies on the busiest rank's links inside its node, and across nodes"""
    moved_2L: NDArray[np.float64]
    """[2, L] homes that move inside a node, and across nodes"""
    standing_of_rank: NDArray[np.int64]
    """[R] standing copies each rank holds, all layers"""


def stage_work(plan: StepPlan, load: StepLoad, stage: Stage) -> StageWork:
    """Rows, instances and traffic of every rank, layer and micro-batch."""
    num_micro_batches, num_layers, _, num_ranks = plan.shape
    part, standing, group = plan.stages[stage], plan.standing, plan.cluster.ranks_per_node
    first_standing = np.searchsorted(standing.layer, np.arange(num_layers + 1))
    out = np.zeros((6, num_layers, num_micro_batches, num_ranks))

    def one(layer: int) -> None:
        _layer_work(
            load.tokens_MLER[:, layer], plan.placement.home_of_expert[layer], group,
            part.first_of_problem[layer * num_micro_batches : (layer + 1) * num_micro_batches + 1],
            part.expert, part.rank, part.tokens_FR,
            standing.expert, standing.rank, part.standing_tokens_CMR, first_standing[layer], first_standing[layer + 1],
            out[:, layer],
        )  # fmt: skip

    with ThreadPoolExecutor(max(1, min(os.cpu_count() or 1, 8))) as pool:
        list(pool.map(one, range(num_layers)))
    rows, instances, out_inside, in_inside, out_across, in_across = out
    return StageWork(
        rows_LMR=rows,
        instances_LMR=instances,
        inside_LMR=np.maximum(out_inside, in_inside),
        across_LMR=np.maximum(out_across, in_across),
        mean_inside_LM=out_inside.mean(axis=2),
        mean_across_LM=out_across.mean(axis=2),
        flash_LMR=np.maximum(*part.on_links()).reshape(rows.shape).astype(np.float64),
    )


def layer_moves(plan: StepPlan) -> LayerMoves:
    """Standing copies and moved homes of a plan."""
    home, before, standing = plan.placement.home_of_expert, plan.previous.home_of_expert, plan.standing
    layer, expert = np.nonzero(home != before)
    return LayerMoves(
        standing_2L=_busiest(plan, standing.layer, home[standing.layer, standing.expert], standing.rank),
        moved_2L=_busiest(plan, layer, before[layer, expert], home[layer, expert]),
        standing_of_rank=np.bincount(standing.rank, minlength=plan.cluster.num_ranks),
    )


def _busiest(
    plan: StepPlan, layer: NDArray[np.integer], origin: NDArray[np.integer], target: NDArray[np.integer]
) -> NDArray[np.float64]:
    """[2, L] experts on the busiest rank's links inside and across nodes, in their busier direction."""
    num_ranks, group = plan.cluster.num_ranks, plan.cluster.ranks_per_node
    inside = origin // group == target // group
    busy = np.zeros((2, 2, plan.num_layers, num_ranks))
    for direction, rank in enumerate((origin, target)):
        np.add.at(busy[direction], (np.where(inside, 0, 1), layer, rank), 1.0)
    busiest: NDArray[np.float64] = busy.max(axis=(0, 3))
    return busiest


@kernel
def _layer_work(  # type: ignore[no-untyped-def]
    tokens_MER, home, group, first, flash_expert, flash_rank, flash_tokens_FR,
    standing_expert, standing_rank, standing_tokens_CMR, first_standing, last_standing, out,
):  # fmt: skip
    """Fill rows, instances and the four link loads of one layer: out[6, M, R]."""
    num_micro_batches, num_experts, num_ranks = tokens_MER.shape
    for m in range(num_micro_batches):
        for e in range(num_experts):
            out[1, m, home[e]] += 1
            for s in range(num_ranks):
                _serve(out, m, s, home[e], group, tokens_MER[m, e, s])
        for f in range(first[m], first[m + 1]):
            out[1, m, flash_rank[f]] += 1
            for s in range(num_ranks):
                _serve(out, m, s, home[flash_expert[f]], group, -flash_tokens_FR[f, s])
                _serve(out, m, s, flash_rank[f], group, flash_tokens_FR[f, s])
        for c in range(first_standing, last_standing):
            out[1, m, standing_rank[c]] += 1
            for s in range(num_ranks):
                _serve(out, m, s, home[standing_expert[c]], group, -standing_tokens_CMR[c, m, s])
                _serve(out, m, s, standing_rank[c], group, standing_tokens_CMR[c, m, s])


@inlined
def _serve(out, m, source, rank, group, pairs):  # type: ignore[no-untyped-def]
    """Add pairs of `source` that `rank` computes, and their traffic."""
    out[0, m, rank] += pairs
    if source != rank:
        link = 2 if source // group == rank // group else 4
        out[link, m, source] += pairs
        out[link + 1, m, rank] += pairs


# Memory of the fullest rank

DENSE_ACTIVATIONS = 16
"""values of width `hidden` that attention, norms and the router of a layer keep per token for the backward pass"""


def dense_activation_bytes(model: MoEModel) -> int:
    """Bytes of activations one token keeps in one layer outside its experts."""
    return (DENSE_ACTIVATIONS * model.hidden + 2 * model.attention_width) * model.weight_bytes


def expert_activation_bytes(model: MoEModel) -> int:
    """Bytes of activations one row keeps in one layer: input, gate, up, their product, output."""
    return (2 * model.hidden + 3 * model.expert_ffn) * model.weight_bytes


def memory_need(
    model: MoEModel,
    tokens_MR: NDArray[np.float64],
    rows_LMR: NDArray[np.float64],
    *,
    layers: int,
    experts_at_home: int,
    dense_replicas: int,
    expert_replicas: int,
    slots_in_flight: int,
    standing_copies: int,
    micro_batches_in_flight: int,
    activation_recompute: bool,
) -> dict[str, float]:
    """Bytes by kind, on the rank and in the micro-batch that need most.

    A rank holds `layers` MoE layers with `experts_at_home` experts each. Replicas hold the same dense weights, or the
    same experts, and share their optimizer state. Slots and standing copies are those of all layers. Micro-batches are
    in flight between their forward and backward pass.
    """
    dense = layers * model.dense_parameters + model.outer_parameters + model.embedding_parameters
    experts = layers * experts_at_home * model.expert_parameters
    copy_bytes = model.expert_bytes + model.expert_gradient_bytes
    dense_MR = tokens_MR * float(dense_activation_bytes(model))
    rows_MR = rows_LMR.max(axis=0) if activation_recompute else rows_LMR.sum(axis=0)
    expert_MR = rows_MR * float(expert_activation_bytes(model))
    if activation_recompute:
        kept_MR = tokens_MR * float(layers * model.hidden * model.weight_bytes)
        busiest_MR = kept_MR * micro_batches_in_flight + dense_MR + expert_MR
    else:
        busiest_MR = (dense_MR * layers + expert_MR) * micro_batches_in_flight
    worst = np.unravel_index(int(busiest_MR.argmax()), busiest_MR.shape)
    of_experts = float(expert_MR[worst]) * (1 if activation_recompute else micro_batches_in_flight)
    return {
        "weights": float((dense + experts) * model.weight_bytes),
        "gradients": float((dense + experts) * model.gradient_bytes),
        "optimizer": float((dense / dense_replicas + experts / expert_replicas) * model.state_bytes),
        "spare_slots": float(slots_in_flight * copy_bytes),
        "standing_copies": float(standing_copies * copy_bytes),
        "activations_experts": of_experts,
        "activations_other": float(busiest_MR[worst]) - of_experts,
    }
