"""The functions that slime's flags name, and when a rollout is planned. slime is not forked, and imported only to log.

    --custom-megatron-before-log-prob-hook-path     equilibra.integrations.slime.hooks.before_log_prob
    --custom-megatron-before-train-step-hook-path   equilibra.integrations.slime.hooks.before_train_step
    --spec                                          equilibra.integrations.slime.hooks layer_spec
    --custom-config-path                            a file with the options `equilibra_...`

The first hook call switches the model's MoE layers to planned execution. slime turns every key of the config file into
an attribute of `args` before it starts its processes. It keeps the routing of a whole rollout per layer, one entry for
each micro-batch of this rank:

    router.routing_replay.top_indices_list   [M] ids [T, K]: optimizer step 0's micro-batches, then step 1's, ...
    router.routing_replay.forward_index      entries that forward passes have consumed

Hooks do not learn how many micro-batches their optimizer step has, so the whole rollout is planned at once. Every
optimizer step arms the rest of the plan, since copies must hold the weights after the previous step, and checks the
plan's position against `forward_index`. The log-prob stage covers the same micro-batches and shares the plan.

Without replay (`equilibra_mode`: live or history), a layer is planned from what its router has just chosen, or from
past optimizer steps, and no hook reads routing.

Homes do not move: slime switches between actor, reference and teacher by copying weights into a rank's parameters, and
numbers experts by rank when it sends weights to the rollout engines. Both need experts where Megatron puts them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from equilibra.core.checks import check_text
from equilibra.core.errors import ExecuteError, InputError
from equilibra.core.plan import Stage
from equilibra.integrations.megatron import MegatronSetting, Step, balance, balanced_layer_spec, by_micro_batch
from equilibra.integrations.megatron.layer import check_config

logger = logging.getLogger(__name__)

PREFIX = "equilibra_"
OPTIONS = (
    "mode", "history_steps", "planner", "spare_slots", "standing_slots", "prefetch", "path", "ranks_per_node",
    "hardware", "timeout_s", "seed", "spec",
)  # fmt: skip
"""options without the prefix; none is about moves, since homes do not move under slime"""
PLACE = "equilibra_rollouts"
"""attribute of the model's first chunk for its `Rollouts` or `StepsWithoutReplay`, as slime keeps the model's role"""
ACTOR = "actor"
REPLAYED = "replay_forward"
"""slime's replay stage in which routers take recorded experts"""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedRollout:
    """The plan of a rollout."""

    step: Step
    """all optimizer steps of the rollout as one"""
    seconds: float
    """time to count, gather and plan, in seconds"""

    def report(self) -> Report:
        return Report(self.step.static_imbalance, self.step.planned_imbalance, self.seconds)


class Report(NamedTuple):
    """What slime logs at the first optimizer step of a rollout."""

    static: float
    """slowest over mean rank as slime would have it"""
    planned: float
    planning_s: float | None = None
    """None where steps are not planned ahead; then the imbalance is of what ran since the last report"""


