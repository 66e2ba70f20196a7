"""What the hooks rely on in verl: functions, their parameters, and the names they look up.

None of it is verl's public API, so it is checked when the hooks are installed. A release that renamed something is
refused before the run, with the name and the version, instead of training without a plan or failing midway.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from functools import reduce
from typing import Any

from equilibra.core.errors import InputError

__all__ = ["ENGINE", "NEEDED", "WRITTEN_FOR", "Needed", "check_contract", "differences"]

WRITTEN_FOR = ("0.9.0", "0.9.1")
ENGINE = "verl.workers.engine.megatron.transformer_impl"


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
    Needed("verl.utils.megatron_utils", "copy_megatron_model_to_cpu", ("models",)),
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
