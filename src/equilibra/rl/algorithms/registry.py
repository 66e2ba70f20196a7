"""Algorithms by name, with their options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from inspect import signature
from typing import Any

from equilibra.core.errors import InputError
from equilibra.rl.algorithms.algorithm import Algorithm
from equilibra.rl.algorithms.grpo import Grpo, Gspo
from equilibra.rl.algorithms.ppo import Ppo, Tppo
from equilibra.rl.loss import LossSetting

__all__ = ["algorithm_named", "algorithm_names", "option_names", "register"]

_ALGORITHMS: dict[str, Callable[..., Algorithm]] = {"grpo": Grpo, "gspo": Gspo, "ppo": Ppo, "tppo": Tppo}


def register(name: str, make: Callable[..., Algorithm]) -> None:
    """Add an algorithm; the keyword parameters of `make`, all with defaults, are its options."""
    if name in _ALGORITHMS:
        raise InputError(f"an algorithm named {name!r} is registered already")
    _ALGORITHMS[name] = make


def algorithm_names() -> list[str]:
    """Names of all registered algorithms."""
    return list(_ALGORITHMS)


def option_names(name: str) -> list[str]:
    """Options of an algorithm, without those of its loss."""
    return [option for option in signature(_maker(name)).parameters if option != "loss"]


def algorithm_named(name: str, *, loss: Mapping[str, Any] | None = None, **options: object) -> Algorithm:
    """The algorithm of that name with the given options; `loss` changes fields of its `LossSetting`."""
    make = _maker(name)
    _check_known(f"option of {name}", options, option_names(name))
    if loss:
        _check_known(f"option of the loss of {name}", loss, [field.name for field in fields(LossSetting)])
        options["loss"] = replace(make().loss, **loss)
    return make(**options)


def _maker(name: str) -> Callable[..., Algorithm]:
    _check_known("algorithm", [name], algorithm_names())
    return _ALGORITHMS[name]


def _check_known(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise InputError(f"no {what} is named {name!r}; use one of {', '.join(known)}")
