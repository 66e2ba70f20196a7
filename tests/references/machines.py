"""A machine with round numbers, a small model, and random steps on random clusters: what the simulator's tests use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import PlanLimits
from equilibra.core.load import SequenceLoad
from equilibra.core.model import MoEModel
from equilibra.core.placement import Cluster
from equilibra.cost.prices import ExpertLaw, Prices
from equilibra.cost.rates import Rates, rates_for
from equilibra.plan.planner import StepProblem
from equilibra.simulate.scenario import step_problems
from equilibra.simulate.times import Times

LAW = ExpertLaw(fixed_us=10.0, weight_gb_per_s=0.0, row_gb_per_s=0.0, tflops=1.0)


def round_hardware(**changes: object) -> Prices:
    """1 TFLOP/s, 1 GB/s: a byte takes a nanosecond on every link, a million FLOP a microsecond."""
    values: dict[str, object] = {
        "name": "round", "source": "made up", "memory_bytes": 10**12, "ranks_per_node": 2, "experts_forward": LAW,
        "experts_backward": LAW, "dense_tflops": 1.0, "attention_tflops": 1.0, "attention_backward_tflops": 1.0,
        "hbm_gb_per_s": 1e6, "nvlink_gb_per_s": 1.0, "nvlink_latency_us": 5.0, "nic_gb_per_s": 0.1,
        "nic_latency_us": 20.0, "host_link_gb_per_s": 0.25, "copy_engine_gb_per_s": 1.0, "copy_loss_gb_per_s": 1e9,
        "counts_us": 7.0, "planner_cores": 4,
    }  # fmt: skip
    return Prices(**{**values, **changes})  # type: ignore[arg-type]


def small_model(*, num_layers: int = 2, num_experts: int = 8, top_k: int = 2, **changes: object) -> MoEModel:
    values: dict[str, object] = {"hidden": 32, "expert_ffn": 16}
    return MoEModel(name="small", num_layers=num_layers, num_experts=num_experts, top_k=top_k, **{**values, **changes})  # type: ignore[arg-type]


def random_sequences(rng: np.random.Generator, *, num_sequences: int, model: MoEModel, longest: int) -> SequenceLoad:
    """Skewed routing: every sequence and layer has its own favourites, every token top_k different experts."""
    lengths = rng.integers(1, longest + 1, num_sequences)
    tokens_SLE = np.zeros((num_sequences, model.num_layers, model.num_experts), np.int32)
    for s, length in enumerate(lengths.tolist()):
        for layer in range(model.num_layers):
            weight = rng.normal(scale=rng.choice([0.0, 1.0, 3.0]), size=model.num_experts)
            noise = rng.gumbel(size=(length, model.num_experts))
            chosen = np.argpartition(-(weight + noise), model.top_k - 1, axis=1)[:, : model.top_k]
            tokens_SLE[s, layer] = np.bincount(chosen.ravel(), minlength=model.num_experts)
    return SequenceLoad(tokens_SLE=tokens_SLE, length_of_sequence=lengths.astype(np.int64))


def random_problems(
    rng: np.random.Generator,
    model: MoEModel,
    cluster: Cluster,
    hardware: Prices,
    *,
    num_sequences: int = 8,
    longest: int = 60,
    tokens_per_microbatch: int = 128,
    data_parallel: int = 1,
    limits: PlanLimits | None = None,
    ranks_per_sequence: int | None = None,
    rates: Rates | None = None,
) -> list[StepProblem]:
    sequences = random_sequences(rng, num_sequences=num_sequences, model=model, longest=longest)
    return step_problems(
        sequences, cluster, rates or rates_for(model, hardware, num_nodes=cluster.num_nodes),
        tokens_per_microbatch=tokens_per_microbatch, data_parallel=data_parallel, limits=limits,
        ranks_per_sequence=ranks_per_sequence,
    )  # fmt: skip


def random_times(
    rng: np.random.Generator, *, layers: int, micro_batches: int, nodes: int, group: int, online: bool = False
) -> Times:
    """Times of every kind, many of them zero, on whole and broken numbers."""
    ranks = nodes * group

    def some(*shape: int, most: float = 100.0, zeros: float = 0.4) -> NDArray[np.float64]:
        values = rng.choice([1.0, 0.37], size=shape) * rng.integers(1, int(most) + 1, shape)
        return values * (rng.random(shape) >= zeros)

    return Times(
        attention_us=some(2, micro_batches, ranks),
        outer_us=some(2, micro_batches, ranks),
        experts_us=some(3, layers, micro_batches, ranks),
        slowed_us=some(3, layers, micro_batches, ranks, most=10),
        inside_us=some(2, layers, micro_batches, ranks),
        across_us=some(2, layers, micro_batches, ranks),
        flash_us=some(2, layers, micro_batches, nodes, most=200),
        flash_return_us=some(layers, micro_batches, nodes, most=300),
        setup_inside_us=some(2, layers, most=300),
        setup_across_us=some(2, layers, most=300),
        return_inside_us=some(layers, most=300),
        return_across_us=some(layers, most=300),
        reduce_us=float(rng.integers(0, 50)),
        plan_ready_us=np.sort(some(layers, most=500)) * (not online),
        latency_us=float(rng.integers(0, 10)),
        counts_us=float(rng.integers(0, 30)),
        exposed_copies=online,
        optimizer_us=float(rng.integers(0, 50)),
        hop_us=some(micro_batches, most=30),
        host_path=(bool(rng.integers(2)), bool(rng.integers(2))),
    )
