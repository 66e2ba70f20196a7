"""BalancedMoE: an MoE layer whose experts live on several ranks and that executes a plan.

    router (replayed or live) -> split -> dispatch -> experts (homes and copies) -> combine (+ shared expert)

Under `with micro_batch:` it follows the plan that is armed. Without a micro-batch tokens are routed live to the homes
of their experts. Loss and gradients are those of `ReferenceMoE` either way.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equilibra.core.errors import InputError
from equilibra.execute.experts.spec import MoESpec
from equilibra.execute.experts.weights import ExpertWeights
from equilibra.execute.moe.functions import run_visit
from equilibra.execute.moe.reference import ReferenceMoE, SharedExpert
from equilibra.execute.moe.router import Router
from equilibra.execute.record import direction_now
from equilibra.execute.runtime import Runtime

__all__ = ["BalancedMoE"]


class BalancedMoE(nn.Module):
    """One layer; layers of a model are made in their order and share a runtime."""

    def __init__(
        self, spec: MoESpec, runtime: Runtime, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.spec = spec
        self.runtime = runtime
        layer = len(runtime.weights)
        placement = runtime.placement
        if placement.num_experts != spec.num_experts or layer >= placement.num_layers:
            raise InputError(
                f"layer {layer} of {spec.num_experts} experts does not fit a placement of {placement.num_layers} "
                f"layers of {placement.num_experts}"
            )
        self.router = Router(spec, device=device, dtype=dtype)
        homes = placement.homes_on(layer, runtime.group.rank)
        self.experts = ExpertWeights(spec, homes, device=device, dtype=dtype)
        self.shared = SharedExpert(spec, device=device, dtype=dtype) if spec.shared_ffn else None
        self.layer = runtime.register(self.experts)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # collectives are not for a compiler
    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states of any leading shape; padding (see MicroBatch.rows) gets zeros."""
        if hidden.shape[-1] != self.spec.hidden:
            raise InputError(f"hidden states must be {self.spec.hidden} wide, not {tuple(hidden.shape)}")
        runtime, micro_batch = self.runtime, self.runtime.current
        flat_TD = hidden.reshape(-1, self.spec.hidden)
        recorded = None
        tokens_TD = flat_TD
        runtime.enter_layer(runtime.key(self.layer), direction_now())
        if micro_batch is not None:
            tokens_TD = micro_batch.select(flat_TD)
            recorded = micro_batch.experts(self.layer, hidden.device)
        experts_TK, weights_TK = self.router(
            tokens_TD, recorded, complete=micro_batch is not None and micro_batch.planned
        )
        out_TD = run_visit(runtime, self.layer, self._cast(tokens_TD), experts_TK, weights_TK)
        if self.shared is not None:
            out_TD = out_TD + self.shared(tokens_TD)
        out_TD = out_TD if micro_batch is None else micro_batch.among_padding(out_TD, flat_TD)
        return out_TD.reshape(hidden.shape)

    @staticmethod
    def _cast(tokens_TD: Tensor) -> Tensor:
        """Rows travel and are computed in autocast's type, where it is on."""
        kind = tokens_TD.device.type
        return tokens_TD.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tokens_TD

    @torch.no_grad()
    def load_reference(self, reference: ReferenceMoE) -> None:
        """Take this rank's part of a layer that has all experts."""
        self.router.load_state_dict(reference.router.state_dict())
        if self.shared is not None and reference.shared is not None:
            self.shared.load_state_dict(reference.shared.state_dict())
        homes = torch.from_numpy(self.experts.experts.astype("int64"))
        for name in self.experts.names:
            self.experts.get_parameter(name).copy_(reference.experts[name][homes])
