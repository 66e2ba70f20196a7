"""A Megatron engine of verl under plans: what is planned when, from which routing, and what is said about it.

Symbols: M micro-batches, L MoE layers of this pipeline stage, T tokens of this rank, K experts per token.

Every `forward_backward_batch` is a step of its own. With routing to replay it is planned as soon as its micro-batches
are made; without (reference log-probabilities, R2's recording) it runs on homes alone. Routing is taken from verl's own
functions, a micro-batch at a time: they pack, slice for context and tensor parallelism, and write to the routers, where
it is read and taken away again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, overload

from torch import Tensor, nn

from equilibra.core.errors import InputError
from equilibra.core.plan import Stage
from equilibra.events.imbalance import imbalance
from equilibra.integrations.megatron import Balancer, Step, balance, masked
from equilibra.integrations.verl.setting import BLOCK, VerlSetting, setting_of

__all__ = ["BalancedEngine", "balance_engine", "figures"]

logger = logging.getLogger(__name__)


def balance_engine(engine: Any, verl: ModuleType) -> BalancedEngine | None:  # noqa: ANN401 - verl's MegatronEngine
    """Collective, when the engine has its model and optimizer; None where there is nothing to train or it is off.

    verl: the module of the engine, whose functions are used.
    """
    setting = setting_of(engine.engine_config)
    if not setting.enabled or engine.engine_config.forward_only or engine.is_value_model:
        return None
    check_engine(engine)
    balancer = balance(engine.module, setting)
    logger.info("Equilibra plans %d MoE layers on %s", len(balancer.layers), balancer.group.cluster)
    return BalancedEngine(engine, verl, setting, balancer)


def check_engine(engine: Any) -> None:  # noqa: ANN401
    """An error where verl's options cannot be together with plans; `balance` looks at Megatron's."""
    config, off = engine.engine_config, f"or set {BLOCK}.enabled=False"
    if not getattr(engine.tf_config, "num_moe_experts", None):
        raise InputError(f"there is nothing to balance: the actor's model has no experts; {off}")
    if config.router_replay.mode == "disabled":
        raise InputError(
            "cannot plan without replay, for nobody knows the routing before the step: set "
            "actor_rollout_ref.actor.megatron.router_replay.mode=R3 with "
            f"actor_rollout_ref.rollout.enable_rollout_routing_replay=True, or R2; {off}"
        )
    ranks = getattr(engine.tf_config, "expert_model_parallel_size", 1)
    if ranks < 2:
        raise InputError(
            f"there is nothing to balance with expert_model_parallel_size={ranks}: every rank has all experts; {off}"
        )
    if config.dynamic_context_parallel:
        raise InputError(
            "cannot plan with dynamic_context_parallel=True: its micro-batches are made by another scheduler, and "
            f"sequences change ranks; set it to False, {off}"
        )
    if getattr(engine, "peft_cls", None) is not None:
        raise InputError(f"cannot copy experts with adapters (LoRA): their weights are in two places; {off}")
    if getattr(engine, "_qat_enabled", False):
        raise InputError(f"cannot copy experts under quantisation-aware training; {off}")


class BalancedEngine:
    """An engine, its balancer and the pass that is under way."""

    def __init__(self, engine: Any, verl: ModuleType, setting: VerlSetting, balancer: Balancer) -> None:  # noqa: ANN401
        self.engine, self.verl, self.setting, self.balancer = engine, verl, setting, balancer
        self.routers = [layer.router for layer in _layers_of(engine.module)]
        self._data: Any = None
        self._stage = Stage.UPDATE
        self.waiting: dict[str, float] = {}
        """figures of passes that are not in verl's log yet"""

    def begin(self, data: Any, *, forward_only: bool) -> None:  # noqa: ANN401 - a TensorDict
        """A pass over this batch; it is planned when its micro-batches are there."""
        self._data, self._stage = data, Stage.LOGPROB if forward_only else Stage.UPDATE
        self.balancer.end()

    def end(self) -> None:
        """The pass is over, or was cut off."""
        self._data = None
        self.balancer.end()

    @property
    def replays(self) -> bool:
        """Whether the pass under way replays routing that is in its batch."""
        flag = self.verl.tu.get_non_tensor_data(data=self._data, key="enable_routing_replay", default=False)
        return bool(flag) and self._data.get("routed_experts", None) is not None

    def plan(self, micro_batches: Sequence[Any]) -> None:
        """Collective: plan the pass."""
        if not self.replays:
            return
        start = time.perf_counter()
        step = self.balancer.begin(_Replayed(self, micro_batches), self._stage)
        found = figures(step, self._stage) | {"planning_s": time.perf_counter() - start}
        part = "log_prob_" if self._stage is Stage.LOGPROB else ""
        self.waiting |= {f"equilibra/{part}{name}": value for name, value in found.items()}

    def report(self, output: Any) -> Any:  # noqa: ANN401 - what forward_backward_batch returns
        """Add the figures to the metrics of an update; those of log-probabilities wait for it, as nobody logs them."""
        if self._stage is Stage.UPDATE and isinstance(output, dict) and "metrics" in output:
            output["metrics"].update({name: [value] for name, value in self.waiting.items()})
        if self._stage is Stage.UPDATE:
            self.waiting = {}
        return output

    def routing_of(self, micro_batch: Any) -> list[Tensor]:  # noqa: ANN401
        """[L] ids [T, K] of a micro-batch as this rank's routers will replay them, -1 in rows they route live."""
        engine, verl = self.engine, self.verl
        ids, mask, input_ids = micro_batch["routed_experts"], None, micro_batch["input_ids"]
        if engine.engine_config.router_replay.mode == "R3":
            ids = verl.align_r3_router_replay_data(ids, input_ids)
            mask = verl.build_r3_replay_mask(input_ids, micro_batch["response_mask"])
        attention_mask, replays = micro_batch.get("attention_mask", None), [one.router_replay for one in self.routers]
        try:
            for model in map(verl.unwrap_model, engine.module):
                if not _layers_of([model]):  # a stage or a chunk without experts, where verl finds no routers
                    continue
                verl.set_router_replay_data(
                    ids, attention_mask, engine.tf_config, getattr(model, "vp_stage", None) or 0,
                    replay_mask=mask, local_cp_size=None, model=model,
                )  # fmt: skip
            return [masked(replay.target_topk_idx, replay.target_replay_mask) for replay in replays]
        finally:
            for replay in replays:
                replay.clear_indices()


