"""The protocol of all algorithms, what they make of samples, and their names. `registry` fills in those we ship.

Symbols: A answer tokens of a sample so far.

An algorithm is values only: from samples, rewards and values it makes advantages and returns, says which tokens the
policy and the value model train on, and with which loss. Groups are whole: samples of a group are on the same rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from inspect import signature
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.rl.loss import LossSetting, Total
from equilibra.rl.sample import Sample

__all__ = [
    "Algorithm", "Target", "algorithm_named", "algorithm_names", "check_finished", "option_names", "register",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """What one sample is trained towards."""

    advantages: NDArray[np.float64]
    """[A] by answer token; those of untrained tokens mean nothing"""
    returns: NDArray[np.float64] | None = None
    """[A] what the value model learns, None where there is none"""

    def __post_init__(self) -> None:
        if self.returns is not None and self.returns.shape != self.advantages.shape:
            raise InputError(
                f"{self.advantages.shape} advantages need as many returns, one per token, not {self.returns.shape}"
            )


class Algorithm(Protocol):
    """From samples to targets."""

    @property
    def name(self) -> str:
        """In the registry and in configs."""
        ...

    @property
    def needs_values(self) -> bool:
        """Whether there is a value model."""
        ...

    @property
    def windowed(self) -> bool:
        """Whether answers may be unfinished."""
        ...

    @property
    def loss(self) -> LossSetting:
        """Of the policy."""
        ...

    @property
    def value_clip(self) -> float:
        """How far values count away from the old ones in the value loss; 0 for any distance."""
        ...

    def policy_mask(self, sample: Sample) -> NDArray[np.bool_]:
        """[A] answer tokens that the policy trains on now."""
        ...

    def value_mask(self, sample: Sample) -> NDArray[np.bool_]:
        """[A] answer tokens that the value model trains on now."""
        ...

    def targets(
        self, samples: Sequence[Sample], values: Sequence[NDArray[np.float64]] | None, total: Total
    ) -> list[Target]:
        """One for each own sample; `values` are [A], of the states before the answer tokens.

        Every rank calls this, also one without samples: `total` sums over all ranks.
        """
        ...


def check_finished(name: str, samples: Iterable[Sample]) -> None:
    """An error if an answer goes on: only windowed algorithms can train on its beginning."""
    unfinished = [sample for sample in samples if not sample.finished]
    if unfinished:
        first = unfinished[0]
        raise InputError(
            f"{name} cannot train on {len(unfinished)} unfinished answers (group {first.group}, number {first.number}, "
            f"{first.answer.size} tokens): answers must end; use a windowed algorithm such as tppo, or a limit"
        )


_ALGORITHMS: dict[str, Callable[..., Algorithm]] = {}


def register(name: str, make: Callable[..., Algorithm]) -> None:
    """Make an algorithm known under a name; the keyword parameters of `make`, all with defaults, are its options."""
    if name in _ALGORITHMS:
        raise InputError(f"an algorithm named {name!r} is registered already")
    _ALGORITHMS[name] = make


def algorithm_names() -> list[str]:
    """Names of all algorithms."""
    return list(_all_algorithms())


def option_names(name: str) -> list[str]:
    """Options of the algorithm of that name, other than those of its loss."""
    return [option for option in signature(_maker(name)).parameters if option != "loss"]


def algorithm_named(name: str, *, loss: Mapping[str, Any] | None = None, **options: object) -> Algorithm:
    """The algorithm of that name, with some options and fields of its `LossSetting` changed.

    An unknown name is an error that lists the names.
    """
    make = _maker(name)
    _check_known(f"option of {name}", options, option_names(name))
    if loss:
        _check_known(f"option of the loss of {name}", loss, [field.name for field in fields(LossSetting)])
        options["loss"] = replace(make().loss, **loss)
    return make(**options)


def _maker(name: str) -> Callable[..., Algorithm]:
    algorithms = _all_algorithms()
    if name not in algorithms:
        raise InputError(f"no algorithm is named {name!r}; use one of {', '.join(algorithms)}")
    return algorithms[name]


def _check_known(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise InputError(f"no {what} is named {name!r}; use one of {', '.join(known)}")


def _all_algorithms() -> dict[str, Callable[..., Algorithm]]:
    """The algorithms, with those we ship: imported here, because they import this file."""
    import_module("equilibra.rl.algorithms.registry")
    return _ALGORITHMS
