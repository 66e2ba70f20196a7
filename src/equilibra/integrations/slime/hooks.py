"""The functions that slime's flags name. slime is not forked, and is imported only to log.

    --custom-megatron-before-log-prob-hook-path     equilibra.integrations.slime.hooks.before_log_prob
    --custom-megatron-before-train-step-hook-path   equilibra.integrations.slime.hooks.before_train_step
    --spec                                          equilibra.integrations.slime.hooks layer_spec
    --custom-config-path                            a file with the options `equilibra_...`

The first hook call switches the model's MoE layers to planned execution; `rollouts.py` says what is planned when. slime
turns every key of the config file into an attribute of `args` before it starts its processes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from torch import nn

from equilibra.core.checks import check_text
from equilibra.core.errors import InputError
from equilibra.integrations.megatron import balanced_layer_spec
from equilibra.integrations.megatron.layer import check_config
from equilibra.integrations.planned import MegatronSetting
from equilibra.integrations.slime.rollouts import PlannedRollout, Rollouts

__all__ = ["OPTIONS", "PREFIX", "base_spec", "before_log_prob", "before_train_step", "layer_spec", "setting_of"]

logger = logging.getLogger(__name__)

ACTOR = "actor"
PLACE = "equilibra_rollouts"
"""attribute of the model's first chunk that holds its `Rollouts`; slime keeps the model's role there too"""
PREFIX = "equilibra_"
OPTIONS = (
    "planner", "spare_slots", "standing_slots", "prefetch", "path", "ranks_per_node", "hardware", "timeout_s", "seed",
    "spec",
)  # fmt: skip
"""options without the prefix; none is about moves, since homes do not move under slime"""


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
    """Plan the actor's log-prob stage if it replays routing; reference and teacher run on homes alone.

    slime's replay stage decides, not the prefix: the first pass under `--use-routing-replay` records.
    """
    if _is_actor(model):
        _rollouts(args, model).before_log_probs(os.environ.get("ROUTING_REPLAY_STAGE", ""))


def before_train_step(
    args: Any,  # noqa: ANN401
    rollout_id: int,
    step_id: int,
    model: Sequence[nn.Module],
    optimizer: Any,  # noqa: ANN401, ARG001 - homes do not move
    opt_param_scheduler: Any,  # noqa: ANN401, ARG001
) -> None:
    """Arm the rollout's plan for this optimizer step; plan it first if the log-prob stage did not."""
    if _is_actor(model):
        planned = _rollouts(args, model).before_train_step(step_id)
        if planned is not None:
            _log(args, rollout_id, planned)


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


def _rollouts(args: Any, model: Sequence[nn.Module]) -> Rollouts:  # noqa: ANN401
    found: Rollouts | None = getattr(model[0], PLACE, None)
    if found is None:
        if os.environ.get("ENABLE_ROUTING_REPLAY", "0") != "1":
            raise InputError(
                "cannot plan a rollout without routing replay: add --use-rollout-routing-replay (routing of the "
                "rollout) or --use-routing-replay (routing of the log-prob stage)"
            )
        found = Rollouts(model, setting_of(args))
        object.__setattr__(model[0], PLACE, found)
    return found


def _log(args: Any, rollout_id: int, planned: PlannedRollout) -> None:  # noqa: ANN401
    """Log beside slime's own metrics, from one process of the last pipeline stage."""
    from megatron.core import parallel_state as groups  # noqa: PLC0415

    if (
        groups.get_data_parallel_rank(with_context_parallel=True)
        or groups.get_tensor_model_parallel_rank()
        or not groups.is_pipeline_last_stage(ignore_virtual=True)
    ):
        return
    static, balanced = planned.step.static_imbalance, planned.step.planned_imbalance
    logger.info(
        "rollout %d: %d micro-batches planned in %.3f s; imbalance %.3f, static placement %.3f",
        rollout_id, planned.step.plan.num_micro_batches, planned.seconds, balanced, static,
    )  # fmt: skip
    modules = _metrics_modules()
    if modules is None:
        return
    tracking, metrics, timer = modules
    timer.Timer().add("equilibra_plan", planned.seconds)  # slime logs it as perf/equilibra_plan_time
    values = {
        "perf/equilibra_static_imbalance": static,
        "perf/equilibra_planned_imbalance": balanced,
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