def _layers_of(chunks: Sequence[nn.Module]) -> list[Any]:
    """The balanced layers in their order."""
    found: list[Any] = [layer for chunk in chunks for layer in chunk.modules() if getattr(layer, "visits", None)]
    return sorted(found, key=lambda layer: int(layer.visits.layer))


class _Replayed(Sequence[Sequence[Tensor]]):
    """[M][L] ids [T, K], made when they are asked for: int64 ids of all micro-batches would fill gigabytes."""

    def __init__(self, engine: BalancedEngine, micro_batches: Sequence[Any]) -> None:
        self.engine, self.micro_batches = engine, micro_batches

    def __len__(self) -> int:
        return len(self.micro_batches)

    @overload
    def __getitem__(self, number: int) -> Sequence[Tensor]: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Sequence[Tensor]]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return _Replayed(self.engine, self.micro_batches[number])
        return self.engine.routing_of(self.micro_batches[number])

    def __iter__(self) -> Iterator[Sequence[Tensor]]:
        return (self.engine.routing_of(one) for one in self.micro_batches)


def figures(step: Step, stage: Stage) -> dict[str, float]:
    """What a plan is worth, by name; none of the names has "min" or "max" in it, by which verl would reduce them."""
    load_MLE = step.load.expert_load()
    static_MLR = load_MLE.reshape(*load_MLE.shape[:2], step.load.num_ranks, -1).sum(axis=3)
    planned_LMR = step.plan.rank_load(step.load, stage)
    slowest = int(planned_LMR.max(axis=2).sum())
    return {
        "imbalance_before": step.static_imbalance,
        "imbalance_after": float(imbalance(planned_LMR).mean()),
        "predicted_gain": int(static_MLR.max(axis=2).sum()) / slowest if slowest else 1.0,
        "copies": float(step.plan.stages[stage].num_copies),
        "moves": float(step.plan.migration.num_moves),
        "plan_reused": float(step.reused),
    }
