"""Weights for rollout engines with logical numbers, whatever the placement.

Exporters that read Megatron's parameters take an expert's number to be its rank's first plus its place. Here are the
true ones; for exporters that cannot be told, `Balancer.homes_restored` brings homes back for as long as they read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from equilibra.integrations.megatron.visits import MegatronVisits

__all__ = ["ExpertParameter", "expert_parameters"]


class ExpertParameter(NamedTuple):
    """One parameter of one expert at home on this rank."""

    layer: int
    """number among the balanced layers of this pipeline stage"""
    expert: int
    """logical"""
    part: str
    """linear_fc1.weight, linear_fc2.weight"""
    parameter: nn.Parameter


def expert_parameters(model: nn.Module) -> Iterator[ExpertParameter]:
    """Parameters of the experts at home here, by layer, slot and part. Those of other ranks are as many."""
    for module in model.modules():
        visits = getattr(module, "visits", None)
        if isinstance(visits, MegatronVisits):
            for expert, parts in zip(visits.expert_of_home, visits.parts, strict=True):
                for part, parameter in parts.items():
                    yield ExpertParameter(visits.layer, expert, part, parameter)
