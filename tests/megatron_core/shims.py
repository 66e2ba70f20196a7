"""megatron-core on CPUs with gloo: what has to be told otherwise, in one place and only for tests.

megatron-core 0.16.1 names CUDA in many places. Nothing of its files is edited: torch's entry points and a few of its
names answer for the CPU instead.

| | what | why |
|---|---|---|
| P1 | torch.cuda.current_device | device of its buffers |
| P2 | streams and events | the all-to-all dispatcher copies counts on a side stream |
| P5 | te_general_gemm | an undefined name where Transformer Engine is missing |
| P6 | maybe_move_tensor_to_cpu | split sizes must be numbers, also when they are on the CPU already |
| P7 | device="cuda", Tensor.type(), .cuda() | literals in its optimizer |
| P8 | its random states | they are of CUDA; the tests use no dropout |
| P9 | "step" of torch's Adam | its loading knows Apex and Transformer Engine only, and shares one tensor of it
between all parameters |
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["fake_fused_gradients", "install"]

KINDS = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}
_modes: list[TorchFunctionMode] = []


class _Stream:
    """A stream or an event that does nothing."""

    def __init__(self, *_args: Any, **_options: Any) -> None: ...

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_options: self


class _OnCpu(TorchFunctionMode):
    """P7."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return KINDS.get(args[0].dtype) or func(*args)
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        if func is torch.Tensor.to:
            args = tuple("cpu" if isinstance(value, str) and value.startswith("cuda") else value for value in args)
        return func(*args, **kwargs)


def install() -> None:
    """Once in a process, before models are built."""
    if _modes:
        return
    _torch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _megatron()
    _modes.append(_OnCpu())
    _modes[0].__enter__()


def _torch() -> None:
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # P1
    torch.cuda.Stream = torch.cuda.Event = _Stream  # P2
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_args: _Stream()
    torch.cuda.stream = lambda *_args: contextlib.nullcontext()
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_args: None


def _megatron() -> None:
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import random as states
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.te_general_gemm = None  # P5

    def counts(tensor: Any, *, as_numpy: bool = False, record_stream: bool = False) -> Any:  # P6
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = counts
    states.CudaRNGStatesTracker.fork = lambda *_args, **_options: contextlib.nullcontext()  # P8
    states._get_cuda_rng_state = lambda *_args, **_options: torch.zeros(1)
    states._set_cuda_rng_state = lambda *_args, **_options: None
    _keep_steps(distrib_optimizer.DistributedOptimizer)


def _keep_steps(kind: type) -> None:
    """P9."""
    write, load = kind._set_main_param_and_optimizer_states, kind.load_state_dict

    def with_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        own = self._get_main_param_and_optimizer_states(parameter)
        write(self, parameter, {**tensors, "step": own["step"]} if "step" in own else tensors)

    def with_own_steps(self: Any, state: Any) -> None:
        load(self, state)
        for value in self.optimizer.state.values():
            if "step" in value:
                value["step"] = torch.as_tensor(float(value["step"]), dtype=torch.float32)

    kind._set_main_param_and_optimizer_states = with_step
    kind.load_state_dict = with_own_steps


def fake_fused_gradients() -> None:
    """Gradient-accumulation fusion without its CUDA kernels: weight gradients are added to main_grad in place."""
    from megatron.core.tensor_parallel import layers

    class _Kernels:
        @staticmethod
        def wgrad_gemm_accum_fp32(rows: Any, gradient: Any, main_grad: Any) -> None:
            main_grad.add_(gradient.t() @ rows)

    layers.fused_weight_gradient_mlp_cuda = _Kernels
    layers._grad_accum_fusion_available = True
