"""One MoE layer of Megatron on several ranks: what it computes, as it is and balanced."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests.megatron_core import fused_kernels, models
from torch import Tensor
from torch.nn import functional

TOKENS = 20


def hidden_of(rank: int, number: int) -> Tensor:
    values = np.random.default_rng([7, rank, number]).normal(size=(TOKENS, 1, models.HIDDEN))
    return torch.from_numpy(values.astype(np.float32)).requires_grad_()


def loop_reference(layer: Any, hidden: Tensor, ids_TK: Tensor, weights: dict[int, list[Tensor]]) -> Tensor:
    """Every expert in one process, a token at a time."""
    flat = hidden.reshape(-1, models.HIDDEN)
    logits = flat @ layer.router.weight.t()
    scores = logits.gather(1, ids_TK).softmax(dim=1)
    rows = []
    for token, ids, of_token in zip(flat, ids_TK.tolist(), scores, strict=True):
        total = torch.zeros(models.HIDDEN)
        for expert, score in zip(ids, of_token, strict=True):
            first, second = weights[expert]
            gate, up = (first @ token).chunk(2)
            total = total + score * (second @ (functional.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows).view_as(hidden)


def all_weights(layer: Any) -> dict[int, list[Tensor]]:
    """Weights of all experts by number, from all ranks."""
    own = {
        models.expert_of_slot(layer, "experts", slot): [p.detach().clone() for p in expert.parameters()]
        for slot, expert in enumerate(layer.experts.local_experts)
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return {expert: parts for part in every for expert, parts in part.items()}


def plain_against_loop(world: int) -> float:
    """The largest difference between Megatron's layer and the loop."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    models.join(world)
    layer = models.moe_layer(models.config(1))
    rank = dist.get_rank()
    (ids,) = models.routing(3, rank, 1, 1, TOKENS)[0]
    RouterReplay.set_replay_data([ids])
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    hidden = hidden_of(rank, 0)
    out, _ = layer(hidden)
    wanted = loop_reference(layer, hidden, ids, all_weights(layer))
    return float((out - wanted).abs().max())


def _pass(layer: Any, ids: list[Tensor], number: int) -> Tensor:
    """Forward and backward of one micro-batch; returns output and gradient of its input."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    from equilibra.integrations.megatron import set_replay

    set_replay([layer.router.router_replay], ids)
    layer.router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    hidden = hidden_of(dist.get_rank(), number)
    out, _ = layer(hidden)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    assert hidden.grad is not None
    return torch.stack([out.detach(), hidden.grad])


def _gradients(layer: Any) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in layer.parameters()]


FLEX = {
    kind: {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": kind, "moe_router_dtype": "fp32"}
    for kind in ("deepep", "hybridep")
}


def balanced_against_plain(
    world: int, sabotage: str | None = None, tensor: int = 1, dispatcher: str = "alltoall", padding: int = 0,
    context: int = 1, expert_parallel: int = 0, *, compiled: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Differences between a plain layer and the same layer under plans, over two micro-batches.

    padding: rows whose recorded routing is zeros. compiled: parts of a flex dispatcher are compiled, as Megatron does;
    it takes seconds on every rank.
    """
    from equilibra.cost.rates import Rates
    from equilibra.integrations.megatron import MegatronSetting, balance

    models.join(expert_parallel or world, tensor=tensor, context=context)
    fused_kernels.install()
    if not compiled:
        torch.compiler.set_stance("force_eager")
    settings = models.config(1, **FLEX.get(dispatcher, {}))
    ids = models.routing(3, dist.get_rank(), 2, 1, TOKENS, skew=2.5)
    for layers in ids if padding else []:
        layers[0][-padding:] = 0
    plain = models.moe_layer(settings)
    wanted = [_pass(plain, ids[m], m) for m in range(2)]
    layer = models.moe_layer(settings)
    names = [name for name, _ in layer.named_parameters()]
    if sabotage == "choose any slot":
        break_something(sabotage)
    state = torch.get_rng_state()
    balancer = balance(layer, MegatronSetting(spare_slots=2, rates=Rates.free()))
    assert torch.equal(state, torch.get_rng_state()), "balancing draws random numbers"
    assert [name for name, _ in layer.named_parameters()] == names
    step = balancer.begin(ids)
    if sabotage != "choose any slot":
        break_something(sabotage)
    found = [_pass(layer, ids[m], m) for m in range(2)]
    outside = _live(balancer, layer, plain)
    pairs = zip(_gradients(plain), _gradients(layer), strict=True)
    rows = step.plan.rank_load(step.load)
    return {
        "out": max(float((a - b).abs().max()) for a, b in zip(wanted, found, strict=True)),
        "gradient": max(float((a - b).abs().max() / (a.abs().max() + 1e-3)) for a, b in pairs),
        "copies": step.plan.stages["update"].num_copies,
        "slowest over mean": float((rows.max(axis=2) / rows.mean(axis=2)).max()),
        "static": step.static_imbalance,
        "outside": outside,
    }


