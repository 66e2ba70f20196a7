"""Distributed checkpoints of Megatron with logical expert numbers, whatever the placement.

Megatron numbers experts in a checkpoint by rank and place in it. Those numbers are replaced here, in what
`sharded_state_dict` describes; the optimizer takes the descriptions of its state from the model's. Formats that store
the optimizer's buffers as they lie in memory know no experts: they are refused once homes have moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple

from torch import nn

from equilibra.core.errors import InputError
from equilibra.integrations.megatron.parts import slot_and_part
from equilibra.integrations.megatron.visits import MegatronVisits

__all__ = ["ExpertParameter", "check_format", "expert_parameters", "guard_optimizer", "logical"]

LOGICAL_FORMATS = ("fully_reshardable", "fully_sharded_model_space")
FORMAT_KEY = "distrib_optim_sharding_type"


def logical(
    described: dict[str, Any], prefix: str, axis: int, visits: MegatronVisits, metadata: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """A layer's description with logical numbers. axis: of the expert's number in a description's offsets."""
    if not visits.moved:
        return described
    check_format(metadata.get(FORMAT_KEY), moved=True)
    if metadata.get("singleton_local_shards"):
        raise InputError("cannot save moved homes with singleton_local_shards: keys would name slots; switch it off")
    result = {}
    for name, value in described.items():
        inside = name.removeprefix(prefix)
        if inside == name or not (found := _slot(inside)):
            result[name] = value
            continue
        result[name] = _numbered(value, axis, visits.expert_of_home[found[0]])
    return result


def _slot(name: str) -> tuple[int, str] | None:
    try:
        return slot_and_part(name)
    except InputError:
        return None  # not of one expert


def _numbered(value: Any, axis: int, expert: int) -> Any:  # noqa: ANN401 - Megatron's descriptions
    """A description of another expert: a tensor, an object, or a factory of several of them."""
    if hasattr(value, "build_fn"):
        return replace(value, build_fn=partial(_build_numbered, value.build_fn, axis, expert))
    offset = value.global_offset
    return replace(value, global_offset=(*offset[:axis], expert, *offset[axis + 1 :]))


def _build_numbered(build: Callable[..., Any], axis: int, expert: int, *arguments: Any) -> Any:  # noqa: ANN401
    built = build(*arguments)
    if isinstance(built, dict):
        return {name: _numbered(one, axis, expert) for name, one in built.items()}
    return [_numbered(one, axis, expert) for one in built]


def check_format(name: str | None, *, moved: bool) -> None:
    """An error for formats of optimizer state that know no experts, once homes have moved."""
    if moved and name is not None and name not in LOGICAL_FORMATS:
        raise InputError(
            f"cannot use {FORMAT_KEY}={name!r} while homes are moved: it stores the optimizer's buffers as they lie in "
            f"memory, and would load into other experts; use {LOGICAL_FORMATS[0]!r}, or restore_homes() before"
        )


def guard_optimizer(optimizer: Any, moved: Callable[[], bool]) -> None:  # noqa: ANN401 - Megatron's
    """Have a DistributedOptimizer refuse such formats, also where the model was described with other metadata."""
    describe = optimizer.sharded_state_dict

    @wraps(describe)
    def guarded(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        name = options.get("sharding_type") or (options.get("metadata") or {}).get(FORMAT_KEY)
        check_format(name, moved=moved())
        return describe(*arguments, **options)

    optimizer.sharded_state_dict = guarded


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
