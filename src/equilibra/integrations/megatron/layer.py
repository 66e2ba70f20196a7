"""Megatron's MoE layer under a plan: the router sees logical experts, the dispatcher slots; the experts are Megatron's.

Symbols: M micro-batches, L MoE layers of this pipeline stage, T tokens of this rank, K experts per token.

`balanced_class()` subclasses the installed Megatron's `MoELayer` on first use, so importing this needs no Megatron. An
existing layer changes its class in place: parameters, DDP's buckets, the optimizer and checkpoints stay as they are.

A step's routing is `[M][L]` ids [T, K], as `RouterReplay.set_replay_data` takes them for each micro-batch. Rows with a
negative id or a repeated expert are routed live and not counted.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from equilibra.core.errors import InputError
from equilibra.execute.group import ExpertGroup
from equilibra.integrations.megatron.homes import logical
from equilibra.integrations.megatron.visits import MegatronVisits
from equilibra.integrations.planned import SlotCounts


def masked(ids_TK: Tensor, replayed_T: Tensor | None) -> Tensor:
    """Ids with -1 in rows routed live, where verl's `target_replay_mask` is False."""
    if replayed_T is None:
        return ids_TK
    if ids_TK.ndim != 2 or replayed_T.numel() != len(ids_TK):
        raise InputError(
            f"ids must be [tokens, k] with a mask of as many tokens, not {tuple(ids_TK.shape)} and "
            f"{tuple(replayed_T.shape)}: pass both of the same layer and micro-batch"
        )
    return ids_TK.masked_fill(~replayed_T.bool().view(-1, 1), -1)


def by_micro_batch(lists: Iterable[Sequence[Tensor]]) -> list[list[Tensor]]:
    """`[M][L]` from `[L][M]`, such as slime's `top_indices_list` or Megatron's `replay_backward_list` of each layer."""
    of_layers = [list(of_layer) for of_layer in lists]
    counts = {len(of_layer) for of_layer in of_layers}
    if len(counts) > 1:
        raise InputError(
            f"layers have {min(counts)} to {max(counts)} micro-batches, but all need the same number: pass the lists "
            "before the first pass consumes them"
        )
    return [list(layers) for layers in zip(*of_layers, strict=True)]


def set_replay(replays: Sequence[Any], layers: Sequence[Tensor]) -> None:
    """Set the micro-batch that the routers of a stage replay. replays: their `router_replay`, Megatron's or verl's.

    verl's routes rows with negative ids live; Megatron's replays every row, so a negative id is an error there.
    """
    for replay, ids in zip(replays, layers, strict=True):
        live = (ids < 0).any(dim=1)
        if not bool(live.any()):
            replay.set_target_indices(ids.to(torch.int64))
        elif "replay_mask" in inspect.signature(replay.set_target_indices).parameters:
            replay.set_target_indices(ids.clamp(min=0).to(torch.int64), replay_mask=~live)
        else:
            raise InputError(
                f"{int(live.sum())} tokens have no recorded routing, and {type(replay).__name__} of Megatron-Core "
                "cannot route single rows live: fill them in, or use verl's RouterReplay"
            )


DROPPED = "tokens would be dropped by slots, not by experts"
PADDED = "rows would be padded by slots, not by experts"
QUANTISED = "copies of quantised weights are not made"
TOO_EARLY = "gradients of copies would go home before they are computed"
TOGETHER = "experts must have separate parameters"
REFUSED: dict[str, tuple[Any, str]] = {
    "moe_expert_capacity_factor": (None, DROPPED),
    "moe_expert_rank_capacity_factor": (None, DROPPED),
    "moe_pad_expert_input_to_capacity": (False, PADDED),
    "moe_router_padding_for_quantization": (False, PADDED),
    "fp8": (None, QUANTISED),
    "fp4": (None, QUANTISED),
    "delay_wgrad_compute": (False, TOO_EARLY),
    "overlap_dispatch_backward_with_experts_wgrad": (False, TOO_EARLY),
    "use_transformer_engine_op_fuser": (False, "fused operations keep the experts' weights, but not those of copies"),
    "moe_single_grouped_weight": (False, TOGETHER),
    "moe_single_grouped_bias": (False, TOGETHER),
    "moe_ncclep_zero_copy": (False, "experts would write into buffers that are made for homes alone"),
    "moe_ncclep_static_shape": (False, "rows beyond those that were dispatched would reach the copies"),
    "overlap_moe_expert_parallel_comm": (False, "a layer's passes would be interleaved"),
    "cuda_graph_impl": ("none", "a plan changes shapes from one micro-batch to the next"),
}
"""options of Megatron that exclude planned execution: the value they must have, and why"""
OF_TRAINING = (
    "finalize_model_grads_func", "grad_scale_func", "grad_sync_func", "no_sync_func", "param_sync_func", "timers",
)  # fmt: skip
"""fields of Megatron's config through which the optimizer and the wrapped model are reached"""


