"""What a checkpoint holds, by logical expert number, and how it is loaded into a model.

Symbols: H homes on this rank.

    experts.3.17.gate_up                        expert 17 of MoE layer 3; written by its home in the first group
    dense.embed.weight                          everything else of the module; written by world rank 0
    optimizer.experts.3.17.gate_up.exp_avg      moments and masters, likewise
    optimizer.experts.3.gate_up.step            single numbers that an optimizer keeps of a stacked parameter
    extra.0                                     tensors of the caller

Keys do not depend on the placement or the number of ranks. The optimizer's settings, the names it keeps per parameter
and the caller's values are plain values of the manifest. Loading compares and allocates everything before it changes
anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from equilibra.execute.state.checkpoint_files import Manifest, StoredTensor


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

    def keys(self, kept: str = "", *, stacked: bool, experts: NDArray[np.int32] | None = None) -> list[str]:
        """Keys of this tensor, or of its optimizer state `kept`: one per home (or per `experts`), or one for all."""
        before, behind = ("optimizer.", f".{kept}") if kept else ("", "")
        if not stacked or self.homes is None:
            return [f"{before}{self.name}{behind}"]
        layer, _, part = self.name.rpartition(".")
        chosen = self.homes if experts is None else experts
        return [f"{before}{layer}.{expert}.{part}{behind}" for expert in chosen.tolist()]

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
                found.append(Named(name=f"experts.{layer}.{part}", tensor=parameter, homes=weights.experts))
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


# --- load ---


class Loading:
    """Where each tensor of this rank goes. The constructor raises InputError if the checkpoint does not fit."""

    def __init__(self, trained: Trained, manifest: Manifest) -> None:
        self.trained, self.manifest = trained, manifest
        self.tensors: dict[str, Tensor] = {}
        """by key: views of model and optimizer state to fill"""
        self._kept: dict[str, dict[str, Tensor]] = {}
        """by parameter and name: the optimizer's future state"""
        named = trained.named()
        self._check_keys(named)
        for one in named:
            self._want(one, one.tensor, stacked=one.homes is not None)
        for key, stored in manifest.tensors.items():
            if key.startswith("extra."):
                self.tensors[key] = torch.empty(stored.shape, dtype=stored.torch_dtype)
        if trained.optimizer is not None:
            self._check_optimizer()
            for one in named:
                self._want_kept(one)

    @property
    def extra(self) -> dict[str, Any]:
        """The caller's saved values; valid once tensors are filled."""
        found: dict[str, Any] = decoded(self.manifest.values["extra"], self.tensors)
        return found

    def install(self) -> None:
        """Give the optimizer its state and settings, once tensors are filled."""
        optimizer = self.trained.optimizer
        if optimizer is None:
            return
        saved = self.manifest.values["optimizer"]
        for named in self.trained.named():
            optimized = self.trained.optimized(named)
            if named.name not in saved["kept"]:
                optimizer.state.pop(optimized, None)
                continue
            tensors = {name: tensor for name, tensor in self._kept[named.name].items() if name != MASTER}
            plain = decoded(saved["kept"][named.name]["plain"], self.tensors)
            if tensors or plain:
                optimizer.state[optimized] = {**tensors, **plain}
        for group, settings in zip(optimizer.param_groups, saved["groups"], strict=True):
            for name, value in settings.items():
                if name != "params":
                    group[name] = _like(group.get(name), decoded(value, self.tensors))

    # --- the model ---

    def _check_keys(self, named: Iterable[Named]) -> None:
        """Raise InputError unless checkpoint and model have the same parameters and buffers."""
        every = np.arange(self.trained.runtime.spec.num_experts, dtype=np.int32)
        required = {key for one in named for key in one.keys(stacked=True, experts=every)}
        found = {key for key in self.manifest.tensors if key.startswith(("experts.", "dense."))}
        if required != found:
            raise InputError(
                f"the checkpoint is of another model: it has {_summary(found)}, the model {_summary(required)}"
                f"{_some('; missing:', required - found)}{_some('; not in the model:', found - required)}"
            )

    def _want(self, named: Named, tensor: Tensor, kept: str = "", *, stacked: bool) -> None:
        """Register a tensor, or each of its rows, to be filled."""
        rows = tensor.detach().unbind(0) if stacked else [tensor.detach()]
        for key, row in zip(named.keys(kept, stacked=stacked), rows, strict=True):
            stored = self._stored(key)
            if tuple(row.shape) != stored.shape or row.dtype != stored.torch_dtype:
                raise InputError(
                    f"the checkpoint is of another model: {key} is {stored.dtype} {list(stored.shape)} in it, and must "
                    f"be {str(row.dtype).removeprefix('torch.')} {list(row.shape)}"
                )
            self.tensors[key] = row

    def _stored(self, key: str) -> StoredTensor:
        if key not in self.manifest.tensors:
            raise InputError(f"the checkpoint is incomplete: its manifest lists {key}, but no such tensor")
        return self.manifest.tensors[key]

    # --- the optimizer ---

    def _check_optimizer(self) -> None:
        """Raise InputError unless class and parameters of the optimizer are as saved."""
        saved, optimizer = self.manifest.values["optimizer"], self.trained.optimizer
        if saved is None:
            raise InputError("the checkpoint was saved without an optimizer: load it without one")
        if saved["kind"] != type(optimizer).__name__:
            raise InputError(
                f"the checkpoint was saved with {saved['kind']}, the optimizer is {type(optimizer).__name__}: use the "
                "same class, or load without the optimizer"
            )
        found = [sorted(group["params"]) for group in saved["groups"]]
        required = [sorted(group["params"]) for group in self.trained.groups()]
        if found != required:
            differ = {name for names in found for name in names} ^ {name for names in required for name in names}
            raise InputError(
                f"the checkpoint's parameter groups ({len(found)} of {sum(map(len, found))} parameters) are not the "
                f"optimizer's ({len(required)} of {sum(map(len, required))}){_some('; in only one of them:', differ)}"
            )

    def _want_kept(self, named: Named) -> None:
        """Register the optimizer state of a parameter, creating missing tensors."""
        saved = self.manifest.values["optimizer"]["kept"].get(named.name, {"stacked": {}, "plain": {}})
        current = self.trained.kept(named)
        if (MASTER in current) != (MASTER in saved["stacked"]):
            raise InputError(
                f"the checkpoint {'has' if MASTER in saved['stacked'] else 'lacks'} a master of {named.name}, and the "
                f"optimizer {'has one' if MASTER in current else 'has none'}: pass masters as when it was saved"
            )
        self._kept[named.name] = {}
        for name, stacked in saved["stacked"].items():
            tensor = current.get(name)
            if name != MASTER:
                tensor = self._room(named, name, tensor, stacked=stacked)
            assert tensor is not None
            self._kept[named.name][name] = tensor
            self._want(named, tensor, name, stacked=stacked)

    def _room(self, named: Named, name: str, current: object, *, stacked: bool) -> Tensor:
        """The optimizer's tensor, or a new one if it has none that fits."""
        stored = self._stored(named.keys(name, stacked=stacked, experts=np.zeros(1, np.int32))[0])
        shape = (len(named.tensor), *stored.shape) if stacked else stored.shape
        if isinstance(current, Tensor) and tuple(current.shape) == shape and current.dtype == stored.torch_dtype:
            return current
        on_host = name == "step" and not self._counts_on_device(named)
        device = torch.device("cpu") if on_host else named.tensor.device
        return torch.empty(shape, dtype=stored.torch_dtype, device=device)

    def _counts_on_device(self, named: Named) -> bool:
        """Whether `step` is a device tensor, as in capturable and fused optimizers."""
        assert self.trained.optimizer is not None
        optimized = id(self.trained.optimized(named))
        return any(
            bool(group.get("capturable") or group.get("fused"))
            for group in self.trained.optimizer.param_groups
            if any(id(parameter) == optimized for parameter in group["params"])
        )


def _like(current: object, value: Any) -> Any:  # noqa: ANN401
    """A saved setting in the optimizer's own type."""
    if isinstance(current, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(current, Tensor) and isinstance(value, Tensor):
        return current.copy_(value)
    return value


def _summary(keys: set[str]) -> str:
    experts = {tuple(key.split(".")[1:3]) for key in keys if key.startswith("experts.")}
    layers = {layer for layer, _ in experts}
    dense = sum(key.startswith("dense.") for key in keys)
    return f"{len(experts)} experts in {len(layers)} MoE layers and {dense} dense tensors"


def _some(words: str, keys: set[str]) -> str:
    if not keys:
        return ""
    shown = ", ".join(sorted(keys)[:3])
    return f"{words} {shown}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}"
