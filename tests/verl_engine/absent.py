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
