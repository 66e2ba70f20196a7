"""verl on a machine without its heavier dependencies: what it imports and the tests never use, in one place.

verl imports these packages when it is imported. Ray, which its controller is built on, and four packages that other
engines use. Nothing under test calls them; where one is installed, the real one is imported. Only in processes of the
tests' own, for a package that is not one must not be seen by others.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import warnings
from types import ModuleType
from typing import Any

import torch
from tests.megatron_core import shims
from torch.overrides import TorchFunctionMode

ABSENT = ("accelerate", "datasets", "pandas", "peft", "ray")
_modes: list[TorchFunctionMode] = []


class _Placeholder(ModuleType):
    """Every name in it is an empty class."""

    __path__: list[str] = []  # noqa: RUF012 - what makes it a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class _NoGpu(TorchFunctionMode):
    """Memory is pinned for copies to a GPU, and freed when its streams are done."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.record_stream:
            return None
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def _no_gpu() -> None:
    """What verl asks of CUDA besides Megatron."""
    torch.cuda.mem_get_info = lambda *_args: (0, 0)
    _modes.append(_NoGpu())
    _modes[0].__enter__()


def interleave() -> None:
    """Before an engine with chunks on two pipeline stages runs."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    P2PCommunicator._communicate_shapes = _sizes_as_tensors


def _sizes_as_tensors(self: Any, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool) -> Any:
    """Sizes of what pipeline stages send, in the order in which Megatron sends the tensors.

    Its own order relies on NCCL's pairs of sends and receives: between two stages gloo would swap the sizes of both
    directions.
    """
    from megatron.core.pipeline_parallel import p2p_communication as p2p

    sizes = [None if one is None else torch.tensor(one.size()) for one in (send_prev, send_next)]
    found = [torch.zeros(3, dtype=torch.int64) if wanted else None for wanted in (recv_prev, recv_next)]
    requests = p2p._p2p_ops(
        tensor_send_prev=sizes[0], tensor_recv_prev=found[0], tensor_send_next=sizes[1], tensor_recv_next=found[1],
        group=self.pp_group, prev_pipeline_rank=self.prev_rank, next_pipeline_rank=self.next_rank,
    )  # fmt: skip
    for request in requests.values():
        request.wait()
    return tuple([0, 0, 0] if one is None else one.tolist() for one in found)


def install() -> None:
    """Once in a process, before verl is imported."""
    shims.install()
    if _modes:
        return
    sys.meta_path.append(_Absent())
    os.environ["VERL_LOGGING_LEVEL"] = "ERROR"
    _no_gpu()


def import_verl(plugin: str | None = None) -> Any:
    """The module of verl's Megatron engine. plugin: what VERL_USE_EXTERNAL_MODULES names."""
    install()
    if plugin is not None:
        os.environ["VERL_USE_EXTERNAL_MODULES"] = plugin
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import verl.workers.engine  # noqa: F401
        from verl.workers.engine.megatron import transformer_impl

    return transformer_impl
