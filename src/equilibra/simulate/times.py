"""Times: the work of a plan, priced for a model, a machine and a way to run the step, in microseconds.

Symbols: L layers, M micro-batches, R ranks, N nodes; a pass is log-prob forward, update forward or update backward
(`events.run.PASSES`). `ideal` gives every rank the mean of experts and traffic, and no overhead. Prices are convex in a
rank's work, so no plan with this schedule is faster. `without_overhead` keeps the plan's balance and drops its cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import check_whole
from equilibra.core.errors import InputError
from equilibra.core.load import Schedule
from equilibra.core.model import MoEModel
from equilibra.core.placement import Cluster
from equilibra.core.plan import Stage, StepPlan
from equilibra.cost.prices import ATTENTION_BACKWARD, Prices
from equilibra.plan.planner import Timing
from equilibra.simulate.work import LayerMoves, StageWork

PERMUTED = 4
"""reads and writes of a row to permute it, on its source and on the rank that computes it"""


class CopyPath(StrEnum):
    """Where flash copies come from."""

    NVLINK = "nvlink"
    """from the home device: fast, but shares links with dispatch and combine"""
    HOST = "host"
    """from host memory shared by the node: slower, but on a link of its own; gradients still use NVLink"""


@dataclass(frozen=True, kw_only=True)
class RunSetting:
    """How a step is run: stages, parallelism around the expert-parallel group, and prefetching."""

    prefetch_depth: int = 1
    """layers by which flash copies are prefetched; 0: during the layer's own attention"""
    activation_recompute: bool = True
    """recompute activations in the backward pass, layer by layer"""
    pipeline_stages: int = 1
    """pipeline stages (1F1B), each on its own expert-parallel group"""
    data_parallel: int = 1
    """data-parallel replicas, each with its own sequences"""
    optimizer_steps: int = 1
    """optimizer steps (mini-batches) of the update; each fetches standing copies again"""
    logprob_stage: bool = True
    """recompute the old log-probs before the update"""
    logprob_path: CopyPath = CopyPath.NVLINK
    """path of flash copies in the log-prob stage"""
    update_path: CopyPath = CopyPath.NVLINK
    """the same in the update stage"""

    def __post_init__(self) -> None:
        limits = {"prefetch_depth": (0, 1000), "pipeline_stages": (1, 1000), "data_parallel": (1, 4096),
                  "optimizer_steps": (1, 10_000)}  # fmt: skip
        for name, (least, most) in limits.items():
            check_whole(name, getattr(self, name), low=least, high=most)


@dataclass(frozen=True, kw_only=True, eq=False)
class CellWork:
    """Tokens and attention work of every rank."""

    tokens_MR: NDArray[np.float64]
    """[M, R] tokens"""
    squares_MR: NDArray[np.float64]
    """[M, R] the rank's share of the squared sequence lengths"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Times:
    """Durations of everything on the timeline."""

    attention_us: NDArray[np.float64]
    """[2, M, R] one layer without its experts, forward and backward"""
    outer_us: NDArray[np.float64]
    """[2, M, R] parts outside the MoE layers, forward and backward"""
    experts_us: NDArray[np.float64]
    """[passes, L, M, R]"""
    slowed_us: NDArray[np.float64]
    """[passes, L, M, R] slowdown of compute by hidden copies"""
    inside_us: NDArray[np.float64]
    """[stages, L, M, R] one dispatch or combine on links inside the node"""
    across_us: NDArray[np.float64]
    """[stages, L, M, R] the same across nodes"""
    flash_us: NDArray[np.float64]
    """[stages, L, M, N] flash copies of the node's busiest rank"""
    flash_return_us: NDArray[np.float64]
    """[L, M, N] their gradients"""
    setup_inside_us: NDArray[np.float64]
    """[2, L] standing copies and moves inside a node, before the first and before later optimizer steps"""
    setup_across_us: NDArray[np.float64]
    """[2, L] the same across nodes"""
    return_inside_us: NDArray[np.float64]
    """[L] gradients of standing copies, inside a node"""
    return_across_us: NDArray[np.float64]
    """[L] the same across nodes"""
    reduce_us: float
    """gradient reduction of one layer over data-parallel replicas"""
    plan_ready_us: NDArray[np.float64]
    """[L] when each layer's plan is ready"""
    latency_us: float
    """latency of one all-to-all"""
    counts_us: float
    """exchange of counts and planning in every layer; 0 if planned ahead"""
    exposed_copies: bool
    """whether flash copies start only after the router (online planners)"""
    optimizer_us: float
    """one optimizer step"""
    hop_us: NDArray[np.float64]
    """[M] transfer of a micro-batch to the next pipeline stage"""
    host_path: tuple[bool, bool]
    """whether flash copies use the host link, in the log-prob and in the update stage"""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (*self.experts_us.shape[1:], self.flash_us.shape[3])

    def without_overhead(self) -> Times:
        """The same balance without copies, moves, planning and exchanged counts."""
        free = {
            name: np.zeros_like(getattr(self, name))
            for name in ("slowed_us", "flash_us", "flash_return_us", "setup_inside_us", "setup_across_us",
                         "return_inside_us", "return_across_us", "plan_ready_us")
        }  # fmt: skip
        return replace(self, **free, counts_us=0.0)


