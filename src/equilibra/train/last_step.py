"""The last step of a run, measured, beside what the cost model says of it: for `equilibra report`."""

from __future__ import annotations

from pathlib import Path

from equilibra.core.model import MoEModel
from equilibra.cost.presets import hardware_named
from equilibra.measure.run import PlannerRecord, Run, save_run
from equilibra.rl.learner import Batch
from equilibra.simulate.predict import beside
from equilibra.simulate.setting import RunSetting
from equilibra.simulate.times import Pricing
from equilibra.train.build import Parts

__all__ = ["LastStep"]


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
        spec, config = self.parts.folder.spec, self.parts.folder.config
        model = MoEModel(
            name=config.model_type, num_layers=record.rank_tokens_LMR.shape[0], hidden=spec.hidden,
            expert_ffn=spec.expert_ffn, num_experts=spec.num_experts, top_k=spec.top_k,
        )  # fmt: skip
        setting = RunSetting(activation_recompute=self.parts.config.model.activation_checkpointing)
        plan = batch.step.plan
        pricing = Pricing(model=model, hardware=hardware_named("h200"), cluster=plan.cluster, setting=setting)
        records = beside(
            record, plan, batch.step.sequence_loads, pricing, spare_slots=self.parts.config.balance.spare_slots
        )
        about = {
            "kind": "measured", "command": f"equilibra train, step {step}", "model": {"name": model.name},
            "cluster": {"nodes": plan.cluster.num_nodes, "ranks_per_node": plan.cluster.ranks_per_node},
        }  # fmt: skip
        save_run(Run(about=about, planners=records), self.folder / "step.run", overwrite=True)
