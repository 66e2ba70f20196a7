"""What a checkpoint holds, by logical expert number.

Symbols: H homes on this rank.

    experts.3.17.gate_up                        expert 17 of MoE layer 3; written by its home in the first group
    dense.embed.weight                          everything else of the module; written by world rank 0
    optimizer.experts.3.17.gate_up.exp_avg      moments and masters, likewise
    optimizer.experts.3.gate_up.step            single numbers that an optimizer keeps of a stacked parameter
    extra.0                                     tensors of the caller

Keys do not depend on the placement or the number of ranks. The optimizer's settings, the names it keeps per parameter
and the caller's values are plain values of the manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from equilibra.core.errors import InputError, NonFiniteError
from equilibra.execute.experts.weights import ExpertWeights
from equilibra.execute.runtime import Runtime

__all__ = ["MASTER", "Named", "Snapshot", "Trained", "decoded", "nonfinite"]


@torch.no_grad()
def nonfinite(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether each tensor (or this rank's shard of it) holds NaN or infinity; reads the device once."""
    looked_at, finite = [], []
    for number, tensor in enumerate(tensors):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.is_floating_point() and local.numel():
            wide = local if local.dtype.itemsize > 1 else local.float()
            looked_at.append(number)
            finite.append(torch.isfinite(torch.linalg.vector_norm(wide, ord=float("inf"))))
    found = [False] * len(tensors)
    if finite:
        flags = torch.stack([one.to(finite[0].device) for one in finite]).tolist()
        for number, flag in zip(looked_at, flags, strict=True):
            found[number] = not flag
    return found


MASTER = "master"
"""key of a parameter's master in its optimizer state"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Named:
    """A parameter or buffer, with the checkpoint keys of it and its optimizer state."""

    name: str
    """`experts.3.gate_up` or `dense.embed.weight`"""
    tensor: Tensor
    """[H, ...] for experts"""
    homes: NDArray[np.int32] | None = None
    """[H] experts at home here; None: a dense tensor"""
    of_expert: str = ""
    """key of one expert: `experts.3.{}.gate_up`"""

    def keys(self, kept: str = "", *, stacked: bool, experts: NDArray[np.int32] | None = None) -> list[str]:
        """Keys of this tensor, or of its optimizer state `kept`: one per home (or per `experts`), or one for all."""
        before, behind = ("optimizer.", f".{kept}") if kept else ("", "")
        if not stacked or self.homes is None:
            return [f"{before}{self.name}{behind}"]
        chosen = self.homes if experts is None else experts
        return [f"{before}{self.of_expert.format(expert)}{behind}" for expert in chosen.tolist()]

    def is_stacked(self, tensor: Tensor, what: str) -> bool:
        """Whether a state tensor of this one has a row per home."""
        if self.homes is None or tensor.ndim == 0:
            return False
        if tensor.shape[0] != self.homes.size:
            raise InputError(
                f"cannot save {what} of {self.name}: its shape is {list(tensor.shape)}; optimizer state of experts "
                f"must have a row for each of {self.homes.size} homes, or be a single number"
            )
        return True


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """The module, its experts, and their optimizer."""

    runtime: Runtime
    module: nn.Module
    """holds the runtime's experts and everything dense"""
    optimizer: torch.optim.Optimizer | None
    """of the module's parameters, or of their masters"""
    masters: Mapping[nn.Parameter, Tensor]
    """float32 copies that the optimizer works on"""

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
        """Raise NonFiniteError if a parameter, its master or its optimizer state holds NaN or infinity."""
        tensors: dict[str, Tensor] = {}
        for named in self.named():
            if isinstance(named.tensor, nn.Parameter):  # buffers may hold infinities, as masks do
                tensors[named.name] = named.tensor
                kept = {} if self.optimizer is None else self.kept(named)
                tensors |= {f"{key} of {named.name}": t for key, t in kept.items() if isinstance(t, Tensor)}
        flags = nonfinite(list(tensors.values()))
        found = [name for name, flag in zip(tensors, flags, strict=True) if flag]
        if found:
            raise NonFiniteError(
                f"cannot save a checkpoint: {len(found)} tensors hold NaN or infinities, the first "
                f"{', '.join(found[:5])}; earlier checkpoints are kept, load the last of them"
            )

    # --- what the optimizer keeps ---

    def optimized(self, named: Named) -> Tensor:
        """The tensor the optimizer updates: the parameter's master, or itself."""
        return self.masters.get(named.tensor, named.tensor)  # type: ignore[call-overload, no-any-return]

    def kept(self, named: Named) -> dict[str, Any]:
        """Optimizer state of a parameter by name, including its master."""
        assert self.optimizer is not None
        master = self.optimized(named)
        state = dict(self.optimizer.state.get(master, {}))
        return state if master is named.tensor else {MASTER: master, **state}

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, with names in place of parameters."""
        if self.optimizer is None:
            return []
        name_of = {id(self.optimized(named)): named.name for named in self.named()}
        return [
            {**group, "params": [name_of.get(id(parameter)) for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]


class Snapshot:
    """What this rank writes: views of tensors by key (no copies), and plain values for the manifest."""

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

    def description(self) -> str:
        """A hash of what must be equal on all ranks."""
        hashed = hashlib.sha256(json.dumps(self.values["optimizer"], sort_keys=True).encode())
        hashed.update(self.trained.runtime.placement.home_of_expert.tobytes())
        return hashed.hexdigest()[:32]

    def copy(self) -> None:
        """Replace views by copies in host memory, so that training may change the state."""
        self.tensors = {key: tensor.to("cpu", copy=True) for key, tensor in self.tensors.items()}

    def _add(self, named: Named, tensor: Tensor, kept: str = "") -> bool:
        """Add a tensor if this rank writes it; returns whether it has a row per home."""
        group, stacked = self.trained.runtime.group, named.is_stacked(tensor, kept)
        if group.index == 0 if stacked else group.world_rank == 0:
            rows = tensor.detach().unbind(0) if stacked else [tensor.detach()]
            self.tensors.update(zip(named.keys(kept, stacked=stacked), rows, strict=True))
        return stacked

    def _keep(self, tensor: Tensor) -> str:
        key, self._extras = f"extra.{self._extras}", self._extras + 1
        if self.trained.runtime.group.world_rank == 0:
            self.tensors[key] = tensor.detach()
        return key

    def _optimizer_values(self) -> dict[str, Any]:
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
    """A value for JSON; `keep` stores a tensor and returns its key."""
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
        f"cannot save {what} of type {type(value).__name__}: use None, numbers, strings, tensors, or lists and dicts "
        "of them"
    )


def decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
    """The inverse of `encoded`."""
    if isinstance(value, list):
        return [decoded(item, tensors) for item in value]
    if isinstance(value, dict):
        if TENSOR in value:
            return tensors[value[TENSOR]]
        return {name: decoded(item, tensors) for name, item in value.items()}
    return value
