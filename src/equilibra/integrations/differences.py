"""How far two passes of a model differ, and what rounding explains, for `equilibra verify` and for frameworks.

A gradient may differ by

    PER_LAYER x u x sqrt(layers)        relative to its norm; u: unit roundoff of the run's dtype

for an expert relative to the root mean square over the experts of its layer and part, as few tokens may reach it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from equilibra.core.errors import MismatchError

PER_LAYER = 16.0
"""relative difference that one layer explains, in unit roundoffs"""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far two passes differ in one respect."""

    what: str
    found: float
    """the largest difference; the largest float where either pass has a number that is not finite"""
    allowed: float
    """what rounding explains"""
    where: str = ""
    """the parameter or output with the largest"""

    @property
    def is_rounding(self) -> bool:
        return self.found <= self.allowed


def gradient_limit(roundoff: float, *, num_layers: int) -> float:
    """The largest relative difference that rounding explains."""
    return PER_LAYER * roundoff * sqrt(num_layers)


def apart(wanted: Iterable[Tensor], found: Iterable[Tensor]) -> list[float]:
    """Difference of each, relative to the root mean square of all norms; absolute where all are zero."""
    norms = [(_norm(one), _norm(other - one)) for one, other in zip(wanted, found, strict=True)]
    size = sqrt(sum(norm**2 for norm, _ in norms) / max(1, len(norms))) or 1.0
    return [off / size for _, off in norms]


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def largest(what: str, found: Mapping[str, float], allowed: float) -> Difference:
    """The largest of the differences, which are given by name."""
    finite = {name: value if isfinite(value) else sys.float_info.max for name, value in found.items()}
    where = max(finite, key=lambda name: finite[name], default="")
    return Difference(what=what, found=finite.get(where, 0.0), allowed=allowed, where=where)


def of_all_ranks(own: Sequence[Difference]) -> list[Difference]:
    """Collective over the world: the largest difference in every respect; a rank may lack some."""
    every = [list(own)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        every *= dist.get_world_size()
        dist.all_gather_object(every, list(own))
    worst: dict[str, Difference] = {}
    for rank, one in ((rank, one) for rank, of_rank in enumerate(every) for one in of_rank):
        if one.what not in worst or one.found > worst[one.what].found:
            where = f"{one.where} on rank {rank}" if one.where and len(every) > 1 else one.where
            worst[one.what] = replace(one, where=where)
    return list(worst.values())


def table(differences: Sequence[Difference]) -> str:
    """Differences beside what rounding explains, a line each."""
    lines = [f"{'':<28}{'difference':>12}{'rounding':>12}"]
    for one in differences:
        mark = "" if one.is_rounding else f"   MORE THAN ROUNDING: {one.where}".rstrip(": ")
        lines.append(f"{one.what:<28}{one.found:>12.1e}{one.allowed:>12.1e}{mark}")
    return "\n".join(lines)


def check(differences: Sequence[Difference]) -> None:
    """Raise an error, which refers to the table, unless rounding explains all differences."""
    wrong = ", ".join(one.where or one.what for one in differences if not one.is_rounding)
    if wrong:
        raise MismatchError(
            f"balancing changes this run's numbers by more than rounding, most in {wrong}; please report the table"
        )
