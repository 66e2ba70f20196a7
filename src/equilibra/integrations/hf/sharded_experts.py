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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from equilibra.core.errors import ExecuteError, InputError
from equilibra.core.placement import Placement, contiguous
from equilibra.execute.copies.copies import CopySetting
from equilibra.execute.group import ExpertGroup
from equilibra.execute.moe import functions
from equilibra.execute.moe.functions import Pass, direction_now
from equilibra.execute.moe.spec import MoESpec
from equilibra.execute.moe.weights import ExpertWeights
from equilibra.execute.runtime import Runtime, homes_of
from equilibra.integrations.hf.families import family_of

__all__ = ["NAME", "register_experts", "route_recorded", "shard_experts"]

# Replay through transformers' own routers: their top-k answers with the recorded experts.
#
# So the weights of the recorded experts are the live router's, which learns (R3), in every family alike.


def route_recorded(
    forward: Callable[[], Any], recorded_TK: Tensor, *, rows: Tensor | None, num_experts: int, layer: int
) -> Any:  # noqa: ANN401 - what the router returns
    """A router's forward that chooses what was recorded; experts below zero are routed live.

    rows: those of the router's that were recorded, None: all of them. layer: for messages.
    """
    with _Recorded(recorded_TK, rows, (num_experts, recorded_TK.shape[1])) as mode:
        said = forward()
    if mode.times != 1:
        raise ExecuteError(f"the router of MoE layer {layer} chose experts {mode.times} times, not once: no replay")
    return said


class _Recorded(TorchFunctionMode):
    """Answers the top-k over all experts with the recorded ones, and with the live ones where there are none."""

    def __init__(self, recorded_TK: Tensor, rows: Tensor | None, shape: tuple[int, int]) -> None:
        super().__init__()
        self.recorded_TK, self.rows, self.shape, self.times = recorded_TK, rows, shape, 0

    def __torch_function__(
        self, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None  # noqa: ANN401
    ) -> Any:  # noqa: ANN401  # fmt: skip
        """One call of torch."""
        kwargs = kwargs or {}
        said = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk):
            return said
        scores, wanted = args[0], args[1] if len(args) > 1 else kwargs["k"]
        if scores.ndim != 2 or (scores.shape[1], wanted) != self.shape:
            return said
        self.times += 1
        chosen = self._chosen(said.indices)
        return torch.return_types.topk((scores.gather(1, chosen), chosen))

    def _chosen(self, live_TK: Tensor) -> Tensor:
        rows = slice(None) if self.rows is None else self.rows
        chosen = live_TK.clone()
        chosen[rows] = torch.where(self.recorded_TK < 0, live_TK[rows], self.recorded_TK)
        return chosen


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
    if not blocks or any(hasattr(block.experts, "place") for block in blocks):
        raise InputError("there is nothing to shard: the model has no MoE layers, or they are sharded already")
    spec = family.spec(model.config)
    if placement is None:
        placement = contiguous(group.cluster, num_layers=len(blocks), num_experts=spec.num_experts)
    runtime = Runtime(group, placement, copies)
    for block in blocks:
        _shard(block.experts, spec, runtime)
        router, place = getattr(block, family.router), block.experts.place
        object.__setattr__(router, "forward", partial(_route, router.forward, place))
    register_experts()
    model.set_experts_implementation(NAME)
    return runtime


@dataclass(frozen=True)
class _Place:
    """A layer of a runtime."""

    runtime: Runtime
    layer: int

    @property
    def weights(self) -> ExpertWeights:
        return self.runtime.weights[self.layer]


@torch.no_grad()
def _shard(experts: Any, spec: MoESpec, runtime: Runtime) -> None:  # noqa: ANN401 - a class of each family
    """Replace the stacked parameters by those of the experts at home."""
    homes = homes_of(runtime.placement, len(runtime.weights), runtime.group.rank)
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
    experts.place = _Place(runtime, runtime.register(weights))


def _plain(name: str, part: Tensor) -> Tensor:
    """A part of gpt-oss, whose matrices are transposed, with gate and up in turn: [E, D, 2F], [E, 2F], [E, F, D]."""
    if name.startswith("gate_up"):
        part = part.reshape(*part.shape[:-1], -1, 2).mT.flatten(-2)
    return part.mT if part.ndim == 3 else part


def _route(forward: Callable[..., Any], place: _Place, hidden: Tensor, *more: Any, **options: Any) -> Any:  # noqa: ANN401
    """The router of transformers; inside a micro-batch it chooses what was recorded."""
    micro_batch, spec = place.runtime.current, place.runtime.spec
    if micro_batch is None:
        return forward(hidden, *more, **options)
    recorded_TK = micro_batch.experts(place.layer, hidden.device)
    return route_recorded(
        lambda: forward(hidden, *more, **options), recorded_TK, rows=micro_batch.rows, num_experts=spec.num_experts,
        layer=place.layer,
    )  # fmt: skip


@torch.compiler.disable  # type: ignore[untyped-decorator]  # collectives are not for a compiler
def _run_experts(module: Any, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:  # noqa: ANN401
    """What transformers calls for every MoE layer: each token's experts, weighted, wherever they are."""
    place: _Place | None = getattr(module, "place", None)
    if place is None:
        raise InputError(
            f"experts_implementation {NAME!r} needs sharded experts: call shard_experts(model, group) first; a model "
            "that is loaded with ep_size keeps another one: see plan_expert_parallel"
        )
    runtime, micro_batch, tokens_TD = place.runtime, place.runtime.current, hidden_TD
    where, rows = runtime.where(place.layer), None
    runtime.enter_layer(where, direction_now())
    if micro_batch is not None:
        tokens_TD, rows = micro_batch.select(hidden_TD), micro_batch.rows
        if rows is not None:
            experts_TK, weights_TK = experts_TK.index_select(0, rows), weights_TK.index_select(0, rows)
    visit = Pass(runtime, where, runtime.tables(place.layer, experts_TK), micro_batch)
    results_ND = functions.experts(functions.dispatch(tokens_TD, weights_TK, visit), visit, place.weights.parts())
    out_TD = functions.combine(results_ND, weights_TK, visit)
    if rows is None:
        return out_TD
    return torch.zeros_like(hidden_TD, dtype=out_TD.dtype).index_copy(0, rows, out_TD)
