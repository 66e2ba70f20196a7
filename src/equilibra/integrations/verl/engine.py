"""verl's Megatron engine under plans: what is planned when, from which routing, and which metrics are reported.

Symbols: M micro-batches, L MoE layers of this pipeline stage, T tokens of this rank, K experts per token.

Every `forward_backward_batch` is one step. With routing to replay, it is planned once its micro-batches are made;
without (reference log-probs, R2's recording), it runs on homes alone. In live mode every layer plans its own forwards;
there and in history mode, standing copies follow past steps, and the next step is planned when an update is done.
verl's own functions prepare the routing of one micro-batch at a time: they pack it, slice it for context and tensor
parallelism, and write it to the routers. It is read from there and cleared again.

With `verify_steps`, the first updates run without and with the plan, on the same mini-batch. The pass without runs
first; verl goes on with the output and the gradients of the pass under the plan, so training is the same as without
`verify_steps`, and an update costs one more forward and backward.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn

from equilibra.core.checks import check_flag, check_whole
from equilibra.core.errors import InputError
from equilibra.core.load import imbalance
from equilibra.core.plan import Stage
from equilibra.integrations.differences import check, table
from equilibra.integrations.executor.balancer import LazyRouting
from equilibra.integrations.executor.warming import warm_up
from equilibra.integrations.megatron import Balancer, Step, balance, masked
from equilibra.integrations.megatron.verify import compare
from equilibra.integrations.planned import MegatronSetting

logger = logging.getLogger(__name__)

BLOCK = "actor_rollout_ref.actor.megatron.override_mcore_model_config.equilibra"
"""where the options are: one of the few dictionaries of verl's configuration that accept unknown keys"""
OPTIONS = (
    "enabled", "mode", "planner", "history_steps", "spare_slots", "standing_slots", "max_moves_per_layer", "prefetch",
    "path", "ranks_per_node", "hardware", "timeout_s", "seed", "verify_steps",
)  # fmt: skip
"""names that the block accepts"""


@dataclass(frozen=True, kw_only=True)
class VerlSetting(MegatronSetting):
    """The options of the block; the same on every rank."""

    section: ClassVar[str] = f"{BLOCK}."

    max_moves_per_layer: int = 0
    """homes that may move per layer and pass; -1: as many as pay"""
    enabled: bool = True
    """False: the engine stays as verl made it"""
    verify_steps: int = 0
    """updates, from the first, that also run without a plan and are compared with it"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(f"{self.section}verify_steps", self.verify_steps, low=0, high=2**31 - 1)
        if self.verify_steps and self.mode != "replay":
            raise InputError(f"{self.section}verify_steps needs recorded routing: set it to 0 with mode={self.mode!r}")
        check_flag(f"{self.section}enabled", self.enabled)


def setting_of(engine_config: Any) -> VerlSetting:  # noqa: ANN401 - verl's McoreEngineConfig
    """The options in an engine's configuration; unknown ones are an error."""
    block = (engine_config.override_mcore_model_config or {}).get("equilibra")
    block = {} if block is None else block
    if not isinstance(block, Mapping):
        raise InputError(f"{BLOCK} must be a table of options, not {block!r}: {BLOCK}.enabled=False switches it off")
    unknown = sorted(str(name) for name in block if name not in OPTIONS)
    if unknown:
        raise InputError(f"{BLOCK} has no option {', '.join(unknown)}: it has {', '.join(OPTIONS)}")
    return VerlSetting(**{str(name): value for name, value in block.items()})


def warm_engine(engine: Any) -> None:  # noqa: ANN401 - verl's MegatronEngine, not initialised yet
    """Start to compile the planner while the engine loads its model, if it will be balanced."""
    config = engine.engine_config
    setting, ranks = setting_of(config), config.expert_model_parallel_size
    if not setting.enabled or setting.planner == "static" or config.forward_only:
        return
    if ranks > 1 and (setting.mode != "replay" or config.router_replay.mode != "disabled"):
        warm_up(setting.cluster_of(ranks).num_nodes)


