"""Runs inside vLLM's worker: new weights for a model that is already serving.

vLLM loads this class by name (`worker_extension_cls`) and calls `equilibra_load` in every worker. On GPUs vLLM's own
`reload_weights` is enough. Its CPU build packs weights for its kernels and updates two of the packed kinds wrongly:

    experts     packed only when their kernel is built, so an update stores unpacked weights where packed ones belong;
                without a kernel, the update builds one and packs
    tied heads  packed from the embedding, whose update does not pack the head again

Relies on `quant_method.moe_kernel` and `cpu_linear` of vLLM's layers, as they are in 0.28 to 0.30.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class WeightUpdate:
    """Adds a method to vLLM's workers that loads all weights of a folder into the live model."""

    def equilibra_load(self: Any, folder: str) -> None:
        layers = list(self.get_model().modules())
        packs = import_module("vllm.platforms").current_platform.is_cpu()
        for layer in layers if packs else ():
            method: Any = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
        self.reload_weights(weights_path=folder)
        for layer in layers if packs else ():
            if hasattr(layer, "cpu_linear") and layer.weight.numel():  # empty: packed by its own update
                layer.quant_method.process_weights_after_loading(layer)
