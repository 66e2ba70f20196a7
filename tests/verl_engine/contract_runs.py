"""What one process finds out about the installed verl."""

from __future__ import annotations

import importlib
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.megatron_core import models
from tests.verl_engine import absent, engines

from equilibra.core.cluster import Cluster
from equilibra.core.errors import InputError

LENGTHS = (14, 3, 9, 14, 5, 9, 14, 3, 5, 14, 9, 3)
LIMIT = 28


def contract() -> dict[str, Any]:
    """Names and signatures; what is said when one is missing; when hooks go in."""
    found: dict[str, Any] = {}
    verl = absent.import_verl("equilibra.integrations.verl.plugin")
    hooks = importlib.import_module("equilibra.integrations.verl.hooks")
    check = importlib.import_module("equilibra.integrations.verl.contract")
    found["version"] = sys.modules["verl"].__version__
    found["hooked"] = getattr(verl, hooks.HOOKED, False)
    found["differences"] = check.differences()
    before = verl.MegatronEngine.initialize
    hooks.hook(verl)
    found["hooked once"] = verl.MegatronEngine.initialize is before
    found["broken"] = broken(verl, check)
    found["fields"] = unknown_key()
    found["micro-batches"] = micro_batches()
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


def broken(verl: Any, check: Any) -> list[str]:
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
            check.check_contract("0.10.0")
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


def micro_batches() -> dict[str, Any]:
    """verl's own rearrangement, and the one with sequences spread, of the same batch."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.utils.seqlen_balancing import rearrange_micro_batches, restore_dynamic_batch

    from equilibra.integrations.verl.hooks import spread

    parts = [torch.arange(length) + 100 * number for number, length in enumerate(LENGTHS)]
    routed = [engines.routing(number % 2, number, length, skew=4.0) for number, length in enumerate(LENGTHS)]
    batch = TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor(parts, layout=torch.jagged),
            "routed_experts": torch.nested.as_nested_tensor(routed, layout=torch.jagged),
        },
        batch_size=[len(LENGTHS)],
    )
    tu.assign_non_tensor(batch, temperature=1.0)
    balancer = SimpleNamespace(
        model=SimpleNamespace(num_experts=models.NUM_EXPERTS),
        group=SimpleNamespace(cluster=Cluster(num_nodes=1, ranks_per_node=4)),
    )
    balanced: Any = SimpleNamespace(balancer=balancer, verl=SimpleNamespace(tu=tu))
    made = rearrange_micro_batches(batch, LIMIT)
    found, partitions = spread(balanced, batch, LIMIT, made)
    values = torch.nested.as_nested_tensor(
        [one for part in found for one in part["input_ids"].unbind()], layout=torch.jagged
    )
    restored = restore_dynamic_batch(values, partitions)
    return {
        "verl": made[1],
        "spread": partitions,
        "tokens": [int(one["input_ids"].offsets()[-1]) for one in found],
        "restored": all(torch.equal(a, b) for a, b in zip(restored.unbind(), parts, strict=True)),
        "kept": [float(tu.get_non_tensor_data(one, "temperature", 0.0)) for one in found],
        "skew": [skew(routed, one) for one in (made[1], partitions)],
        "in groups": spread(balanced, batch, LIMIT, made, force_group_size=2)[1] is made[1],
    }


def skew(routed: list[torch.Tensor], partitions: list[list[int]]) -> float:
    """Squares of ranks' loads around their mean, over micro-batches and layers."""
    total = 0.0
    for members in partitions:
        ids = torch.cat([routed[s][:-1] for s in members]).long()
        for layer in range(ids.shape[1]):
            load = np.bincount(ids[:, layer].ravel().numpy(), minlength=models.NUM_EXPERTS).reshape(4, -1).sum(axis=1)
            total += float(((load - load.mean()) ** 2).sum())
    return total