def balance_engine(engine: Any, verl: ModuleType) -> BalancedEngine | None:  # noqa: ANN401 - verl's MegatronEngine
    """Collective: balance an initialised engine; None if it trains no policy or balancing is off.

    verl: the engine's module, whose functions are used.
    """
    setting = setting_of(engine.engine_config)
    if not setting.enabled or engine.engine_config.forward_only or engine.is_value_model:
        return None
    check_engine(engine, setting)
    balancer = balance(engine.module, setting, optimizer=engine.optimizer)
    logger.info("Equilibra plans %d MoE layers on %s", len(balancer.layers), balancer.group.cluster)
    return BalancedEngine(engine, verl, setting, balancer)


def check_engine(engine: Any, setting: VerlSetting) -> None:  # noqa: ANN401
    """Refuse options of verl that exclude planning; `balance` checks Megatron's."""
    config, off = engine.engine_config, f"or set {BLOCK}.enabled=False"
    if not getattr(engine.tf_config, "num_moe_experts", None):
        raise InputError(f"there is nothing to balance: the actor's model has no experts; {off}")
    if setting.mode == "replay" and config.router_replay.mode == "disabled":
        raise InputError(
            "cannot plan without replay, since the routing is unknown before the step: set "
            "actor_rollout_ref.actor.megatron.router_replay.mode=R3 with "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True, or R2; set "
            f"{BLOCK}.mode=live to plan each layer from what its router has just chosen, or history; {off}"
        )
    ranks = getattr(engine.tf_config, "expert_model_parallel_size", 1)
    if ranks < 2:
        raise InputError(
            f"there is nothing to balance with expert_model_parallel_size={ranks}: every rank has all experts; {off}"
        )
    if config.dynamic_context_parallel:
        raise InputError(
            "cannot plan with dynamic_context_parallel=True: another scheduler makes its micro-batches and moves "
            f"sequences between ranks; set it to False, {off}"
        )
    if getattr(engine, "peft_cls", None) is not None:
        raise InputError(
            f"cannot copy experts with adapters (LoRA): their weights are in two places; remove them, {off}"
        )
    if getattr(engine, "_qat_enabled", False):
        raise InputError(f"cannot copy experts under quantisation-aware training: switch it off, {off}")


