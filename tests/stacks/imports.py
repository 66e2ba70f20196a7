"""`after_import`: run a function on a module once Python has imported it, without importing it earlier."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["after_import"]

Hook = Callable[[ModuleType], None]


class _After(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, hook: Hook) -> None:
        self.name, self.hook = name, hook

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != self.name:
            return None
        return next((self._hooked(spec) for spec in self._found_by_others(fullname, path, target)), None)

    def _found_by_others(self, *asked: Any) -> Any:
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec") and (spec := finder.find_spec(*asked)) is not None:
                yield spec

    def _hooked(self, spec: ModuleSpec) -> ModuleSpec:
        loader: Any = spec.loader
        run = loader.exec_module

        def run_and_hook(module: ModuleType) -> None:
            run(module)
            self.hook(module)

        loader.exec_module = run_and_hook
        return spec


def after_import(name: str, hook: Hook) -> None:
    sys.meta_path.insert(0, _After(name, hook))
