"""The module that makes verl's Megatron engines run under plans.

    export VERL_USE_EXTERNAL_MODULES=equilibra.integrations.verl.plugin

verl imports it in every process, including those that train nothing. So it imports neither torch nor Megatron: the
hooks are installed when verl itself imports the module of its Megatron engine.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from equilibra.integrations.verl import ENGINE


class _WhenImported(importlib.abc.MetaPathFinder):
    """Finds the engine's module as Python would, and installs the hooks once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
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
    """Wait for verl's engine module, or hook it if it is loaded. Importing this module calls it."""
    if ENGINE in sys.modules:
        _hook(sys.modules[ENGINE])
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


install()
