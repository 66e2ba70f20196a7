"""Rollouts through the stand-in of slime, as they are and with Equilibra's hooks."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests.megatron_core import layer_runs, models, slime_groups
from tests.megatron_core.gpt_runs import FULL, Training
from tests.megatron_core.live_runs import LiveTraining
from tests.megatron_core.slime_stand_in import Actor
from torch import Tensor

from equilibra.core.errors import EquilibraError
from equilibra.cost.rates import Rates
from equilibra.integrations.megatron import MegatronSetting, visits
from equilibra.integrations.slime import hooks

NUM_MICROBATCHES = [3, 2]
LAYERS = 2
"""of a pipeline stage"""
RUN = visits.MegatronVisits.run


@dataclass(frozen=True, kw_only=True)
class Case:
    options: dict[str, Any] = field(default_factory=lambda: dict(FULL))
    """of Megatron's configuration"""
    rollout_routes: bool = True
    """--use-rollout-routing-replay, or else --use-routing-replay"""
    log_probs: bool = True
    """without --use-rollout-logprobs"""
    arguments: dict[str, Any] | None = None
    """of slime's `args`; None: a setting under which copies are free"""
    pipeline: int = 1
    rollouts: int = 1
    offload: str = ""
    """--offload-train: process groups are made again between rollouts, "groups" or "world" with them"""
    replays: bool = True
    sabotage: str | None = None


def routes(rollout_id: int, rank: int, num_stages: int = 1, stage: int = 0) -> list[list[Tensor]]:
    """[M][L] of the two layers of a pipeline stage."""
    num_layers = LAYERS * num_stages
    whole = models.routing(rollout_id, rank, sum(NUM_MICROBATCHES), num_layers, models.SEQUENCE, models.SKEW)
    return [layers[LAYERS * stage :][:LAYERS] for layers in whole]


def actor(case: Case) -> Actor:
    args = Namespace(num_experts=models.NUM_EXPERTS, **(case.arguments or {}))
    options = {**case.options, "gradient_accumulation_fusion": False, "moe_enable_routing_replay": case.replays}
    kind = Training if case.replays else LiveTraining
    return Actor(kind(options, num_layers=LAYERS * case.pipeline), args, NUM_MICROBATCHES, replays=case.replays)


def run(one: Actor, case: Case) -> None:
    for rollout_id in range(case.rollouts):
        if case.offload and rollout_id:
            assert slime_groups.sleep_and_wake_up(world=case.offload == "world")
        rank, stage = _place()
        known = routes(rollout_id, rank, case.pipeline, stage) if case.rollout_routes and case.replays else None
        os.environ["ENABLE_ROUTING_REPLAY"] = str(int(case.replays))
        one.train_actor(rollout_id, known, log_probs=case.log_probs)


def _place() -> tuple[int, int]:
    """This rank among those with other data, and its pipeline stage."""
    from megatron.core import parallel_state as groups

    return groups.get_data_parallel_rank(), groups.get_pipeline_model_parallel_rank()


def against_plain(cases: dict[str, Case], pipeline: int = 1) -> dict[str, dict[str, Any]]:
    """Losses of all passes and weights afterwards, with hooks and without; what was logged, and what ranks computed."""
    if any(case.offload for case in cases.values()):
        slime_groups.install(world=any(case.offload == "world" for case in cases.values()))
    models.join(2, pipeline)
    plain: dict[str, Actor] = {}
    for case in cases.values():
        if _way(case) not in plain:
            run(plain.setdefault(_way(case), actor(case)), case)
    return {name: _against_plain(case, plain[_way(case)]) for name, case in cases.items()}


def _way(case: Case) -> str:
    """What of a case there is without hooks."""
    return f"{case.options} {case.rollout_routes} {case.replays} {case.log_probs} {case.rollouts} {case.offload}"


def _against_plain(case: Case, plain: Actor) -> dict[str, Any]:
    logged, rows = _listen_to_slime(), _count_rows()
    hooked = actor(case)
    hooked.train_hook, hooked.log_prob_hook = hooks.before_train_step, hooks.before_log_prob
    if case.arguments is None:
        setting = MegatronSetting(spare_slots=2, rates=Rates.free())
        hooked.model[0].equilibra_rollouts = hooks.Rollouts(hooked.model, setting)
    _break(hooked, case.sabotage)
    error = ""
    try:
        run(hooked, case)
    except EquilibraError as refused:
        error = str(refused)
    weights = hooked.training.weights()
    return {
        "plain": plain.said,
        "hooked": hooked.said,
        "weights": max(float((value - weights[name]).abs().max()) for name, value in plain.training.weights().items()),
        "logged": logged,
        "rows": rows,
        "error": error,
    }