class Rollouts:
    """Plans the rollouts of an actor's model. Collective: all its processes call at the same passes."""

    def __init__(self, model: Sequence[nn.Module], setting: MegatronSetting) -> None:
        parts = [part for chunk in model for part in chunk.modules()]
        if any(getattr(getattr(part, "config", None), "moe_router_fusion", False) for part in parts):
            raise InputError(
                "cannot replay routing with --moe-router-fusion: the fused router ignores slime's replay; remove it"
            )
        self.balancer = balance(model, setting)
        layers = [part for chunk in model for part in chunk.modules() if getattr(part, "visits", None) is not None]
        self.replays = [_replay_of(layer) for layer in layers]
        """of the MoE layers, in their order; none on a pipeline stage that has no such layers"""
        self._waiting: PlannedRollout | None = None
        """planned in the log-prob stage; its update has not begun"""
        self._rollout: PlannedRollout | None = None
        """the rollout of the current update"""
        self._start = 0
        """its micro-batches before this optimizer step"""

    def before_log_probs(self) -> None:
        """Before a forward-only pass: plan it if it replays, else run it on homes.

        slime's replay stage decides, not the prefix: the first pass under `--use-routing-replay` records.
        """
        self._rollout = None
        self.balancer.end()
        if os.environ.get("ROUTING_REPLAY_STAGE") == REPLAYED:
            self._waiting = self._begin(Stage.LOGPROB)

    def before_train_step(self, step_id: int, optimizer: Any) -> Report | None:  # noqa: ANN401, ARG002 - homes stay
        """Before an optimizer step; reports at the first one."""
        check = partial(self._position, step_id)
        self._start = self.balancer.group.all_succeed(check, what="comparing slime's position with the plan")
        if step_id == 0:
            return self._first_step().report()
        assert self._rollout is not None
        self.balancer.arm(self._rollout.step, Stage.UPDATE, start=self._start)
        return None

    def _position(self, step_id: int) -> int:
        """Micro-batches that slime has replayed; an error if the plan has reached another one."""
        taken = self._taken()
        if step_id == 0:
            if taken:
                raise ExecuteError(f"a rollout must be replayed from its first micro-batch, not from {taken}")
            return taken
        done = self.balancer.layers[0].num_done if self.balancer.layers else 0
        planned = self._start + done if self._rollout else 0
        if self._rollout is None or taken != planned:
            raise ExecuteError(
                f"optimizer step {step_id} replays from micro-batch {taken} on, but the plan is at {planned}: set both "
                "hooks, and run no pass between them that they do not see"
            )
        return taken

    def _first_step(self) -> PlannedRollout:
        waiting, self._waiting = self._waiting, None
        current = np.array([waiting is not None and self._is_current(waiting)])
        every = self.balancer.group.gather(current, what="checking that the rollout is the one that was planned")
        if waiting is not None and all(bool(part[0]) for part in every):
            self._rollout = waiting
            self.balancer.arm(waiting.step, Stage.UPDATE)
        else:
            self._rollout = self._begin(Stage.UPDATE)
        return self._rollout

    def routing(self) -> list[list[Tensor]]:
        """[M][L] recorded ids [T, K] of the rollout."""
        if not self.replays:
            return []
        lists = [replay.top_indices_list for replay in self.replays]
        counts = {len(of_layer) for of_layer in lists}
        if len(counts) > 1:
            raise InputError(
                f"routers have recorded {min(counts)} to {max(counts)} micro-batches, but all need the same number: "
                "some router's list was filled twice, or not at all"
            )
        if counts == {0}:
            raise InputError(
                "no routing is recorded: without --use-rollout-routing-replay slime records it in the log-prob stage, "
                "which --use-rollout-logprobs skips; change one of the flags"
            )
        odd = next((entry for of_layer in lists for entry in of_layer if not torch.is_tensor(entry)), None)
        if odd is not None:
            raise InputError(
                f"recorded routing must be tensors, not {type(odd).__name__}: keep it in memory, without the hook that "
                "spills it to --rollout-routed-experts-store-dir"
            )
        return by_micro_batch(lists)

    def _begin(self, stage: Stage) -> PlannedRollout:
        start = perf_counter()
        routing = self.balancer.group.all_succeed(self.routing, what="reading the routing of a rollout")
        step = self.balancer.begin(routing, stage)
        return PlannedRollout(step=step, seconds=perf_counter() - start)

    def _is_current(self, planned: PlannedRollout) -> bool:
        """Whether the plan has the rollout's number of micro-batches. A wrong match costs balance, not correctness."""
        num = planned.step.plan.num_micro_batches // self.balancer.group.num_groups
        return not self.replays or num == len(self.replays[0].top_indices_list)

    def _taken(self) -> int:
        """Micro-batches that forward passes have replayed."""
        taken = {replay.forward_index for replay in self.replays}
        if len(taken) > 1:
            raise ExecuteError(
                f"routers have replayed {min(taken)} to {max(taken)} micro-batches, but all need the same number: a "
                "pass was interrupted"
            )
        return int(taken.pop()) if taken else 0


