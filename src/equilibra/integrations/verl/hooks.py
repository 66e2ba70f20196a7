"""Hooks in verl's Megatron engine: what they wrap, and what they rely on.

    MegatronEngine.initialize               meanwhile, the planner is compiled; afterwards, MoE layers are balanced
    MegatronEngine.forward_backward_batch   begins and ends a pass, reports what its plan gains, and may verify it
    prepare_micro_batches                   afterwards, the pass is planned: all its routing is known

The last does not know its engine, so a context variable (`RUNNING`) holds the one whose pass is running.

verl exports, saves and loads experts by rank. Where homes move, these functions of an engine are wrapped too:

    get_per_tensor_param, ..._shard         weights for rollouts: while they are read, ranks lend each other experts
    checkpoint_mananager.save_checkpoint    homes go back until all is written, optimizer state included
    checkpoint_mananager.load_checkpoint    homes go back before, and stay until a step moves them
    copy_megatron_model_to_cpu              refused: verl puts such copies back by rank, when homes may be others

Homes move only in passes, and passes and these calls do not overlap. All ranks make all of them.

None of it is verl's public API, so it is checked when the hooks are installed. A release that renamed something is
refused before the run, with the name and the version, instead of training without a plan or failing midway.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial, reduce, wraps
from types import ModuleType
from typing import Any

from equilibra.core.errors import InputError
from equilibra.integrations.megatron import Balancer
from equilibra.integrations.megatron.layer import preceded_by
from equilibra.integrations.verl import ENGINE
from equilibra.integrations.verl.engine import BLOCK, RUNNING, BalancedEngine, balance_engine, warm_engine

HOOKED = "equilibra_hooked"
WRITTEN_FOR = ("0.9.0", "0.9.1")
COPIES = "verl.utils.megatron_utils"
"""the module with verl's copies of models in host memory"""


@dataclass(frozen=True)
class Needed:
    """A function of verl that the hooks call or wrap."""

    module: str
    name: str
    """within the module; dots lead into classes"""
    parameters: tuple[str, ...]
    """parameters that it must have"""
    looks_up: tuple[str, ...] = ()
    """names that it must look up in its module at run time, since the hooks replace them"""


NEEDED = (
    Needed(ENGINE, "MegatronEngine.initialize", ("self",)),
    Needed(
        ENGINE, "MegatronEngine.forward_backward_batch", ("self", "data", "loss_function", "forward_only"),
        looks_up=("prepare_micro_batches",),
    ),
    Needed(ENGINE, "prepare_micro_batches", ("data",)),
    Needed(
        ENGINE, "MegatronEngineWithLMHead.forward_step", ("self", "batch_iter", "model"),
        looks_up=("align_r3_router_replay_data", "build_r3_replay_mask", "set_router_replay_data"),
    ),
    Needed(ENGINE, "align_r3_router_replay_data", ("layers_topk_idx", "input_ids")),
    Needed(ENGINE, "build_r3_replay_mask", ("input_ids", "response_mask")),
    Needed(
        ENGINE, "set_router_replay_data",
        ("layers_topk_idx", "attention_mask", "tf_config", "vp_rank", "replay_mask", "local_cp_size", "model"),
    ),
    Needed(ENGINE, "RouterReplay.set_target_indices", ("self", "topk_indices", "replay_mask")),
    Needed(ENGINE, "RouterReplay.clear_indices", ("self",)),
    Needed(ENGINE, "MegatronEngine.get_per_tensor_param", ("self",)),
    Needed(ENGINE, "MegatronEngine.get_per_tensor_param_shard", ("self",)),
    Needed(ENGINE, "MegatronEngine.save_checkpoint", ("self",), looks_up=("checkpoint_mananager", "save_checkpoint")),
    Needed(ENGINE, "MegatronEngine.load_checkpoint", ("self",), looks_up=("checkpoint_mananager", "load_checkpoint")),
    Needed(COPIES, "copy_megatron_model_to_cpu", ("models",)),
    Needed(ENGINE, "unwrap_model", ("model",)),
    Needed(ENGINE, "tu.get_non_tensor_data", ("data", "key", "default")),
)  # fmt: skip
FIELDS = ("dynamic_context_parallel", "forward_only", "override_mcore_model_config", "router_replay")
"""fields that McoreEngineConfig must have"""


def differences() -> list[str]:
    """What the installed verl lacks, one message each."""
    found = [said for one in NEEDED if (said := _difference(one))]
    config = importlib.import_module("verl.workers.config").McoreEngineConfig
    missing = [name for name in FIELDS if name not in config.__dataclass_fields__]
    return [*found, *(f"McoreEngineConfig has no field {name}" for name in missing)]