def across_nodes(per_node: int) -> dict[str, float]:
    """Differences between a plain layer and the same layer with standing copies, where nobody reduces gradients."""
    from equilibra.cost.rates import Rates
    from equilibra.integrations.megatron import MegatronSetting, balance

    models.join(4)
    settings = models.config(1)
    ids = models.routing(3, dist.get_rank(), 3, 1, TOKENS, skew=2.5)
    plain, layer = models.moe_layer(settings), models.moe_layer(settings)
    wanted = [_pass(plain, ids[m], m) for m in range(3)]
    step = balance(layer, MegatronSetting(ranks_per_node=per_node, standing_slots=2, rates=Rates.free())).begin(ids)
    found = [_pass(layer, ids[m], m) for m in range(3)]
    pairs = zip(_gradients(plain), _gradients(layer), strict=True)
    return {
        "out": max(float((a - b).abs().max()) for a, b in zip(wanted, found, strict=True)),
        "gradient": max(float((a - b).abs().max() / (a.abs().max() + 1e-3)) for a, b in pairs),
        "copies": step.plan.stages["update"].num_copies, "standing": step.plan.standing.num_copies,
        "planned": step.planned_imbalance, "static": step.static_imbalance,
    }  # fmt: skip


class Optimizer:
    """What Megatron's config reaches through `grad_scale_func` once training is set up: groups that nobody can copy."""

    def __init__(self) -> None:
        self.group = dist.group.WORLD

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss


def with_own_width(world: int) -> dict[str, float]:
    """Experts narrower than dense layers, as in real models, balanced after training was set up."""
    from equilibra.integrations.megatron import MegatronSetting, balance

    models.join(world)
    settings = models.config(1, ffn_hidden_size=3 * models.FFN)
    ids = models.routing(3, dist.get_rank(), 1, 1, TOKENS, skew=2.5)
    plain, layer = models.moe_layer(settings), models.moe_layer(settings)
    settings.grad_scale_func = Optimizer().scale_loss
    balancer = balance(layer, MegatronSetting(spare_slots=2))
    step = balancer.begin(ids)
    apart = (_pass(plain, ids[0], 0) - _pass(layer, ids[0], 0)).abs().max()
    return {"out": float(apart), "copies": step.plan.stages["update"].num_copies}


def _live(balancer: Any, layer: Any, plain: Any) -> float:
    """Without a step, and without replay, tokens go to homes."""
    balancer.end()
    for one in (layer, plain):
        one.router.router_replay.clear_router_replay_action()
    hidden = hidden_of(dist.get_rank(), 9)
    with torch.no_grad():
        return float((layer(hidden)[0] - plain(hidden)[0]).abs().max())