class StepsWithoutReplay:
    """Plans an actor's optimizer steps without recorded routing. Collective, as `Rollouts`."""

    def __init__(self, model: Sequence[nn.Module], setting: MegatronSetting) -> None:
        self.balancer = balance(model, setting)
        self._guarded = False

    def before_log_probs(self) -> None:
        """Before a forward-only pass: no standing copies, since slime may put other weights into the parameters."""
        self.balancer.prepare_from_past_steps()
        self.balancer.end()

    def before_train_step(self, step_id: int, optimizer: Any) -> Report | None:  # noqa: ANN401 - Megatron's
        """Before an optimizer step; reports at the first one."""
        if not self._guarded:
            self.balancer.attend(optimizer)
            self._guarded = True
        self.balancer.begin_from_past_steps()
        observed = self.balancer.live or self.balancer.history
        if step_id or observed is None or not observed.num_seen:
            return None
        return Report(*observed.take_imbalance())


def _replay_of(layer: Any) -> Any:  # noqa: ANN401 - Megatron's MoE layer
    replay = getattr(layer.router, "routing_replay", None)
    if replay is None:
        raise InputError(
            "a router has no routing_replay: slime adds it to models built with --use-routing-replay or "
            "--use-rollout-routing-replay; check the flags, and that slime's Megatron patch or bridge is installed"
        )
    return replay


@dataclass(frozen=True, kw_only=True)
class SlimeSetting(MegatronSetting):
    """The options by name. The same on every rank."""

    section: ClassVar[str] = PREFIX


def layer_spec(args: Any, config: Any, vp_stage: int | None = None) -> Any:  # noqa: ANN401 - of slime and Megatron
    """The layers of `equilibra_spec`, or slime's default ones, with balanced MoE layers.

    Optional: the hooks switch the layers of a built model as well. Through `--spec`, incompatible options are refused
    before a checkpoint is loaded.
    """
    check_config(config)
    named = base_spec(args)
    if named is not None:
        found = getattr(import_module(named[0]), named[1])
        return balanced_layer_spec(found(args, config, vp_stage) if callable(found) else found)
    if not args.num_experts:
        raise InputError("there is nothing to balance: the model has no experts; remove --spec")
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: PLC0415

    stage = {} if vp_stage is None else {"vp_stage": vp_stage}
    use_te = args.transformer_impl == "transformer_engine"
    return balanced_layer_spec(get_gpt_decoder_block_spec(config, use_transformer_engine=use_te, **stage))


def before_log_prob(args: Any, model: Sequence[nn.Module], store_prefix: str) -> None:  # noqa: ANN401, ARG001
    """Plan the actor's log-prob stage if it replays routing; with replay, reference and teacher run on homes alone."""
    if _is_actor(model):
        _rollouts(args, model).before_log_probs()


def before_train_step(
    args: Any,  # noqa: ANN401
    rollout_id: int,
    step_id: int,
    model: Sequence[nn.Module],
    optimizer: Any,  # noqa: ANN401
    opt_param_scheduler: Any,  # noqa: ANN401, ARG001
) -> None:
    """Arm the rollout's plan for this optimizer step; plan it first if the log-prob stage did not."""
    if _is_actor(model):
        report = _rollouts(args, model).before_train_step(step_id, optimizer)
        if report is not None:
            _log(args, rollout_id, report)


def setting_of(args: Any) -> SlimeSetting:  # noqa: ANN401 - slime's arguments
    """The planning options in slime's arguments, with `MegatronSetting`'s defaults."""
    given = _given(args)
    given.pop("spec", None)
    return SlimeSetting(**given)


