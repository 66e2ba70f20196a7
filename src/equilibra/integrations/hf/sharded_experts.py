"""`set_experts_implementation("equilibra")`: a transformers model keeps its classes, and its experts run under a plan.

    runtime = shard_experts(model, group, CopySetting(spare_slots=2))     # on all ranks; registers and sets it
    balancer = Balancer(runtime, BalancerSetting(tokens_per_rank=4096), optimizer=optimizer)

Every rank loads the whole model and keeps only the experts whose home it is. transformers' router runs as before, but
under `with micro_batch:` its top-k returns the recorded experts, so their gate weights come from the live router, which
keeps learning (R3). Outside a micro-batch, tokens are routed live to homes. Dense parts stay on every rank.

Symbols: E experts, D width, F inner width. Home parameters are [2F, D], gate before up, and [D, F] in every family.
`build_model` replaces whole blocks instead, and never holds all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from equilibra.core.errors import ExecuteError, InputError
from equilibra.core.placement import contiguous
from equilibra.execute.copies.copies import CopySetting
from equilibra.execute.experts import MoESpec
from equilibra.execute.experts.weights import ExpertWeights
from equilibra.execute.group import ExpertGroup
from equilibra.execute.moe import run_visit
from equilibra.execute.record import direction_now
from equilibra.execute.runtime import Runtime
from equilibra.integrations.hf.families import family_of, moe_layers

NAME = "equilibra"
PUBLISHED = {
    "gate_up": "gate_up_proj", "gate_up_bias": "gate_up_proj_bias", "down": "down_proj", "down_bias": "down_proj_bias",
}  # fmt: skip
"""transformers' name of each part of an expert"""


def register_experts() -> None:
    """Register the implementation "equilibra" with transformers; `shard_experts` does it too."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, _run_experts)


def shard_experts(model: Any, group: ExpertGroup, copies: CopySetting | None = None) -> Runtime:  # noqa: ANN401
    """Keep only this rank's experts of a model that all ranks have loaded, and run them under plans.

    Homes are contiguous at first. Replaces the experts' parameters: create the optimizer afterwards.
    """
    family = family_of(model.config.model_type)
    blocks = [layer.mlp for layer in moe_layers(model).values()]
    if not blocks or any(hasattr(block.experts, "equilibra_layer") for block in blocks):
        raise InputError("cannot shard the model: it has no MoE layers, or they are sharded already")
    spec = family.spec(model.config)
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
                f"{PUBLISHED[name]} of shape {list(value.shape)} does not fit home experts of {list(part.shape)}: use "
                "build_model instead"
            )
        part.copy_(mine)
        part.requires_grad_(value.requires_grad)
    for name in kept:
        delattr(experts, PUBLISHED[name])
    experts.homes = weights
    experts.equilibra_layer = _Layer(runtime, runtime.register(weights))


def _plain(name: str, part: Tensor) -> Tensor:
    """Our layout of a gpt-oss part: theirs is transposed, gate and up interleaved ([E, D, 2F], [E, 2F], [E, F, D])."""
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


@torch.compiler.disable  # type: ignore[untyped-decorator]  # collectives cannot be compiled
def _run_experts(module: Any, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:  # noqa: ANN401
    """Run each token's experts, weighted, on the ranks that have them; transformers calls it for every MoE layer."""
    layer: _Layer | None = getattr(module, "equilibra_layer", None)
    if layer is None:
        raise InputError(
            f"experts_implementation {NAME!r} needs sharded experts: call shard_experts(model, group) first; for a "
            "model loaded with ep_size, call plan_expert_parallel instead"
        )
    runtime, micro_batch, tokens_TD = layer.runtime, layer.runtime.current, hidden_TD
    runtime.enter_layer(runtime.key(layer.number), direction_now())
    if micro_batch is not None:
        tokens_TD, experts_TK, weights_TK = map(micro_batch.select, (hidden_TD, experts_TK, weights_TK))
    out_TD = run_visit(runtime, layer.number, tokens_TD, experts_TK, weights_TK)
    return out_TD if micro_batch is None else micro_batch.among_padding(out_TD, hidden_TD)


def route_recorded(
    forward: Callable[[], Any], recorded_TK: Tensor, *, rows: Tensor | None, num_experts: int, layer: int
) -> Any:  # noqa: ANN401 - what the router returns
    """Run a transformers router so that its top-k returns the recorded experts; ids below zero are routed live.

    The gate weights come from the live router. rows: the recorded rows of its input; None: all. layer: for messages.
    """
    with _Recorded(recorded_TK, rows, (num_experts, recorded_TK.shape[1])) as mode:
        result = forward()
    if mode.times != 1:
        raise ExecuteError(f"cannot replay MoE layer {layer}: its router calls top-k {mode.times} times, not once")
    return result


class _Recorded(TorchFunctionMode):
    """Replaces the result of a top-k over all experts by the recorded experts, or the live ones where none are."""

    def __init__(self, recorded_TK: Tensor, rows: Tensor | None, shape: tuple[int, int]) -> None:
        super().__init__()
        self.recorded_TK, self.rows, self.shape, self.times = recorded_TK, rows, shape, 0

    def __torch_function__(
        self, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None  # noqa: ANN401
    ) -> Any:  # noqa: ANN401  # fmt: skip
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk):
            return result
        scores, wanted = args[0], args[1] if len(args) > 1 else kwargs["k"]
        if scores.ndim != 2 or (scores.shape[1], wanted) != self.shape:
            return result
        self.times += 1
        rows, chosen = slice(None) if self.rows is None else self.rows, result.indices.clone()
        chosen[rows] = torch.where(self.recorded_TK < 0, chosen[rows], self.recorded_TK)
        return torch.return_types.topk((scores.gather(1, chosen), chosen))
