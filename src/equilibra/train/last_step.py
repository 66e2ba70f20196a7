"""The last step of a run for `equilibra report`: measured, predicted by the cost model, and the run's curves.

    RUN/step.run     equilibra   measured, under the run's planner (whose name it bears)
                     predicted   the same plan by the cost model, at the rates of the measured step
                     static      predicted: the same sequences without balancing (contiguous homes, no copies)

Predicted times cover log-prob and update only, on ranks that share no processor. Compare predictions with each other,
not with the measured time. `about["predicted"]` names them; `about["training"]` holds the curves.

`paced` fits the machine's rates. In a balanced step every rank has the same number of rows, so fixed costs cannot be
told from costs per row. Therefore launches and latencies stay those of a base machine. Each kind of work (experts
forward, experts backward, attention with the other dense parts, all-to-alls over all links) gets one factor that makes
its predicted time the measured one. These times include the reordering of rows. So device memory is free in the fitted
prices, and with it the optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import equilibra
from equilibra.core.errors import InputError
from equilibra.core.load import SequenceLoad
from equilibra.core.model import MoEModel
from equilibra.core.plan import StepPlan
from equilibra.cost.presets import prices_of
from equilibra.cost.prices import ExpertLaw, Prices
from equilibra.cost.rates import Rates
from equilibra.events.run import PlannerRecord, Run, save_run
from equilibra.events.schema import Direction, Events, Kind
from equilibra.execute.group import device_name
from equilibra.execute.steps.planning import own_schedule
from equilibra.plan.planner import StepProblem, planner_named
from equilibra.rl.learner import Batch
from equilibra.simulate.entry import PREDICTED, predict
from equilibra.simulate.times import Pricing, RunSetting
from equilibra.train.build import Parts
from equilibra.train.metrics import curves, read_history

FREE_GB_PER_S = 1e9
EXPERTS_FORWARD, EXPERTS_BACKWARD, DENSE, EXCHANGE = "experts_forward", "experts_backward", "dense", "exchange"
STATIC = "static"


class LastStep:
    """Keeps the record of the newest step, on world rank 0 alone, and writes it at the end."""

    def __init__(self, parts: Parts, folder: Path) -> None:
        self.parts, self.folder = parts, folder
        self._kept: tuple[int, PlannerRecord, Batch] | None = None

    def keep(self, step: int, record: PlannerRecord | None, batch: Batch) -> None:
        if record is not None:
            self._kept = (step, record, batch)

    def write(self) -> None:
        """Write RUN/step.run if this rank has a record."""
        if self._kept is None:
            return
        step, record, batch = self._kept
        model = _model(self.parts, num_layers=record.rank_tokens_LMR.shape[0])
        records = self._records(record, batch, model)
        about = self._about(step, batch, model)
        about["predicted"] = [name for name in records if name != batch.step.plan.planner]
        save_run(Run(about=about, planners=records), self.folder / "step.run", overwrite=True)

    def _records(self, measured: PlannerRecord, batch: Batch, model: MoEModel) -> dict[str, PlannerRecord]:
        plan, sequences, config = batch.step.plan, batch.step.sequence_loads, self.parts.config
        assert plan.schedule is not None
        setting = RunSetting(
            activation_recompute=config.model.activation_checkpointing, prefetch_depth=config.balance.prefetch_depth,
            optimizer_steps=plan.schedule.num_mini_batches,
        )  # fmt: skip
        prices = prices_of(config.balance.hardware, device_name(self.parts.device))
        base = Pricing(model=model, hardware=prices, cluster=plan.cluster, setting=setting)
        slots = config.balance.spare_slots
        pricing = paced(measured, plan, sequences, base, spare_slots=slots)
        window = window_of(measured)
        same = predict(plan, sequences, pricing, spare_slots=slots, window=window)
        records = {plan.planner: measured, PREDICTED: same}
        if plan.planner == STATIC:
            return records
        left = _left_alone(batch, tokens_per_rank=config.balance.tokens_per_rank)
        window = min(window, left.num_micro_batches - 1)
        return {STATIC: predict(left, sequences, pricing, spare_slots=0, window=window), **records}

    def _about(self, step: int, batch: Batch, model: MoEModel) -> dict[str, Any]:
        config, cluster = self.parts.config, batch.step.plan.cluster
        about: dict[str, Any] = {
            "kind": "measured", "command": "equilibra train --config config.toml", "version": equilibra.__version__,
            "model": {
                "name": model.name, "num_layers": model.num_layers, "num_experts": model.num_experts,
                "top_k": model.top_k, "hidden": model.hidden, "expert_ffn": model.expert_ffn,
            },
            "cluster": {
                "num_nodes": cluster.num_nodes, "ranks_per_node": cluster.ranks_per_node,
                "groups": config.cluster.groups, "device": str(self.parts.device), "dtype": config.run.dtype,
            },
            "settings": {"algorithm": config.algorithm.name, "seed": config.run.seed, **asdict(config.balance)},
            "step": step, "sequences": batch.step.sequence_loads.num_sequences, "tokens": batch.step.num_tokens,
        }  # fmt: skip
        with suppress(InputError):  # an unreadable file must not cost the step
            about["training"] = curves(read_history(self.folder / "metrics.jsonl"))
        return {key: value for key, value in about.items() if value is not None}


def _left_alone(batch: Batch, *, tokens_per_rank: int) -> StepPlan:
    """The plan without balancing: every rank runs what it generated, and no home has moved."""
    step, sequences = batch.step, batch.step.sequence_loads
    assert step.plan.schedule is not None
    own = own_schedule(
        sequences.length_of_sequence, step.route.owner_of_sequence, step.plan.schedule.mini_batch_of_sequence,
        num_ranks=step.plan.cluster.num_ranks, tokens_per_rank=tokens_per_rank,
    )  # fmt: skip
    problem = StepProblem(
        cluster=step.plan.cluster, sequences=sequences, schedule=own.schedule, rates=Rates.free(), spare_slots=0,
        standing_slots=0,
    )  # fmt: skip
    return planner_named(STATIC).plan(problem)


def _model(parts: Parts, *, num_layers: int) -> MoEModel:
    spec, config, width = parts.folder.spec, parts.folder.config, parts.dtype.itemsize
    vocabulary = config.vocab_size * spec.hidden
    low = width < 4  # then there are fp32 masters
    return MoEModel(
        name=config.model_type, num_layers=num_layers, hidden=spec.hidden, expert_ffn=spec.expert_ffn,
        num_experts=spec.num_experts, top_k=spec.top_k, outer_parameters=vocabulary, embedding_parameters=vocabulary,
        weight_bytes=width, gradient_bytes=4 if low else width, state_bytes=12 if low else 2 * width,
    )  # fmt: skip


def window_of(measured: PlannerRecord) -> int:
    """The micro-batch whose events were recorded."""
    return int(measured.events.rows["micro_batch"].max(initial=0))


def paced(
    measured: PlannerRecord, plan: StepPlan, sequences: SequenceLoad, pricing: Pricing, *, spare_slots: int
) -> Pricing:
    """The pricing at the measured machine's rates; a kind of work without events keeps its own."""
    base = pricing.hardware
    base = replace(base, hbm_gb_per_s=FREE_GB_PER_S, nvlink_gb_per_s=base.nic_gb_per_s)
    pricing = replace(pricing, hardware=base)
    said = predict(plan, sequences, pricing, spare_slots=spare_slots, window=window_of(measured))
    took, expected = _took(measured.events), _took(said.events)
    latency_us = base.nic_latency_us if pricing.cluster.num_nodes > 1 else base.nvlink_latency_us
    fixed_us = {
        EXPERTS_FORWARD: base.experts_forward.fixed_us, EXPERTS_BACKWARD: base.experts_backward.fixed_us, DENSE: 0.0,
        EXCHANGE: latency_us,
    }  # fmt: skip
    slower = {kind: _factor(took[kind], expected[kind], fixed_us[kind]) for kind in fixed_us}
    return replace(pricing, hardware=_slowed(base, slower))