def base_spec(args: Any) -> list[str] | None:  # noqa: ANN401
    """The module and function of `equilibra_spec`, which builds the layers to balance; None if not set."""
    named = _given(args).get("spec")
    if named is None:
        return None
    check_text(f"{PREFIX}spec", named)
    words = named.split()
    if len(words) != 2:
        raise InputError(
            f"{PREFIX}spec must be a module and a function in it, as for --spec, such as "
            f"'slime_plugins.models.glm4 get_glm_spec', not {named!r}"
        )
    return words  # type: ignore[no-any-return]


def _given(args: Any) -> dict[str, Any]:  # noqa: ANN401
    given = {name.removeprefix(PREFIX): value for name, value in vars(args).items() if name.startswith(PREFIX)}
    for name in given:
        if name not in OPTIONS:
            known = ", ".join(f"{PREFIX}{one}" for one in OPTIONS)
            raise InputError(f"{PREFIX}{name} is not an option: use {known}")
    return given


def _is_actor(model: Sequence[nn.Module]) -> bool:
    """Whether this is the actor; only it replays, but a critic's processes run the same hooks."""
    return getattr(model[0], "role", ACTOR) == ACTOR


def _rollouts(args: Any, model: Sequence[nn.Module]) -> Rollouts | StepsWithoutReplay:  # noqa: ANN401
    found: Rollouts | StepsWithoutReplay | None = getattr(model[0], PLACE, None)
    if found is None:
        setting, replays = setting_of(args), os.environ.get("ENABLE_ROUTING_REPLAY", "0") == "1"
        if not replays and setting.mode == "replay":
            raise InputError(
                "cannot plan a rollout without routing replay: add --use-rollout-routing-replay (routing of the "
                "rollout) or --use-routing-replay (routing of the log-prob stage), or set equilibra_mode to live or "
                "history"
            )
        if replays and setting.mode != "replay":
            raise InputError(
                f"equilibra_mode {setting.mode} ignores the routing that slime replays: remove --use-routing-replay "
                "and --use-rollout-routing-replay, or the option"
            )
        found = (Rollouts if replays else StepsWithoutReplay)(model, setting)
        object.__setattr__(model[0], PLACE, found)
    return found


def _log(args: Any, rollout_id: int, report: Report) -> None:  # noqa: ANN401
    """Log beside slime's own metrics, from one process of the last pipeline stage."""
    from megatron.core import parallel_state as groups  # noqa: PLC0415

    if (
        groups.get_data_parallel_rank(with_context_parallel=True)
        or groups.get_tensor_model_parallel_rank()
        or not groups.is_pipeline_last_stage(ignore_virtual=True)
    ):
        return
    planned = "" if report.planning_s is None else f"planned in {report.planning_s:.3f} s; "
    logger.info(
        "rollout %d: %simbalance %.3f, static placement %.3f", rollout_id, planned, report.planned, report.static
    )
    modules = _metrics_modules()
    if modules is None:
        return
    tracking, metrics, timer = modules
    if report.planning_s is not None:
        timer.Timer().add("equilibra_plan", report.planning_s)  # slime logs it as perf/equilibra_plan_time
    values = {
        "perf/equilibra_static_imbalance": report.static,
        "perf/equilibra_planned_imbalance": report.planned,
        "rollout/step": metrics.compute_rollout_step(args, rollout_id),
    }
    tracking.log(args, values, step_key="rollout/step")


def _metrics_modules() -> tuple[Any, Any, Any] | None:
    """Slime's logging_utils, metric_utils and timer, wherever this version has them; None without slime."""
    for package in ("slime.observability", "slime.utils"):  # moved there on 2026-08-21
        with suppress(ImportError):
            tracking, metrics, timer = (
                import_module(f"{package}.{name}") for name in ("logging_utils", "metric_utils", "timer")
            )
            return tracking, metrics, timer
    return None
