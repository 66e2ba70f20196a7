"""Megatron's MoE layer under a plan: the router stays logical, the dispatcher sees slots, the experts are Megatron's.

`balanced_class()` is a subclass of the installed Megatron's `MoELayer`, made when it is asked for, so that this
package is imported without Megatron. A layer that exists becomes one in visits: its parameters, and so DDP's buckets,
the optimizer and checkpoints, stay as they are. What differs between versions of Megatron (constructors that take
`is_mtp_layer` and `name`) is passed on to those that know it.
"""

from __future__ import annotations

import copy
import inspect
from functools import cache, partial
from typing import Any

from torch import nn

from equilibra.core.errors import InputError
from equilibra.execute.group import ExpertGroup
from equilibra.integrations.megatron.visits import MegatronVisits

__all__ = ["balance_layer", "balanced_class", "balanced_layer_spec", "check_config", "check_wrapping"]

REFUSED: dict[str, tuple[Any, str]] = {
    "moe_expert_capacity_factor": (None, "tokens would be dropped by slots, not by experts"),
    "moe_pad_expert_input_to_capacity": (False, "rows would be padded by slots, not by experts"),
    "moe_router_padding_for_quantization": (False, "rows would be padded by slots, not by experts"),
    "fp8": (None, "copies of quantised weights are not made"),
    "fp4": (None, "copies of quantised weights are not made"),
    "delay_wgrad_compute": (False, "gradients of copies would go home before they are computed"),
    "overlap_moe_expert_parallel_comm": (False, "a layer's passes would be interleaved"),
    "cuda_graph_impl": ("none", "a plan changes shapes from one micro-batch to the next"),
}
"""options of Megatron that cannot be together with planned execution: the value that can, and why"""


@cache
def balanced_class() -> Any:  # noqa: ANN401 - a class of Megatron
    """The subclass of `MoELayer`; without visits it is a plain one."""
    from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: PLC0415

    from equilibra.integrations.megatron.checkpoint import logical  # noqa: PLC0415

    known = set(inspect.signature(MoELayer.__init__).parameters)

    class BalancedMoELayer(MoELayer):  # type: ignore[misc, no-any-unimported, unused-ignore]
        """An MoE layer of Megatron that executes plans."""

        visits: MegatronVisits | None = None

        def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
            super().__init__(*arguments, **{name: value for name, value in options.items() if name in known})

        def preprocess(self, hidden_states: Any, probs: Any, routing_map: Any) -> Any:  # noqa: ANN401
            """Scatter the router's columns to slots, then as Megatron does."""
            if self.visits is not None:
                probs, routing_map = self.visits.to_slots(probs, routing_map)
            return super().preprocess(hidden_states, probs, routing_map)

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
        ) -> Any:  # noqa: ANN401
            """With logical numbers, whatever the placement."""
            found = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            if self.visits is None:
                return found
            return logical(found, f"{prefix}experts.", len(sharded_offsets), self.visits, metadata or {})

    return BalancedMoELayer


def balanced_layer_spec(spec: Any) -> Any:  # noqa: ANN401 - a ModuleSpec, or the specs of a block
    """A layer's specification, or a block's, with balanced MoE layers. `balance` gives them their visits."""
    from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: PLC0415

    changed = copy.deepcopy(spec)
    for one in getattr(changed, "layer_specs", [changed]):
        if getattr(one.submodules.mlp, "module", None) is MoELayer:
            one.submodules.mlp.module = balanced_class()
    return changed


def check_config(config: Any) -> None:  # noqa: ANN401 - Megatron's TransformerConfig
    """An error for options that cannot be together with plans."""
    for name, (allowed, why) in REFUSED.items():
        value = getattr(config, name, allowed)
        if value not in (allowed, None, False):
            raise InputError(f"cannot balance a model with {name}={value!r}: {why}; set it to {allowed!r}")
    if config.moe_router_fusion and config.moe_enable_routing_replay:
        raise InputError(
            "cannot replay routing with moe_router_fusion=True: Megatron's fused router returns before it looks at the "
            "recorded experts, and would choose others without a word; set moe_router_fusion=False"
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
    """An error for ways of data parallelism under which weights are not there when copies are made of them."""
    for name in ("overlap_param_gather", "use_megatron_fsdp", "use_custom_fsdp"):
        if getattr(config, name, False):
            raise InputError(
                f"cannot balance a model with {name}=True: weights come when an expert runs, and copies of them are "
                "made before; set it to False"
            )


def balance_layer(layer: Any, number: int, group: ExpertGroup, spare_slots: int) -> MegatronVisits:  # noqa: ANN401
    """Make an existing `MoELayer` execute plans: its class, its dispatcher over slots, copies beside its experts."""
    groups = _groups_of(layer)
    template = _template(layer, spare_slots, groups) if spare_slots else None
    visits = MegatronVisits(
        number, group, layer.experts, template, fused=bool(layer.config.gradient_accumulation_fusion)
    )
    slots = visits.num_homes + spare_slots
    config = copy.copy(layer.config)
    config.num_moe_experts = slots * group.num_ranks
    local = [group.rank * slots + slot for slot in range(slots)]
    dispatcher = type(layer.token_dispatcher)(slots, local, config=config, pg_collection=groups)
    if layer.shared_experts is not None and layer.shared_expert_overlap:
        dispatcher.set_shared_experts(layer.shared_experts)
    layer.token_dispatcher = dispatcher
    object.__setattr__(layer.experts, "forward", partial(visits.run, layer.experts.forward))
    layer.__class__ = balanced_class()
    object.__setattr__(layer, "visits", visits)  # no submodule: the template is nobody's parameter
    return visits


def _groups_of(layer: Any) -> Any:  # noqa: ANN401
    """The process groups the layer was built with."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection  # noqa: PLC0415

    groups = get_default_pg_collection()
    for name, at in (("ep", "ep_group"), ("expt_tp", "tp_group"), ("tp_ep", "tp_ep_group")):
        found = getattr(layer.token_dispatcher, at, None)
        if found is not None:
            setattr(groups, name, found)
    return groups


def _template(layer: Any, spare_slots: int, groups: Any) -> nn.Module:  # noqa: ANN401
    """Experts for the copy slots, without weights and without drawing a random number."""
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module  # noqa: PLC0415

    config = copy.copy(layer.config)
    config.perform_initialization = False
    config.gradient_accumulation_fusion = False
    build = layer.submodules.experts
    if isinstance(build, (ModuleSpec, type)):
        template = build_module(build, spare_slots, config, pg_collection=groups)
    else:
        template = build(spare_slots, config, pg_collection=groups)
    for parameter in template.parameters():
        parameter.requires_grad_(requires_grad=False)
        parameter.data = parameter.new_empty(0)
    return template  # type: ignore[no-any-return]