def cell_work(lengths: NDArray[np.int64], schedule: Schedule, cluster: Cluster) -> CellWork:
    """Tokens and squared lengths of every rank under a schedule."""
    shape, width = (schedule.num_micro_batches, cluster.num_ranks), schedule.ranks_per_sequence
    tokens, squares = np.zeros(shape), np.zeros(shape)
    for part in range(width):
        where = (schedule.micro_batch_of_sequence, schedule.rank_of_sequence + part)
        np.add.at(tokens, where, lengths / width)
        np.add.at(squares, where, lengths.astype(np.float64) ** 2 / width)
    return CellWork(tokens_MR=tokens, squares_MR=squares)


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """A model on a machine: prices the work of a plan."""

    model: MoEModel
    hardware: Prices
    cluster: Cluster
    """ranks of the expert-parallel group"""
    setting: RunSetting

    def __post_init__(self) -> None:
        layers, stages = self.model.num_layers, self.setting.pipeline_stages
        if stages > layers:
            raise InputError(f"{layers} layers cannot fill {stages} pipeline stages: use fewer")

    @property
    def row_bytes(self) -> int:
        """Bytes of one (token, expert) pair on a link."""
        return self.model.hidden * self.model.weight_bytes

    def attention_us(self, cells: CellWork) -> NDArray[np.float64]:
        """[2, M, R] one layer without its experts."""
        model, machine = self.model, self.hardware
        permuted = cells.tokens_MR * (model.top_k * self.row_bytes * PERMUTED * 1e-3 / machine.hbm_gb_per_s)
        dense = cells.tokens_MR * (2e-6 * model.dense_parameters / machine.dense_tflops)
        pairs = cells.squares_MR * (2e-6 * model.attention_width * model.quadratic_share)
        forward = dense + permuted + pairs / machine.attention_tflops
        backward = 2 * dense + permuted + pairs * (ATTENTION_BACKWARD / machine.attention_backward_tflops)
        return np.stack([forward, backward])

    def outer_us(self, cells: CellWork) -> NDArray[np.float64]:
        """[2, M, R] dense layers and the output head."""
        forward = cells.tokens_MR * (2e-6 * self.model.outer_parameters / self.hardware.dense_tflops)
        return np.stack([forward, 2 * forward])

    def experts_us(self, work: StageWork, *, backward: bool) -> NDArray[np.float64]:
        """[L, M, R] the experts, with permuting their rows."""
        law = self.hardware.experts_backward if backward else self.hardware.experts_forward
        products = work.rows_LMR * law.row_us(self.model, backward=backward)
        instances = work.instances_LMR * law.instance_us(self.model)
        weights = work.instances_LMR * law.weights_us(self.model)
        permuted = work.rows_LMR * (self.row_bytes * PERMUTED * 1e-3 / self.hardware.hbm_gb_per_s)
        return law.fixed_us + np.maximum(instances + products, weights) + permuted

    def of_stages(self, stages: Sequence[StageWork]) -> dict[str, Any]:
        """Times of experts in every pass, and of one dispatch or combine in every stage."""
        passes, row_us = ((stages[0], False), (stages[1], False), (stages[1], True)), self.row_bytes * 1e-3
        return {
            "experts_us": np.stack([self.experts_us(of, backward=backward) for of, backward in passes]),
            "inside_us": np.stack([of.inside_LMR for of in stages]) * (row_us / self.hardware.nvlink_gb_per_s),
            "across_us": np.stack([of.across_LMR for of in stages]) * (row_us / self.hardware.nic_gb_per_s),
        }

    def reduce_us(self) -> float:
        """Gradient reduction of one layer over replicas and the all-gather of weights, on the slower link."""
        model, machine, cluster = self.model, self.hardware, self.cluster
        replicas = cluster.num_ranks * self.setting.data_parallel
        share = (replicas - 1) / replicas
        dense = model.dense_parameters * (model.gradient_bytes + model.weight_bytes) * share
        us = dense * 1e-3 / machine.nvlink_gb_per_s
        if cluster.num_nodes * self.setting.data_parallel > 1:
            us = max(us, dense * 1e-3 / (cluster.ranks_per_node * machine.nic_gb_per_s))
        groups = self.setting.data_parallel
        if groups > 1:
            homes = model.num_experts / cluster.num_ranks * model.expert_parameters
            experts = homes * (model.gradient_bytes + model.weight_bytes) * (groups - 1) / groups
            us += experts * 1e-3 / machine.nic_gb_per_s
        return us

    def optimizer_us(self) -> float:
        """One optimizer step: read gradients and state, write state and weights."""
        model, setting = self.model, self.setting
        layers = -(-model.num_layers // setting.pipeline_stages)
        homes = layers * model.num_experts / self.cluster.num_ranks * model.expert_parameters
        dense = layers * model.dense_parameters + model.outer_parameters + model.embedding_parameters
        weights = homes / setting.data_parallel + dense / (self.cluster.num_ranks * setting.data_parallel)
        moved = weights * (model.gradient_bytes + 2 * model.state_bytes + model.weight_bytes)
        return moved * 1e-3 / self.hardware.hbm_gb_per_s

    def plan_ready_us(self, num_micro_batches: int, num_sequences: int) -> NDArray[np.float64]:
        """[L] when each layer is planned: after packing, in order, on the node's processors.

        Constants are fitted to one Xeon core with 8 to 512 ranks, 128 to 512 experts, 256 to 4,096 sequences.
        """
        ranks, crowd = self.cluster.num_ranks, (self.model.num_experts / 128) ** 0.5
        micro_batch_us = 7 * ranks if self.cluster.num_nodes == 1 else 10 * ranks + 0.25 * ranks**2
        wave = np.arange(self.model.num_layers) // self.hardware.planner_cores + 1
        pack_us = num_sequences * (8 + 0.012 * num_sequences) + 100 * self.model.num_layers
        return np.asarray(pack_us + wave * (num_micro_batches * micro_batch_us * crowd), np.float64)


def price(
    pricing: Pricing,
    plan: StepPlan,
    work: dict[Stage, StageWork],
    moves: LayerMoves,
    cells: CellWork,
    *,
    timing: Timing,
    online_us: float,
    num_sequences: int,
) -> Times:
    """Times of everything that one plan makes a step do."""
    model, machine, setting = pricing.model, pricing.hardware, pricing.setting
    group, row_us = pricing.cluster.ranks_per_node, pricing.row_bytes * 1e-3
    stages = [work[stage] for stage in Stage]
    weight_us = model.expert_bytes * 1e-3 / machine.flash_gb_per_s
    gradient_us = model.expert_gradient_bytes * 1e-3 / machine.flash_gb_per_s
    lost_us = 0.0 if timing is Timing.ONLINE else 1e-3 / machine.copy_loss_gb_per_s
    slowed = np.stack([of.flash_LMR for of in (*stages, stages[1])])
    slowed[:2] *= lost_us * model.expert_bytes
    slowed[2] *= lost_us * (model.expert_bytes + model.expert_gradient_bytes)
    host = tuple(path is CopyPath.HOST for path in (setting.logprob_path, setting.update_path))
    copy_us = [model.expert_bytes * 1e-3 / machine.host_link_gb_per_s if of_host else weight_us for of_host in host]
    flash_LMN = [of.flash_LMR.reshape(*of.flash_LMR.shape[:2], -1, group).max(axis=3) for of in stages]
    rate = np.array([[machine.nvlink_gb_per_s], [machine.nic_gb_per_s]])
    standing = moves.standing_2L / rate * (model.expert_bytes * 1e-3)
    back = moves.standing_2L / rate * (model.expert_gradient_bytes * 1e-3)
    moved = moves.moved_2L / rate * (model.expert_home_bytes * 1e-3)
    planned = np.zeros(plan.num_layers)
    if ahead := timing is Timing.AHEAD:
        planned = pricing.plan_ready_us(plan.num_micro_batches, num_sequences)
    return Times(
        attention_us=pricing.attention_us(cells),
        outer_us=pricing.outer_us(cells),
        **pricing.of_stages(stages),
        slowed_us=slowed,
        flash_us=np.stack([flash * us for flash, us in zip(flash_LMN, copy_us, strict=True)]),
        flash_return_us=flash_LMN[1] * gradient_us,
        setup_inside_us=np.stack([standing[0] + moved[0], standing[0]]),
        setup_across_us=np.stack([standing[1] + moved[1], standing[1]]),
        return_inside_us=back[0],
        return_across_us=back[1],
        reduce_us=pricing.reduce_us(),
        plan_ready_us=planned,
        latency_us=machine.nic_latency_us if pricing.cluster.num_nodes > 1 else machine.nvlink_latency_us,
        counts_us=0.0 if ahead else machine.counts_us + online_us,
        exposed_copies=timing is Timing.ONLINE,
        optimizer_us=pricing.optimizer_us(),
        hop_us=machine.nic_latency_us + cells.tokens_MR.max(axis=1) * (row_us / machine.nic_gb_per_s),
        host_path=(host[0], host[1]),
    )


def ideal(pricing: Pricing, times: Times, work: dict[Stage, StageWork]) -> Times:
    """Times of the same schedule with experts and traffic even over all ranks and no overhead."""
    homes = pricing.model.num_experts / pricing.cluster.num_ranks

    def even(of: StageWork) -> StageWork:
        rows_LM, shape = of.rows_LMR.mean(axis=2), of.rows_LMR.shape
        rows, inside, across = (
            np.broadcast_to(mean_LM[:, :, None], shape) for mean_LM in (rows_LM, of.mean_inside_LM, of.mean_across_LM)
        )
        instances = np.full(shape, homes)
        return replace(of, rows_LMR=rows, instances_LMR=instances, inside_LMR=inside, across_LMR=across)

    of_stages = pricing.of_stages([even(work[stage]) for stage in Stage])
    return replace(times.without_overhead(), **of_stages, exposed_copies=False)