class BalancedEngine:
    """A verl engine with its balancer and the pass that is running."""

    def __init__(self, engine: Any, verl: ModuleType, setting: VerlSetting, balancer: Balancer) -> None:  # noqa: ANN401
        self.engine, self.verl, self.setting, self.balancer = engine, verl, setting, balancer
        self.routers = [layer.router for layer in _layers_of(engine.module)]
        self._data: Any = None
        self._stage = Stage.UPDATE
        self.waiting: dict[str, float] = {}
        """metrics that are not in verl's log yet"""
        self.to_verify = setting.verify_steps
        """updates that are still to be compared with plain ones"""

    def under_plan(self, run: Callable[[], Any], data: Any, *, forward_only: bool) -> Any:  # noqa: ANN401
        """Run a pass over this batch (a TensorDict); verl calls `plan` in it, when its micro-batches are made."""
        self._data, self._stage = data, Stage.LOGPROB if forward_only else Stage.UPDATE
        self.balancer.end()
        token = RUNNING.set(self)
        try:
            return run()
        finally:
            RUNNING.reset(token)
            self._data = None
            self.balancer.end()

    @property
    def replays(self) -> bool:
        """Whether the running pass replays routing from its batch."""
        flag = self.verl.tu.get_non_tensor_data(data=self._data, key="enable_routing_replay", default=False)
        return bool(flag) and self._data.get("routed_experts", None) is not None

    def plan(self, micro_batches: Sequence[Any]) -> None:
        """Collective: plan the pass if it replays routing."""
        if self.setting.mode != "replay":
            self.balancer.begin_from_past_steps(self._stage)
            return
        if not self.replays:
            return
        start = time.perf_counter()
        step = self.balancer.begin(LazyRouting(micro_batches, self.routing_of), self._stage)
        self._note(figures(step, self._stage) | {"planning_s": time.perf_counter() - start})

    def _note(self, found: dict[str, float]) -> None:
        part = "log_prob_" if self._stage is Stage.LOGPROB else ""
        self.waiting |= {f"equilibra/{part}{name}": value for name, value in found.items()}

    def report(self, output: Any) -> Any:  # noqa: ANN401 - what forward_backward_batch returns
        """Add the metrics to an update's output, and those of the log-prob stage, whose output verl does not log."""
        if self._stage is Stage.UPDATE:
            self.balancer.prepare_from_past_steps()
        observed = self.balancer.live or (self.balancer.history if self._stage is Stage.UPDATE else None)
        if observed is not None:
            before, after = observed.take_imbalance()
            self._note({"imbalance_before": before, "imbalance_after": after})
        if self._stage is Stage.UPDATE:
            if isinstance(output, dict) and "metrics" in output:
                output["metrics"].update({name: [value] for name, value in self.waiting.items()})
            self.waiting = {}
        return output

    def verified(self, plain: Callable[[], Any], under_plan: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Collective: what the pass under the plan returned; metrics are differences in units of the rounding limit."""
        self.to_verify -= 1
        returned, found = compare(self.balancer, self.engine.module, plain, under_plan, _outputs)
        if dist.get_rank() == 0:
            print(f"Equilibra compared an update with and without its plan:\n{table(found)}", flush=True)
        check(found)
        self.waiting |= {f"equilibra/verify_{one.what.split()[-1]}": one.found / one.allowed for one in found}
        return returned

    def routing_of(self, micro_batch: Any) -> list[Tensor]:  # noqa: ANN401
        """[L] ids [T, K] of a micro-batch as this rank's routers will replay them; -1 in rows routed live."""
        engine, verl = self.engine, self.verl
        ids, mask, input_ids = micro_batch["routed_experts"], None, micro_batch["input_ids"]
        if engine.engine_config.router_replay.mode == "R3":
            ids = verl.align_r3_router_replay_data(ids, input_ids)
            mask = verl.build_r3_replay_mask(input_ids, micro_batch["response_mask"])
        attention_mask, replays = micro_batch.get("attention_mask", None), [one.router_replay for one in self.routers]
        try:
            for model in map(verl.unwrap_model, engine.module):
                if not _layers_of([model]):  # no experts in this stage or chunk: verl would find no routers
                    continue
                verl.set_router_replay_data(
                    ids, attention_mask, engine.tf_config, getattr(model, "vp_stage", None) or 0,
                    replay_mask=mask, local_cp_size=None, model=model,
                )  # fmt: skip
            return [masked(replay.target_topk_idx, replay.target_replay_mask) for replay in replays]
        finally:
            for replay in replays:
                replay.clear_indices()


RUNNING: ContextVar[BalancedEngine | None] = ContextVar("engine whose pass is running", default=None)


def _layers_of(chunks: Sequence[nn.Module]) -> list[Any]:
    """The balanced layers in their order."""
    found: list[Any] = [layer for chunk in chunks for layer in chunk.modules() if getattr(layer, "visits", None)]
    return sorted(found, key=lambda layer: int(layer.visits.layer))


def _outputs(returned: dict[str, Any]) -> dict[str, Any]:
    """Losses and log-probs, on the last pipeline stage."""
    return {name: returned.get(name) for name in ("loss", "model_output")}


def figures(step: Step, stage: Stage) -> dict[str, float]:
    """Metrics of a plan by name; no name contains "min" or "max", by which verl would reduce it."""
    load_MLE = step.load.expert_load()
    static_MLR = load_MLE.reshape(*load_MLE.shape[:2], step.load.num_ranks, -1).sum(axis=3)
    planned_LMR = step.plan.rank_load(step.load, stage)
    slowest = int(planned_LMR.max(axis=2).sum())
    return {
        "imbalance_before": step.static_imbalance,
        "imbalance_after": float(imbalance(planned_LMR).mean()),
        "predicted_gain": int(static_MLR.max(axis=2).sum()) / slowest if slowest else 1.0,
        "copies": float(step.plan.stages[stage].num_copies),
        "standing_copies": float(step.plan.standing.num_copies),
        "moves": float(0 if step.reused else step.plan.migration.num_moves),
        "plan_reused": float(step.reused),
    }