def _took(events: Events) -> dict[str, float]:
    """Mean time of an event by kind, in us; 0 without events.

    Of an all-to-all only the rank that arrived last counts: the others wait in it.
    """
    rows = events.rows[events.rows["micro_batch"] >= 0]
    kind, backward = rows["kind"], rows["direction"] == Direction.BACKWARD
    us = rows["end_us"] - rows["start_us"]
    chosen = {
        EXPERTS_FORWARD: (kind == Kind.EXPERTS) & ~backward, EXPERTS_BACKWARD: (kind == Kind.EXPERTS) & backward,
        DENSE: kind == Kind.ATTENTION,
    }  # fmt: skip
    times = {name: us[of] for name, of in chosen.items()}
    exchanges = np.isin(kind, (Kind.DISPATCH, Kind.COMBINE))
    times[EXCHANGE] = _shortest(rows[exchanges], us[exchanges])
    return {name: float(part.sum()) / max(part.size, 1) for name, part in times.items()}


def _shortest(rows: NDArray[np.void], us: NDArray[np.float64]) -> NDArray[np.float64]:
    """Time of the shortest event of each all-to-all."""
    keys = rows[["kind", "stage", "direction", "layer", "micro_batch"]]
    _, number = np.unique(keys, return_inverse=True)
    least = np.full(int(number.max(initial=-1)) + 1, np.inf)
    np.minimum.at(least, number.ravel(), us)
    return least


def _factor(took_us: float, expected_us: float, fixed_us: float) -> float:
    """Measured over expected time of an event, without its fixed part; 1 if unknown."""
    own, base = took_us - fixed_us, expected_us - fixed_us
    return own / base if own > 0 and base > 1e-9 else 1.0


def _slowed(base: Prices, slower: Mapping[str, float]) -> Prices:
    def law(of: ExpertLaw, factor: float) -> ExpertLaw:
        return of.scaled(compute=1 / factor, memory=1 / factor)

    dense, exchange = slower[DENSE], slower[EXCHANGE]
    return replace(
        base, name="measured", source="rates of the measured step",
        experts_forward=law(base.experts_forward, slower[EXPERTS_FORWARD]),
        experts_backward=law(base.experts_backward, slower[EXPERTS_BACKWARD]),
        dense_tflops=base.dense_tflops / dense, attention_tflops=base.attention_tflops / dense,
        attention_backward_tflops=base.attention_backward_tflops / dense,
        nvlink_gb_per_s=base.nvlink_gb_per_s / exchange, nic_gb_per_s=base.nic_gb_per_s / exchange,
    )  # fmt: skip