@cache
def balanced_class() -> Any:  # noqa: ANN401 - a class of Megatron
    """A subclass of Megatron's `MoELayer` that executes plans; without visits it behaves like its base."""
    from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: PLC0415

    known = set(inspect.signature(MoELayer.__init__).parameters)

    class BalancedMoELayer(MoELayer):  # type: ignore[misc, no-any-unimported, unused-ignore]
        visits: MegatronVisits | None = None

        def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
            super().__init__(*arguments, **{name: value for name, value in options.items() if name in known})

        def preprocess(self, hidden_states: Any, probs: Any, routing_map: Any) -> Any:  # noqa: ANN401
            if self.visits is not None:
                probs, routing_map = self.visits.to_slots(probs, routing_map)
            return super().preprocess(hidden_states, probs, routing_map)

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
        ) -> Any:  # noqa: ANN401
            found = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            if self.visits is None:
                return found
            return logical(found, f"{prefix}experts.", len(sharded_offsets), self.visits, metadata or {})

    return BalancedMoELayer


def balanced_layer_spec(spec: Any) -> Any:  # noqa: ANN401 - a ModuleSpec, or the specs of a block
    """The spec of a layer or block with balanced MoE layers; `balance` must still be called on the built model."""
    from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: PLC0415

    changed = copy.deepcopy(spec)
    for one in getattr(changed, "layer_specs", [changed]):
        mlp = one.submodules.mlp
        if getattr(mlp, "module", None) is MoELayer:
            mlp.module = balanced_class()
        elif getattr(mlp, "func", None) is MoELayer:  # since 0.18 a partial
            one.submodules.mlp = partial(balanced_class(), *mlp.args, **mlp.keywords)
    return changed


def check_config(config: Any) -> None:  # noqa: ANN401 - Megatron's TransformerConfig
    """Refuse options that exclude planned execution."""
    for name, (allowed, why) in REFUSED.items():
        value = getattr(config, name, allowed)
        if value not in (allowed, None, False):
            raise InputError(f"cannot balance a model with {name}={value!r}: {why}; set it to {allowed!r}")
    if config.moe_router_fusion and config.moe_enable_routing_replay:
        raise InputError(
            "cannot replay routing with moe_router_fusion=True: Megatron's fused router returns before it looks at the "
            "recorded experts, and would silently choose others; set moe_router_fusion=False"
        )
    if config.moe_token_dispatcher_type not in {"alltoall", "flex"}:
        raise InputError(
            f"cannot balance with moe_token_dispatcher_type={config.moe_token_dispatcher_type!r}: every rank would get "
            "every token; use 'alltoall' or 'flex'"
        )
    if (getattr(config, "expert_tensor_parallel_size", None) or 1) > 1:
        raise InputError(
            f"cannot balance with expert_tensor_parallel_size={config.expert_tensor_parallel_size}: experts must be "
            "whole on their ranks; use 1"
        )


def check_wrapping(config: Any) -> None:  # noqa: ANN401 - Megatron's DistributedDataParallelConfig, if there is one
    """Refuse kinds of data parallelism that keep no whole weights to make copies of."""
    for name in ("use_megatron_fsdp", "use_custom_fsdp"):
        if getattr(config, name, False):
            raise InputError(
                f"cannot balance a model with {name}=True: weights are gathered when an expert runs, but copies are "
                "made earlier; set it to False"
            )


def wait_for_gathers(chunks: Sequence[nn.Module], layers: Sequence[MegatronVisits], optimizer: Any) -> None:  # noqa: ANN401
    """With `overlap_param_gather`, have layers wait for their experts' buckets before they read weights.

    Megatron's DDP gathers the optimizer's shards during the next forward, and waits in a hook of each module. Copies
    are made before the experts' hooks run.
    """
    wrapped = [chunk for chunk in chunks if getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False)]
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    if not wrapped and any(getattr(getattr(one, "ddp_config", None), "overlap_param_gather", False) for one in parts):
        raise InputError(
            "cannot balance a bare model whose optimizer has overlap_param_gather=True: pass balance() the model "
            "wrapped in DistributedDataParallel, so that copies wait for its gathers"
        )
    for visits in layers:
        buckets = {}
        for chunk in wrapped:
            skip = chunk.ddp_config.align_param_gather or chunk.overlap_param_gather_with_optimizer_step  # type: ignore[union-attr]
            for parameter in visits.homes.parameters():
                if (bucket := chunk.param_to_bucket_group.get(parameter)) is not None:  # type: ignore[operator, union-attr]
                    buckets[bucket] = skip
        visits.homes.gathers = [partial(bucket.finish_param_sync, skip) for bucket, skip in buckets.items()]


