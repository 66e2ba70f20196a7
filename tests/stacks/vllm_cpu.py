"""What vLLM's CPU layers have to be told in a server whose weights verl updates.

vLLM 0.30.0 packs weights for its CPU kernels once they are loaded, and forgets the originals:

| | what | why |
|---|---|---|
| V1 | dispatch_cpu_unquantized_gemm | linear layers are left with an empty parameter: nothing can be loaded into it |
| V2 | CPUUnquantizedExperts, _setup_kernel | packed experts keep their name and shape, updates are loaded unpacked |

Without V2 answers are sampled from wrong experts, and nothing says so.
"""

from __future__ import annotations

from typing import Any

import torch
from tests.stacks import faults


def install() -> None:
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    def keep(layer: Any, remove_weight: bool) -> None:  # V1
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep
    CPUUnquantizedExperts.process_weights_after_loading = pack
    for kind in (CPUUnquantizedExperts, *CPUUnquantizedExperts.__subclasses__()):
        if "apply" in vars(kind):
            kind.apply = with_packed(kind.apply)
    pack_after_updates(UnquantizedFusedMoEMethod)


def pack(self: Any, layer: Any) -> None:
    """V2: keep packed weights beside the parameters, which an update can still be loaded into."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import cpu_prepack_moe_weight

    assert self._padded_intermediate_size(self.moe_config) == self.moe_config.intermediate_size_per_partition
    self._use_zentorch = False
    self.packed = [cpu_prepack_moe_weight(w.data.clone(), self.isa) for w in (layer.w13_weight, layer.w2_weight)]


def with_packed(apply: Any) -> Any:
    """V2: run the kernel on the packed weights, whichever way it is given the parameters."""

    def applied(self: Any, *arguments: Any, **options: Any) -> Any:
        if "w1" in options:
            return apply(self, *arguments, **(options | dict(zip(("w1", "w2"), self.packed, strict=True))))
        output, hidden_states, _w1, _w2, *rest = arguments
        return apply(self, output, hidden_states, *self.packed, *rest, **options)

    return applied


def pack_after_updates(method: Any) -> None:
    """V2: pack again when weights have been updated, which vLLM does on the first load only."""
    setup = method._setup_kernel

    def again(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        updated = self.moe_kernel is not None
        setup(self, layer, w13, w2)
        if not updated:
            return
        layer.num_updates = getattr(layer, "num_updates", 0) + 1  # the first comes before step 1
        if not faults.happens(faults.STALE, step=layer.num_updates):
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    method._setup_kernel = again