def _break(one: Actor, how: str | None) -> None:
    """Controls."""
    if how == "no hook before a step":
        one.train_hook = None
    elif how == "plan of the micro-batches in another order":
        planned = one.model[0].equilibra_rollouts
        routing = planned.routing
        planned.routing = lambda: routing()[::-1]
    else:
        layer_runs.break_something(how)


def _count_rows() -> dict[str, list[int]]:
    """Rows that this rank computes, layer by layer, forward by forward, by the stage that slime is in."""
    found: dict[str, list[int]] = {}

    def counted(self: Any, homes: Any, rows: Tensor, count: Tensor, probs: Tensor) -> Any:
        found.setdefault(os.environ["ROUTING_REPLAY_STAGE"], []).append(int(count.sum()))
        return RUN(self, homes, rows, count, probs)

    visits.MegatronVisits.run = counted  # type: ignore[method-assign]
    return found


def _listen_to_slime() -> list[dict[str, float]]:
    """slime's modules that the hooks log to, and what they were given."""
    logged: list[dict[str, float]] = []

    class Timer:
        def add(self, name: str, seconds: float) -> None:
            logged.append({name: seconds})

    modules = {name: ModuleType(name) for name in ("slime", "slime.utils")}
    for name, content in {
        "logging_utils": {"log": lambda _args, values, step_key: logged.append({**values, "key": step_key})},
        "metric_utils": {"compute_rollout_step": lambda _args, rollout_id: rollout_id},
        "timer": {"Timer": Timer},
    }.items():
        modules[f"slime.utils.{name}"] = module = ModuleType(name)
        vars(module).update(content)
    sys.modules.update(modules)
    return logged


def refusals() -> dict[str, str]:
    """What is said of runs that cannot be planned."""
    models.join(2)
    os.environ["ROUTING_REPLAY_STAGE"] = "replay_backward"
    said: dict[str, str] = {}

    def ask(name: str, one: Actor, step_id: int = 0) -> None:
        try:
            hooks.before_train_step(one.args, 0, step_id, one.model, one.optimizer, None)
        except EquilibraError as refused:
            said[name] = str(refused)

    case = Case(arguments={})
    os.environ["ENABLE_ROUTING_REPLAY"] = "0"
    one = actor(case)
    ask("replay off", one)
    one.model[0].role = "critic"
    ask("critic", one)
    ask("mode live", actor(Case(arguments={"equilibra_mode": "no"})))
    os.environ["ENABLE_ROUTING_REPLAY"] = "1"
    ask("mode and replay", actor(Case(arguments={"equilibra_mode": "live"})))
    without = actor(case)
    del without.training.layers[1].router.routing_replay
    ask("router without replay", without)
    fused = actor(case)
    for layer in fused.training.layers:
        layer.config.moe_enable_routing_replay, layer.config.moe_router_fusion = False, True
    ask("fused router", fused)
    ask("unknown option", actor(Case(arguments={"equilibra_slots": 2})))
    one = actor(case)
    ask("nothing recorded", one)
    first, second = (layer.router.routing_replay for layer in one.training.layers)
    first.top_indices_list = [torch.zeros(1, 2)] * 2
    second.top_indices_list = [torch.zeros(1, 2)] * 3
    ask("lists of other lengths", one)
    if dist.get_rank():
        second.top_indices_list = first.top_indices_list = routes(0, 1)[0]
    ask("lists of other lengths on one rank", one)
    second.top_indices_list = ["later", "later"]
    first.top_indices_list = [torch.zeros(1, 2)] * 2
    ask("routes that come later", one)
    first.forward_index = 1
    ask("routers apart", one, step_id=1)
    second.forward_index = 1
    ask("plan and replay apart", one, step_id=1)
    ask("not from the start", one)
    return said


def from_spec() -> dict[str, Any]:
    """The layers that `--spec` makes."""
    models.join(2)
    args = Namespace(num_experts=models.NUM_EXPERTS, transformer_impl="local")
    settings = models.config(2)
    block = hooks.layer_spec(args, settings, None)
    named = Namespace(**vars(args), equilibra_spec="tests.megatron_core.slime_runs one_layer")
    other = hooks.layer_spec(named, settings, None)
    settings.moe_token_dispatcher_type = "allgather"
    try:
        hooks.layer_spec(args, settings, None)
        said = "nothing"
    except EquilibraError as refused:
        said = str(refused)
    return {
        "block": [models.class_of_spec(one.submodules.mlp).__name__ for one in block.layer_specs],
        "other": models.class_of_spec(other.submodules.mlp).__name__,
        "said": said,
    }


def one_layer(args: Namespace, _config: Any, _vp_stage: int | None) -> Any:
    """What a user's own `--spec` might name."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(num_experts=args.num_experts, moe_grouped_gemm=False)


def slowest_over_mean(rows_of_rank: list[list[int]]) -> float:
    rows = np.array(rows_of_rank)
    return float((rows.max(axis=0) / rows.mean(axis=0)).mean())
