"""`set_experts_implementation("equilibra")`: a model of transformers keeps its classes, its experts run under a plan.

    runtime = shard_experts(model, group, CopySetting(spare_slots=2))     # on all ranks; registers and sets it
    balancer = Balancer(runtime, BalancerSetting(tokens_per_rank=4096), optimizer=optimizer)

Every rank has loaded the whole model, and keeps the experts at home on it. transformers' router chooses and weighs;
under `with micro_batch:` its top-k answers with the recorded experts, so their weights are the live router's, which
learns (R3). Without a micro-batch tokens are routed live to the homes of their experts. Dense parts stay on every rank.

Symbols: E experts, D width, F inner width. Parameters at home are [2F, D], gate before up, and [D, F] in every family.
`build_model` of this package replaces whole blocks instead, and never holds all experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from equilibra.core.errors import InputError
from equilibra.core.placement import Placement, contiguous
from equilibra.execute.copies.copies import CopySetting
from equilibra.execute.experts.spec import MoESpec
from equilibra.execute.experts.weights import ExpertWeights
from equilibra.execute.group import ExpertGroup
from equilibra.execute.moe.functions import run_visit
from equilibra.execute.record import direction_now
from equilibra.execute.runtime import Runtime
from equilibra.integrations.hf.families import family_of
from equilibra.integrations.hf.replay import route_recorded

__all__ = ["NAME", "register_experts", "shard_experts"]

NAME = "equilibra"
PUBLISHED = {
    "gate_up": "gate_up_proj", "gate_up_bias": "gate_up_proj_bias", "down": "down_proj", "down_bias": "down_proj_bias",
}  # fmt: skip
"""our names of an expert's parts, and transformers'"""


def register_experts() -> None:
    """Make `model.set_experts_implementation("equilibra")` known to transformers; `shard_experts` does it too."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, _run_experts)


def shard_experts(
    model: Any, group: ExpertGroup, copies: CopySetting | None = None, *, placement: Placement | None = None  # noqa: ANN401
) -> Runtime:  # fmt: skip
    """Keep this rank's experts of a model that all ranks have loaded, and run them under plans from now on.

    Parameters of the experts are new ones: make the optimizer afterwards. placement: homes; None: contiguous.
    """
    family = family_of(model.config.model_type)
    blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    if not blocks or any(hasattr(block.experts, "equilibra_layer") for block in blocks):
        raise InputError("there is nothing to shard: the model has no MoE layers, or they are sharded already")
    spec = family.spec(model.config)
    if placement is None:
        placement = contiguous(group.cluster, num_layers=len(blocks), num_experts=spec.num_experts)
    runtime = Runtime(group, placement, copies)
    for block in blocks:
        _shard(block.experts, spec, runtime)
        router, layer = getattr(block, family.router), block.experts.equilibra_layer
        object.__setattr__(router, "forward", partial(_route, router.forward, layer))
    register_experts()
    model.set_experts_implementation(NAME)
    return runtime


@dataclass(frozen=True)
class _Layer:
    """A layer of a runtime."""

    runtime: Runtime
    number: int


@torch.no_grad()
def _shard(experts: Any, spec: MoESpec, runtime: Runtime) -> None:  # noqa: ANN401 - a class of each family
    """Replace the stacked parameters by those of the experts at home."""
    homes = runtime.placement.homes_on(len(runtime.weights), runtime.group.rank)
    kept = {name: getattr(experts, published) for name, published in PUBLISHED.items() if name in spec.part_shapes()}
    down = kept["down"]
    weights = ExpertWeights(spec, homes, device=down.device, dtype=down.dtype)
    chosen = torch.from_numpy(homes.astype("int64")).to(down.device)
    for name, value in kept.items():
        part, mine = weights.get_parameter(name), value[chosen]
        if spec.expert_bias:
            mine = _plain(name, mine)
        if mine.shape != part.shape:
            raise InputError(
                f"experts of shape {list(value.shape)} came as {PUBLISHED[name]}, for {list(part.shape)} at home: use "
                "build_model instead"
            )
        part.copy_(mine)
        part.requires_grad_(value.requires_grad)
    for name in kept:
        delattr(experts, PUBLISHED[name])
    experts.homes = weights
    experts.equilibra_layer = _Layer(runtime, runtime.register(weights))


def _plain(name: str, part: Tensor) -> Tensor:
    """A part of gpt-oss, whose matrices are transposed, with gate and up in turn: [E, D, 2F], [E, 2F], [E, F, D]."""
    if name.startswith("gate_up"):
        part = part.reshape(*part.shape[:-1], -1, 2).mT.flatten(-2)
    return part.mT if part.ndim == 3 else part


def _route(forward: Callable[..., Any], layer: _Layer, hidden: Tensor, *more: Any, **options: Any) -> Any:  # noqa: ANN401
    """The router of transformers; inside a micro-batch it chooses what was recorded."""
    micro_batch, spec = layer.runtime.current, layer.runtime.spec
    if micro_batch is None:
        return forward(hidden, *more, **options)
    recorded_TK = micro_batch.experts(layer.number, hidden.device)
    return route_recorded(
        lambda: forward(hidden, *more, **options), recorded_TK, rows=micro_batch.rows, num_experts=spec.num_experts,
        layer=layer.number,
    )  # fmt: skip


@torch.compiler.disable  # type: ignore[untyped-decorator]  # collectives are not for a compiler
def _run_experts(module: Any, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:  # noqa: ANN401
    """What transformers calls for every MoE layer: each token's experts, weighted, wherever they are."""
    layer: _Layer | None = getattr(module, "equilibra_layer", None)
    if layer is None:
        raise InputError(
            f"experts_implementation {NAME!r} needs sharded experts: call shard_experts(model, group) first; a model "
            "that is loaded with ep_size keeps another one: see plan_expert_parallel"
        )
    runtime, micro_batch, tokens_TD = layer.runtime, layer.runtime.current, hidden_TD
    runtime.enter_layer(runtime.key(layer.number), direction_now())
    if micro_batch is not None:
        tokens_TD, experts_TK, weights_TK = map(micro_batch.select, (hidden_TD, experts_TK, weights_TK))
    out_TD = run_visit(runtime, layer.number, tokens_TD, experts_TK, weights_TK)
    return out_TD if micro_batch is None else micro_batch.among_padding(out_TD, hidden_TD)