def break_something(how: str | None) -> None:
    """Negative controls: each breaks one thing that the comparison must notice."""
    from equilibra.execute.copies.copies import Copies
    from equilibra.execute.copies.standing import StandingStore
    from equilibra.integrations.megatron import copies, homes, layer

    if how == "drop gradients of copies":
        copies.MegatronExperts.add_gradient = lambda _self, _expert, *_rows: None
    elif how == "drop gradients of standing copies":
        StandingStore.give_back = lambda _self, _layers: None
    elif how == "leave main_grad alone":
        copies._gradient_of = _grad_of
    elif how == "leave optimizer state behind":
        homes._write = lambda parameter, whole, names, state: parameter.view(-1).copy_(
            whole.view(1 + len(names), -1)[0]
        )
    elif how == "fetch copies of another layer ahead":
        start = Copies.start

        def of_another(self: Any, key: Any) -> None:
            right = self.weights
            self.weights[:] = [*right[1:], right[0]] if not self.has(key) else right
            start(self, key)
            self.weights[:] = right

        Copies.start = of_another
    elif how == "do not wait for weights":
        copies.MegatronExperts.check_version = lambda _self, _layer: None
    elif how == "choose any slot":
        layer._choose_slots = _any_slot
    elif how not in {None, "keep old standing copies"}:
        raise AssertionError(how)


def _grad_of(parameter: Any) -> Tensor:
    """What fused kernels leave alone."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _any_slot(manager: Any, choose: Any, map_TP: Tensor, probs_TP: Tensor) -> None:
    """What topk may do with probabilities of zero: rows fall into the last slot."""
    choose(map_TP, probs_TP)
    chosen = map_TP.reshape(len(map_TP), -1).gather(1, manager.token_indices)
    manager.token_indices = manager.token_indices.masked_fill(~chosen, manager.num_experts - 1)


def built_from_spec(world: int) -> dict[str, Any]:
    """A layer from a balanced specification, with the arguments that Megatron's main branch gives."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    from equilibra.integrations.megatron import balance, balanced_layer_spec
    from equilibra.integrations.megatron.layer import balanced_class

    models.join(world)
    settings = models.config(1)
    spec = get_gpt_layer_local_spec(num_experts=models.NUM_EXPERTS, moe_grouped_gemm=False)
    mlp, options = balanced_layer_spec(spec).submodules.mlp, {"is_mtp_layer": False, "name": "decoder.layers.0.mlp"}
    built = isinstance(mlp, ModuleSpec)
    layer = build_module(mlp, config=settings, **options) if built else mlp(config=settings, **options)
    layer.set_layer_number(1)
    models.fill(layer, 1)
    plain = models.moe_layer(settings)
    (ids,) = models.routing(3, dist.get_rank(), 1, 1, TOKENS, skew=2.5)
    before = _pass(layer, ids, 0)
    balance(layer).begin([ids])
    return {
        "is balanced": isinstance(layer, balanced_class()),
        "spec changed": models.class_of_spec(spec.submodules.mlp) is not MoELayer,
        "out": float((_pass(layer, ids, 0) - before).abs().max() + (_pass(plain, ids, 0) - before).abs().max()),
    }


def disagreements(world: int) -> list[str]:
    """What ranks that do not fit together hear."""
    from equilibra.core.errors import EquilibraError
    from equilibra.cost.rates import Rates
    from equilibra.integrations.megatron import MegatronSetting, balance
    from equilibra.plan.step import Equilibra

    models.join(world)
    rank, said = dist.get_rank(), []
    layer = models.moe_layer(models.config(1))
    balancer = balance(layer, MegatronSetting(planner=Equilibra(flash=bool(rank)), rates=Rates.free()))
    ids = models.routing(3, rank, 2, 1, TOKENS, skew=2.5)
    wrong = [[one[0].clone()] for one in ids]
    wrong[0][0][0, 0] = models.NUM_EXPERTS
    for routing in (ids, ids[: rank + 1], wrong if rank else ids, []):
        try:
            balancer.begin(routing)
        except EquilibraError as error:
            said.append(f"{type(error).__name__}: {error}")
    for again in (layer, models.moe_layer(models.config(1))):
        try:
            balance(again, MegatronSetting(spare_slots=1 + rank))
        except EquilibraError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