def _difference(needed: Needed) -> str | None:
    where = f"{needed.module}.{needed.name}"
    try:
        found: Any = reduce(getattr, needed.name.split("."), importlib.import_module(needed.module))
    except (ImportError, AttributeError) as error:
        return f"{where} is missing ({error})"
    found = inspect.unwrap(found)
    parameters = list(inspect.signature(found).parameters)
    missing = [name for name in needed.parameters if name not in parameters]
    if missing:
        return f"{where} has no parameter {', '.join(missing)}: it has {', '.join(parameters)}"
    unused = [name for name in needed.looks_up if name not in found.__code__.co_names]
    return f"{where} does not call {', '.join(unused)}" if unused else None


def check_contract(version: str) -> None:
    """Raise an error that lists what this verl lacks."""
    if found := differences():
        raise InputError(
            f"Equilibra cannot hook into verl {version}: {'; '.join(found)}. Use verl {' or '.join(WRITTEN_FOR)}, or "
            "remove equilibra.integrations.verl.plugin from VERL_USE_EXTERNAL_MODULES"
        )


def hook(verl: ModuleType) -> None:
    """Install the hooks in the Megatron engine's module, once."""
    if getattr(verl, HOOKED, False):
        return
    check_contract(importlib.import_module("verl").__version__)
    engine: Any = verl.MegatronEngine
    engine.initialize = _initialize(engine.initialize, verl)
    engine.forward_backward_batch = _pass(engine.forward_backward_batch)
    setattr(verl, "prepare_micro_batches", _planned(verl.prepare_micro_batches))  # noqa: B010 - mypy knows no such name
    setattr(verl, HOOKED, True)


def _initialize(initialize: Any, verl: ModuleType) -> Any:  # noqa: ANN401
    @wraps(initialize)
    def then_balance(self: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        warm_engine(self)
        result = initialize(self, *arguments, **options)
        balanced = self.equilibra = balance_engine(self, verl)
        if balanced is not None and balanced.balancer.state is not None:
            _number_logically(self, balanced.balancer)
        return result

    return then_balance


def _pass(forward_backward_batch: Any) -> Any:  # noqa: ANN401
    @wraps(forward_backward_batch)
    def planned(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:  # noqa: ANN401, FBT001, FBT002 - verl's signature
        balanced: BalancedEngine | None = getattr(self, "equilibra", None)
        run = partial(forward_backward_batch, self, data, loss_function, forward_only)
        if balanced is None:
            return run()
        under_plan = partial(balanced.under_plan, run, data, forward_only=forward_only)
        verifies = balanced.to_verify and not forward_only
        return balanced.report(balanced.verified(run, under_plan) if verifies else under_plan())

    return planned


def _planned(prepare_micro_batches: Any) -> Any:  # noqa: ANN401
    @wraps(prepare_micro_batches)
    def then_plan(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        micro_batches, indices = prepare_micro_batches(*arguments, **options)
        if (balanced := RUNNING.get()) is not None:
            balanced.plan(micro_batches)
        return micro_batches, indices

    return then_plan


def _number_logically(engine: Any, balancer: Balancer) -> None:  # noqa: ANN401 - verl's MegatronEngine
    """Have an engine export, save and load experts by their numbers."""

    def lent(tensors: Iterator[Any]) -> Iterator[Any]:
        with balancer.logical_weights():  # until the last weight is read: each is gathered when it is asked for
            yield from tensors

    def then_lend(export: Any) -> Any:  # noqa: ANN401
        @wraps(export)
        def lending(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            tensors, others = export(*arguments, **options)
            return lent(tensors), others

        return lending

    for name in ("get_per_tensor_param", "get_per_tensor_param_shard"):
        setattr(engine, name, then_lend(getattr(engine, name)))
    manager = engine.checkpoint_mananager
    manager.save_checkpoint = balancer.homes_restored()(manager.save_checkpoint)
    manager.load_checkpoint = preceded_by(balancer.restore_homes, manager.load_checkpoint)
    copies: Any = importlib.import_module(COPIES)
    copies.copy_megatron_model_to_cpu = _refused(copies.copy_megatron_model_to_cpu, engine)


def _refused(copy: Any, engine: Any) -> Any:  # noqa: ANN401
    @wraps(copy)
    def unless_balanced(models: Any) -> Any:  # noqa: ANN401
        if models is engine.module:
            raise InputError(
                "cannot keep copies of the actor's weights (save_model_to_cpu, of verl's asynchronous trainers) while "
                f"homes move: they would return to other experts; set {BLOCK}.max_moves_per_layer=0"
            )
        return copy(models)

    return unless_balanced
