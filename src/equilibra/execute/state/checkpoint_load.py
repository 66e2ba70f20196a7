"""Load a checkpoint into a model: compare everything, allocate, and only then fill and install."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equilibra.core.errors import InputError
from equilibra.execute.state.checkpoint_files import Manifest, StoredTensor
from equilibra.execute.state.checkpoint_state import MASTER, Named, Trained, decoded

__all__ = ["Loading"]


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
        """The checkpoint must have what the model has, no less and no more."""
        every = np.arange(self.trained.runtime.spec.num_experts, dtype=np.int32)
        required = {key for one in named for key in one.keys(stacked=True, experts=every)}
        found = {key for key in self.manifest.tensors if key.startswith(("experts.", "dense."))}
        if required != found:
            raise InputError(
                f"the checkpoint is of another model: it has {_summary(found)}, and the model {_summary(required)}"
                f"{_some('; missing are', required - found)}{_some('; of no use are', found - required)}"
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
                f"the checkpoint is of {saved['kind']}, and the optimizer is {type(optimizer).__name__}: use the same, "
                "or load without the optimizer"
            )
        found = [sorted(group["params"]) for group in saved["groups"]]
        required = [sorted(group["params"]) for group in self.trained.groups()]
        if found != required:
            differ = {name for names in found for name in names} ^ {name for names in required for name in names}
            raise InputError(
                f"the checkpoint has {len(found)} groups of {sum(map(len, found))} parameters, and the optimizer "
                f"{len(required)} of {sum(map(len, required))}, or others{_some(': only one of them has', differ)}"
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
    """A setting in the form the optimizer has."""
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
