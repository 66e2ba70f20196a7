"""Plain values of a checkpoint as JSON; tensors among them are kept beside it.

What can be kept: None, bool, int, float, str, lists and dicts of them with names as keys, and tensors. Tuples come back
as lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from equilibra.core.errors import InputError

__all__ = ["decoded", "encoded"]

TENSOR = "$tensor"


def encoded(value: object, what: str, keep: Callable[[Tensor], str]) -> Any:  # noqa: ANN401
    """A value for JSON; `keep` takes a tensor and says under which key."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return {TENSOR: keep(value)}
    if isinstance(value, list | tuple):
        return [encoded(item, f"{what}[{i}]", keep) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) and name != TENSOR for name in value):
            raise InputError(f"cannot save {what}: its keys must be names, not {[*value][:5]}")
        return {name: encoded(item, f"{what}.{name}", keep) for name, item in value.items()}
    raise InputError(
        f"cannot save {what}, which is of type {type(value).__name__}: use None, numbers, strings, tensors, or lists "
        "and dicts of them"
    )


def decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
    """The value again."""
    if isinstance(value, list):
        return [decoded(item, tensors) for item in value]
    if isinstance(value, dict):
        if TENSOR in value:
            return tensors[value[TENSOR]]
        return {name: decoded(item, tensors) for name, item in value.items()}
    return value
