"""What a checkpoint holds, in logical order, and how it becomes the state of a model again.

Symbols: H homes on this rank, E experts.

    experts.3.17.gate_up                        expert 17 of MoE layer 3; written by its home in the first group
    dense.embed.weight                          everything else of the module; written by world rank 0
    optimizer.experts.3.17.gate_up.exp_avg      moments and masters, likewise
    optimizer.experts.3.gate_up.step            single numbers that an optimizer keeps of a stacked parameter
    extra.0                                     tensors of the caller

No key depends on the placement or on the number of ranks. Which names an optimizer keeps of which parameter, its
settings and the caller's values are plain values of the manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from equilibra.core.errors import InputError, NonFiniteError
from equilibra.execute.experts.weights import ExpertWeights
from equilibra.execute.finite import names_of_nonfinite
from equilibra.execute.runtime import Runtime

__all__ = ["MASTER", "Named", "Snapshot", "Trained", "decoded", "encoded"]

MASTER = "master"
"""the name of a parameter's master among what the optimizer keeps of it"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Named:
    """A parameter or buffer of the module, with the keys of what belongs to it."""

    name: str
    """`experts.3.gate_up` or `dense.embed.weight`"""
    tensor: Tensor
    """[H, ...] for experts"""
    homes: NDArray[np.int32] | None = None
    """[H] experts at home here; None: not of experts"""
    of_expert: str = ""
    """`experts.3.{}.gate_up`"""

    def keys(self, kept: str = "", *, stacked: bool, experts: NDArray[np.int32] | None = None) -> list[str]:
        """Of this tensor, or of what the optimizer keeps as `kept`: for each home (or `experts`), or one for all."""
        before, behind = ("optimizer.", f".{kept}") if kept else ("", "")
        if not stacked or self.homes is None:
            return [f"{before}{self.name}{behind}"]
        chosen = self.homes if experts is None else experts
        return [f"{before}{self.of_expert.format(expert)}{behind}" for expert in chosen.tolist()]

    def is_stacked(self, tensor: Tensor, what: str) -> bool:
        """Whether a tensor that belongs to this one has a row per home."""
        if self.homes is None or tensor.ndim == 0:
            return False
        if tensor.shape[0] != self.homes.size:
            raise InputError(
                f"cannot save {what} of {self.name}: its shape is {list(tensor.shape)}, and what is kept of experts "
                f"must have a row for each of {self.homes.size} homes, or be a single number"
            )
        return True


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """What checkpoints are made of."""

    runtime: Runtime
    """has the experts at home here"""
    module: nn.Module
    """has them too, and everything dense"""
    optimizer: torch.optim.Optimizer | None
    """of the module's parameters, or of their masters"""
    masters: Mapping[nn.Parameter, Tensor]
    """copies in more digits that the optimizer works on"""

    def __post_init__(self) -> None:
        known = {id(weights) for weights in self.runtime.weights}
        for name, part in self.module.named_modules():
            if isinstance(part, ExpertWeights) and id(part) not in known:
                raise InputError(f"the experts at {name} of the module belong to another runtime")
        if self.masters and self.optimizer is None:
            raise InputError("masters are part of an optimizer's state: pass the optimizer that works on them")
        if any(None in group["params"] for group in self.groups()):
            raise InputError(
                "the optimizer has parameters that are neither the module's nor masters of them: give the whole "
                "module, and masters={parameter: its copy}"
            )

    def named(self) -> list[Named]:
        """Experts by layer, then everything dense."""
        found, seen = [], set[int]()
        for layer, weights in enumerate(self.runtime.weights):
            for part in weights.names:
                parameter = weights.get_parameter(part)
                seen.add(id(parameter))
                found.append(Named(
                    name=f"experts.{layer}.{part}", tensor=parameter, homes=weights.experts,
                    of_expert=f"experts.{layer}.{{}}.{part}",
                ))  # fmt: skip
        numbers = {
            f"{name}._extra_state" for name, module in self.module.named_modules() if isinstance(module, ExpertWeights)
        }
        for name, value in self.module.state_dict(keep_vars=True).items():
            if id(value) in seen or name in numbers:
                continue  # of experts, or tied to one that was named before
            seen.add(id(value))
            if not isinstance(value, Tensor) or isinstance(value, DTensor):
                raise InputError(
                    f"cannot save {name} of type {type(value).__name__}: outside of experts every rank must hold whole "
                    "tensors; keep other values in `extra`"
                )
            found.append(Named(name=f"dense.{name}", tensor=value))
        return found

    def check_finite(self) -> None:
        """An error if a parameter, its master or what the optimizer keeps of it is NaN or infinite."""
        tensors: dict[str, Tensor] = {}
        for named in self.named():
            if isinstance(named.tensor, nn.Parameter):  # buffers may hold infinities, as masks do
                tensors[named.name] = named.tensor
                kept = {} if self.optimizer is None else self.kept(named)
                tensors |= {f"{key} of {named.name}": t for key, t in kept.items() if isinstance(t, Tensor)}
        found = names_of_nonfinite(tensors)
        if found:
            raise NonFiniteError(
                f"{len(found)} tensors hold NaN or infinities, the first {', '.join(found[:5])}: such a checkpoint "
                "would be of no use and is not written; the ones before it are kept, load the last of them"
            )

    # --- what the optimizer keeps ---

    def optimized(self, named: Named) -> Tensor:
        """What the optimizer works on for a parameter: its master, or itself."""
        return self.masters.get(named.tensor, named.tensor)  # type: ignore[call-overload, no-any-return]

    def kept(self, named: Named) -> dict[str, Any]:
        """What the optimizer keeps of a parameter, by name."""
        assert self.optimizer is not None
        master = self.optimized(named)
        state = dict(self.optimizer.state.get(master, {}))
        return state if master is named.tensor else {MASTER: master, **state}

    def groups(self) -> list[dict[str, Any]]:
        """The settings of the optimizer, with names for parameters."""
        if self.optimizer is None:
            return []
        name_of = {id(self.optimized(named)): named.name for named in self.named()}
        return [
            {**group, "params": [name_of.get(id(parameter)) for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]


class Snapshot:
    """What this rank writes: views of tensors by key, and plain values. Nothing is copied."""

    def __init__(self, trained: Trained, extra: Mapping[str, Any]) -> None:
        self.trained = trained
        self.tensors: dict[str, Tensor] = {}
        self._extras = 0
        for named in trained.named():
            self._add(named, named.tensor)
        self.values = {
            "optimizer": None if trained.optimizer is None else self._optimizer_values(),
            "extra": encoded(dict(extra), "extra", self._keep),
        }
        """for the manifest"""

    def description(self) -> str:
        """Must be the same on all ranks."""
        hashed = hashlib.sha256(json.dumps(self.values["optimizer"], sort_keys=True).encode())
        hashed.update(self.trained.runtime.placement.home_of_expert.tobytes())
        return hashed.hexdigest()[:32]

    def copy(self) -> None:
        """Go on with copies in host memory, so that training may change the state."""
        self.tensors = {key: tensor.to("cpu", copy=True) for key, tensor in self.tensors.items()}

    def _add(self, named: Named, tensor: Tensor, kept: str = "") -> bool:
        """A tensor of the model or the optimizer, if it is this rank's to write; returns whether it is stacked."""
        group, stacked = self.trained.runtime.group, named.is_stacked(tensor, kept)
        if group.index == 0 if stacked else group.world_rank == 0:
            rows = tensor.detach().unbind(0) if stacked else [tensor.detach()]
            self.tensors.update(zip(named.keys(kept, stacked=stacked), rows, strict=True))
        return stacked

    def _keep(self, tensor: Tensor) -> str:
        """A tensor among plain values."""
        key, self._extras = f"extra.{self._extras}", self._extras + 1
        if self.trained.runtime.group.world_rank == 0:
            self.tensors[key] = tensor.detach()
        return key

    def _optimizer_values(self) -> dict[str, Any]:
        """Which names are kept of which parameter, plain values, and settings."""
        found: dict[str, Any] = {}
        for named in self.trained.named():
            kept = self.trained.kept(named)
            plain = {name: value for name, value in kept.items() if not isinstance(value, Tensor)}
            stacked = {name: self._add(named, value, name) for name, value in kept.items() if name not in plain}
            if kept:
                what = f"what the optimizer keeps of {named.name}"
                found[named.name] = {"stacked": stacked, "plain": encoded(plain, what, self._keep)}
        groups = encoded(self.trained.groups(), "settings of the optimizer", self._keep)
        return {"kind": type(self.trained.optimizer).__name__, "kept": found, "groups": groups}


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
