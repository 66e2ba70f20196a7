"""Weights of this rank's home experts, and the flat form in which experts travel.

Symbols: H homes on this rank, P values of one expert in flat form, D width, F inner width.

Parameters are stacked [H, ...], one per matrix or bias, in the order of logical expert numbers. An expert travels as
one row of P values: its parts in order, each aligned to 16 bytes, so that kernels can read the row in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from equilibra.core.errors import InputError, StaleError
from equilibra.execute.experts import MoESpec
from equilibra.execute.kernels import ExpertGradients, ExpertParts, add_in_order

ALIGNMENT = 8
"""values: 16 bytes of the narrowest dtype"""
SAMPLE = 64
"""values of each part compared to detect changes"""


class FlatLayout:
    """Offsets of an expert's parts in its flat form."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], of_parts: Callable[..., Any] = ExpertParts) -> None:
        """shapes: of one expert's parts by name. of_parts: makes an expert from its parts, given by name."""
        self.shapes, self._of_parts = dict(shapes), of_parts
        self.first: dict[str, int] = {}
        size = 0
        for name, shape in self.shapes.items():
            self.first[name] = size
            size += -(-prod(shape) // ALIGNMENT) * ALIGNMENT
        self.size = size

    def part(self, name: str, rows_nP: Tensor) -> Tensor:
        """[n, ...] view of one part of every row."""
        shape = self.shapes[name]
        return rows_nP[:, self.first[name] : self.first[name] + prod(shape)].view(len(rows_nP), *shape)

    def experts(self, rows_nP: Tensor) -> list[Any]:
        """Every row as an expert, without copying."""
        parts = {name: self.part(name, rows_nP).unbind(0) for name in self.shapes}
        return [self._of_parts(**{name: parts[name][i] for name in parts}) for i in range(len(rows_nP))]


class HomeExperts(Protocol):
    """One layer's home experts on this rank, which copies are made of: ours, or another framework's."""

    @property
    def layout(self) -> FlatLayout: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Dtype of accumulated gradients: float32, or the weights' if it is wider."""

    @property
    def device(self) -> torch.device: ...

    @property
    def learns(self) -> bool:
        """Whether any part is trained; equal on every rank."""

    def memory(self) -> list[Tensor]:
        """The tensors that hold the weights, equally many on every rank."""

    def place(self, slot: int, part: int) -> tuple[int, int]:
        """Tensor of `memory`, and row in it, that hold a part of the expert in a slot."""

    def slot_of(self, expert: int) -> int: ...

    def check_version(self, layer: int) -> None:
        """Raise StaleError if the weights changed since copies were made of them; wait for weights on their way."""

    def write_flat(self, expert: int, row_P: Tensor) -> None:
        """Copy an expert into its flat form."""

    def add_gradient(self, expert: int, *rows_P: Tensor) -> None:
        """Add flat gradients to that of a home expert, in order."""


class ExpertWeights(nn.Module):
    """The parameters of one layer's home experts on this rank."""

    def __init__(
        self, spec: MoESpec, experts: NDArray[np.integer] | Sequence[int], *, device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.spec = spec
        self.layout = FlatLayout(spec.part_shapes())
        self.experts = np.sort(np.asarray(experts, np.int32))
        """[H] logical numbers of the experts at home"""
        for name, shape in self.layout.shapes.items():
            values = torch.empty(self.experts.size, *shape, device=device, dtype=dtype)
            nn.init.normal_(values, std=0.02) if len(shape) > 1 else nn.init.zeros_(values)
            self.register_parameter(name, nn.Parameter(values))
        self._stamp: tuple[float, ...] | None = None
        self._homes: tuple[tuple[object, ...], list[ExpertParts]] | None = None
        self.register_load_state_dict_pre_hook(_check_experts)  # type: ignore[no-untyped-call]

    def get_extra_state(self) -> Tensor:
        """The expert numbers, so that a state_dict of other homes is not loaded."""
        return torch.from_numpy(self.experts.copy())

    def set_extra_state(self, state: Tensor) -> None:
        """`_check_experts` has compared it."""

    @property
    def names(self) -> list[str]:
        return list(self.layout.shapes)

    def parts(self) -> list[nn.Parameter]:
        """The stacked parameters, in the order of the flat form."""
        return [self.get_parameter(name) for name in self.names]

    @property
    def learns(self) -> bool:
        return any(part.requires_grad for part in self.parts())

    @property
    def dtype(self) -> torch.dtype:
        return self.parts()[0].dtype

    @property
    def gradient_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        return self.parts()[0].device

    def memory(self) -> list[Tensor]:
        return [part.detach() for part in self.parts()]

    def place(self, slot: int, part: int) -> tuple[int, int]:
        return part, slot

    def slot_of(self, expert: int) -> int:
        slot = int(np.searchsorted(self.experts, expert))
        if slot >= self.experts.size or self.experts[slot] != expert:
            raise InputError(f"expert {expert} is not at home on this rank, which has {self.experts.tolist()}")
        return slot

    def homes(self, *, keep: bool = False) -> list[ExpertParts]:
        """Views of every home expert.

        keep: cache them until `forget_homes`. Views hold the weights' storage, so a longer cache would outlive weights
        that are offloaded.
        """
        parts = self.parts()
        now = tuple((part.data_ptr(), part.dtype) for part in parts)
        if keep and self._homes is not None and self._homes[0] == now:
            return self._homes[1]
        every = {name: part.detach().unbind(0) for name, part in zip(self.names, parts, strict=True)}
        of_expert = [ExpertParts(**{n: every[n][i] for n in every}) for i in range(self.experts.size)]
        self._homes = (now, of_expert) if keep else None
        return of_expert

    def forget_homes(self) -> None:
        self._homes = None

    def write_flat(self, expert: int, row_P: Tensor) -> None:
        slot, row = self.slot_of(expert), row_P[None]
        with torch.no_grad():
            for name in self.names:
                self.layout.part(name, row)[0].copy_(self.get_parameter(name)[slot])

    @torch.no_grad()
    def add_gradient(self, expert: int, *rows_P: Tensor) -> None:
        slot = self.slot_of(expert)
        for name in self.names:
            gradient = self.gradient_of(name)
            if gradient is not None:
                add_in_order(gradient[slot], [self.layout.part(name, row[None])[0] for row in rows_P])

    def gradient_of(self, name: str, *, empty: bool = False) -> Tensor | None:
        """Stacked gradient of a part, None if it is not trained; created as zeros (or `empty`) if missing."""
        parameter = self.get_parameter(name)
        if not parameter.requires_grad:
            return None
        if parameter.grad is None:
            new = torch.empty_like if empty else torch.zeros_like
            parameter.grad_dtype = self.gradient_dtype  # many micro-batches and copies are summed
            parameter.grad = new(parameter, dtype=self.gradient_dtype)
        return parameter.grad

    @property
    def has_gradients(self) -> bool:
        return any(part.grad is not None for part in self.parts())

    def drop_gradients(self) -> None:
        for part in self.parts():
            part.grad = None

    def home_gradients(self, *, empty: bool = False) -> list[ExpertGradients]:
        """Views of the home experts' gradients, created as zeros (or `empty`) if missing."""
        every = {name: self.gradient_of(name, empty=empty) for name in self.names}
        rows = {name: gradient.unbind(0) for name, gradient in every.items() if gradient is not None}
        return [ExpertGradients(**{name: rows[name][i] for name in rows}) for i in range(self.experts.size)]

    # Stale copies must be impossible, so we compare torch's count of in-place changes. It misses fused optimizers and
    # `.data`; on the host, a sample of the weights is compared too.
    def note_version(self) -> None:
        """Remember the current weights as the version to copy."""
        self._stamp = tuple(self._versions())

    def check_version(self, layer: int) -> None:
        if self._stamp is not None and self._stamp != tuple(self._versions()):
            raise StaleError(
                f"the experts of MoE layer {layer} have changed since their copies were made: call "
                "Balancer.weights_changed() on every rank after whatever changes weights (an attached optimizer does)"
            )

    def _versions(self) -> Iterator[float]:
        for parameter in self.parts():
            yield parameter._version  # noqa: SLF001 - torch's own count of in-place changes
            yield parameter.data_ptr()
            if parameter.device.type == "cpu":
                values = parameter.detach().view(-1)
                yield float(values[:: max(values.numel() // SAMPLE, 1)].sum(dtype=torch.float64))


def _check_experts(weights: ExpertWeights, state: dict[str, Any], prefix: str, *_more: object) -> None:
    """Hook before load_state_dict: the experts must be those at home here."""
    found = state.get(f"{prefix}_extra_state")
    if found is not None and found.tolist() != weights.experts.tolist():
        raise InputError(
            f"the state_dict holds experts {found.tolist()}, this rank is home of {weights.experts.tolist()}: homes "
            "have moved since; use equilibra's checkpoints, which store experts by number"
        )


WRAPPERS = (DataParallel, DistributedDataParallel, FullyShardedDataParallel)


@cache
def refuse_wrappers() -> None:
    """Make it an error to wrap experts in DataParallel, DistributedDataParallel or FSDP1.

    They treat every parameter as replicated: DDP broadcasts rank 0's parameters, FSDP1 shards them as if equal. No
    collective would fail, so building the wrapper must.
    """
    register_module_module_registration_hook(_refuse)


def _refuse(parent: nn.Module, _name: str, child: nn.Module | None) -> None:
    if isinstance(parent, WRAPPERS) and child is not None:
        if not any(isinstance(part, ExpertWeights) for part in child.modules()):
            return
        raise InputError(
            f"{type(parent).__name__} takes the experts of every rank for copies of the same parameters: it would "
            "overwrite them with rank 0's and mix the gradients of different experts. Leave the model unwrapped and "
            "call balancer.finish_gradients(model), which sums dense gradients over all ranks; to shard dense "
            "parameters use fully_shard (FSDP2), see docs/runtime.md"
        )