def hold_buckets(
    chunks: Sequence[nn.Module], layers: Sequence[MegatronVisits], bring_home: Callable[[Iterable[int]], None]
) -> None:  # fmt: skip
    """Have DDP's buckets wait for gradients of copies before they are reduced, so that layers need not.

    Whether buckets are reduced during the last backward or after it, all go through `start_grad_sync`.
    """
    layers_of_bucket: dict[Any, set[int]] = {}
    for visits in layers:
        trained = [parameter for parameter in visits.homes.parameters() if parameter.requires_grad]
        found = [
            bucket for parameter in trained for chunk in chunks
            if (bucket := (getattr(chunk, "param_to_bucket_group", None) or {}).get(parameter)) is not None
        ]  # fmt: skip
        visits.deferred = len(found) == len(trained)
        for bucket in found if visits.deferred else ():
            layers_of_bucket.setdefault(bucket, set()).add(visits.layer)
    for bucket, numbers in layers_of_bucket.items():
        bucket.start_grad_sync = preceded_by(partial(bring_home, numbers), bucket.start_grad_sync)


def preceded_by(first: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs `first` before `call`."""

    @wraps(call)
    def both(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        first()
        return call(*arguments, **options)

    return both


def balance_layer(layer: Any, number: int, group: ExpertGroup, counts: SlotCounts) -> MegatronVisits:  # noqa: ANN401
    """Make an existing `MoELayer` execute plans: change its class, dispatch over slots, run copies beside experts."""
    groups = _groups_of(layer)
    template = _template(layer, counts.num, groups) if counts.num else None
    visits = MegatronVisits(number, group, layer.experts, template, counts)
    slots = visits.num_homes + counts.num
    config = copy.copy(layer.config)
    config.num_moe_experts = slots * group.num_ranks
    local = [group.rank * slots + slot for slot in range(slots)]
    dispatcher = type(layer.token_dispatcher)(slots, local, config=config, pg_collection=groups)
    if layer.shared_experts is not None and layer.shared_expert_overlap:
        dispatcher.set_shared_experts(layer.shared_experts)
    if (manager := getattr(dispatcher, "_comm_manager", None)) is not None and hasattr(manager, "token_indices"):
        manager.setup_metadata = partial(_choose_slots, manager, manager.setup_metadata)
    layer.token_dispatcher = dispatcher
    object.__setattr__(layer.experts, "forward", partial(visits.run, layer.experts.forward))
    layer.__class__ = balanced_class()
    object.__setattr__(layer, "visits", visits)  # not a submodule: the template has no parameters to train
    return visits


def _choose_slots(manager: Any, choose: Any, map_TP: Tensor, probs_TP: Tensor) -> None:  # noqa: ANN401
    """Flex dispatchers take the k most probable slots of a token. Drop those that are not in its map.

    A token has fewer than k experts where its recorded routing is padding, such as rows of zeros. Megatron then sends
    it to arbitrary experts with probability 0; arbitrary slots may be copy slots without a copy.
    """
    choose(map_TP, probs_TP)
    chosen = map_TP.reshape(len(map_TP), -1).gather(1, manager.token_indices)
    manager.token_indices = manager.token_indices.masked_fill(~chosen, -1)


def _groups_of(layer: Any) -> Any:  # noqa: ANN401
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection  # noqa: PLC0415

    groups = get_default_pg_collection()
    for name, at in (("ep", "ep_group"), ("expt_tp", "tp_group"), ("tp_ep", "tp_ep_group")):
        found = getattr(layer.token_dispatcher, at, None)
        if found is not None:
            setattr(groups, name, found)
    return groups


def _template(layer: Any, num_slots: int, groups: Any) -> nn.Module:  # noqa: ANN401
    """Experts for the copy slots, without weights; building them draws no random numbers."""
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module  # noqa: PLC0415

    config = copy.copy(layer.config)
    config.perform_initialization = False
    config.gradient_accumulation_fusion = False
    for name in OF_TRAINING:  # SequentialMLP copies its config deeply where experts have a width of their own
        if hasattr(config, name):
            setattr(config, name, None)
    build = layer.submodules.experts
    if isinstance(build, (ModuleSpec, type)):
        template = build_module(build, num_slots, config, pg_collection=groups)
    else:
        template = build(num_slots, config, pg_collection=groups)
    for parameter in template.parameters():
        parameter.requires_grad_(requires_grad=False)
        parameter.data = parameter.new_empty(0)
    return template  # type: ignore[no-any-return]
