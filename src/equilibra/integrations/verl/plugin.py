"""The module to name in `VERL_USE_EXTERNAL_MODULES`: verl imports it, and its Megatron engines run under plans.

    export VERL_USE_EXTERNAL_MODULES=equilibra.integrations.verl.plugin

verl imports it in every process, also where no model is trained and Megatron has no business. So nothing is imported
here: the hooks go in when the module of the Megatron engine has been imported by verl itself.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from equilibra.integrations.verl.contract import ENGINE

__all__ = ["install"]


class _WhenImported(importlib.abc.MetaPathFinder):
    """Finds the engine's module as Python would, and hooks it once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Only for the engine's module."""
        if fullname != ENGINE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        run = loader.exec_module

        def run_and_hook(module: ModuleType) -> None:
            run(module)
            _hook(module)

        loader.exec_module = run_and_hook
        return spec


def _hook(module: ModuleType) -> None:
    from equilibra.integrations.verl.hooks import hook  # noqa: PLC0415 - imports torch and Megatron's part

    hook(module)


def install() -> None:
    """Once in a process; importing this module does it."""
    if ENGINE in sys.modules:
        _hook(sys.modules[ENGINE])
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


install()
