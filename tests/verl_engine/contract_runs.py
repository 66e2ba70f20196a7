"""What one process finds out about the installed verl."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

from tests.verl_engine import absent

from equilibra.core.errors import InputError


def contract() -> dict[str, Any]:
    """Names and signatures; what is said when one is missing; when hooks go in."""
    found: dict[str, Any] = {}
    verl = absent.import_verl("equilibra.integrations.verl.plugin")
    hooks = importlib.import_module("equilibra.integrations.verl.hooks")
    found["version"] = sys.modules["verl"].__version__
    found["hooked"] = getattr(verl, hooks.HOOKED, False)
    found["differences"] = hooks.differences()
    before = verl.MegatronEngine.initialize
    hooks.hook(verl)
    found["hooked once"] = verl.MegatronEngine.initialize is before
    found["broken"] = broken(verl, hooks)
    found["fields"] = unknown_key()
    return found


def early() -> dict[str, Any]:
    """Importing verl with the plugin loads neither Megatron nor hooks; importing its engine does."""
    absent.install()
    import os

    os.environ["VERL_USE_EXTERNAL_MODULES"] = "equilibra.integrations.verl.plugin"
    import verl  # noqa: F401

    return {
        "plugin": "equilibra.integrations.verl.plugin" in sys.modules,
        "megatron": "verl.workers.engine.megatron.transformer_impl" in sys.modules,
        "hooks": "equilibra.integrations.verl.hooks" in sys.modules,
    }


def broken(verl: Any, hooks: Any) -> list[str]:
    """Four releases that never were: a name gone, a parameter renamed, a call moved elsewhere, a field gone."""
    from verl.workers.config import McoreEngineConfig

    def moved(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> None: ...

    fields = McoreEngineConfig.__dataclass_fields__
    changes = [
        (verl, "build_r3_replay_mask", None),
        (verl, "set_router_replay_data", lambda layers_topk_idx, attention_mask, model: None),
        (verl.MegatronEngine, "forward_backward_batch", moved),
        (McoreEngineConfig, "__dataclass_fields__", {name: fields[name] for name in fields if name != "router_replay"}),
    ]
    said = []
    for owner, name, other in changes:
        original = getattr(owner, name)
        if other is None:
            delattr(owner, name)
        else:
            setattr(owner, name, other)
        try:
            hooks.check_contract("0.10.0")
        except InputError as error:
            said.append(str(error))
        finally:
            setattr(owner, name, original)
    return said


def unknown_key() -> dict[str, Any]:
    """Where verl's configuration takes options that it does not know: made as hydra makes it, from keywords."""
    from omegaconf import OmegaConf
    from verl.workers.config import McoreEngineConfig

    setting_of = importlib.import_module("equilibra.integrations.verl.engine").setting_of
    block = {"equilibra": {"spare_slots": 1, "ranks_per_node": None}}
    found = {}
    for name, keywords in {
        "megatron": block,
        "override_mcore_model_config": {"override_mcore_model_config": block},
        "as a DictConfig": {"override_mcore_model_config": OmegaConf.create(block)},
    }.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found[name] = setting_of(McoreEngineConfig(**keywords)).spare_slots
            except TypeError as error:
                found[name] = str(error).rpartition(".")[2]
    return found
