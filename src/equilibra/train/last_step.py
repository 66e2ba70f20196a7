"""The last step of a run for `equilibra report`: measured, beside what the cost model says of it, and the run's curves.

    RUN/step.run     equilibra   measured: what ran on this machine (or whatever planner the run has)
                     predicted   the same plan by the cost model, at the rates of the measured step
                     static      the same sequences where the rollout left them, contiguous homes, no copies; predicted

Predicted times are of log-prob and update alone, and of ranks that share no processor. So the two predictions compare
with each other, not with the measured time. `about["predicted"]` names them, `about["training"]` holds the curves.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import equilibra
from equilibra.core.errors import InputError
from equilibra.core.model import MoEModel
from equilibra.core.plan import StepPlan
from equilibra.cost.files import prices_of
from equilibra.cost.rates import Rates
from equilibra.events.run import PlannerRecord, Run, save_run
from equilibra.execute.group import device_name
from equilibra.execute.steps.planning import own_schedule
from equilibra.plan.planner import StepProblem, planner_named
from equilibra.rl.learner import Batch
from equilibra.simulate.predict import PREDICTED, predict
from equilibra.simulate.setting import RunSetting
from equilibra.simulate.times import Pricing
from equilibra.train.build import Parts
from equilibra.train.curves import curves
from equilibra.train.metrics_file import read_history
from equilibra.train.pace import paced, window_of

__all__ = ["LastStep"]

STATIC = "static"


class LastStep:
    """Keeps the newest record of world rank 0."""

    def __init__(self, parts: Parts, folder: Path) -> None:
        self.parts, self.folder = parts, folder
        self._kept: tuple[int, PlannerRecord, Batch] | None = None

    def keep(self, step: int, record: PlannerRecord | None, batch: Batch) -> None:
        """A step is over."""
        if record is not None:
            self._kept = (step, record, batch)

    def write(self) -> None:
        """RUN/step.run, if this rank has a record."""
        if self._kept is None:
            return
        step, record, batch = self._kept
        model = _model(self.parts, num_layers=record.rank_tokens_LMR.shape[0])
        records = self._records(record, batch, model)
        about = self._about(step, batch, model)
        about["predicted"] = [name for name in records if name != batch.step.plan.planner]
        save_run(Run(about=about, planners=records), self.folder / "step.run", overwrite=True)

    def _records(self, measured: PlannerRecord, batch: Batch, model: MoEModel) -> dict[str, PlannerRecord]:
        """In the order they are shown."""
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
        """What was asked, and how the run went."""
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
        with suppress(InputError):  # a file that cannot be read is no reason to lose the step
            about["training"] = curves(read_history(self.folder / "metrics.jsonl"))
        return {key: value for key, value in about.items() if value is not None}


def _left_alone(batch: Batch, *, tokens_per_rank: int) -> StepPlan:
    """The plan of a run without a balancer: every rank keeps what it rolled out, homes never moved."""
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
    """The model as the cost model has it."""
    spec, config, width = parts.folder.spec, parts.folder.config, parts.dtype.itemsize
    vocabulary = config.vocab_size * spec.hidden
    low = width < 4  # the optimizer then has masters
    return MoEModel(
        name=config.model_type, num_layers=num_layers, hidden=spec.hidden, expert_ffn=spec.expert_ffn,
        num_experts=spec.num_experts, top_k=spec.top_k, outer_parameters=vocabulary, embedding_parameters=vocabulary,
        weight_bytes=width, gradient_bytes=4 if low else width, state_bytes=12 if low else 2 * width,
    )  # fmt: skip
