"""Rows that enter this rank's experts, counted where Megatron's experts are called, outside Equilibra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules import module as every_module


@contextmanager
def counted(chunks: list[Any]) -> Iterator[tuple[list[int], list[int]]]:
    """For every forward of an MoE layer: rows in all experts of this rank, and in those that are not of the model."""
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.moe.moe_layer import MoELayer

    rows, of_copies = list[int](), list[int]()
    homes = {id(module) for chunk in chunks for module in chunk.modules()}

    def before(module: Any, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, MoELayer):
            rows.append(0)
            of_copies.append(0)
        elif isinstance(module, MLP):
            rows[-1] += len(inputs[0])
            of_copies[-1] += len(inputs[0]) * (id(module) not in homes)

    hook = every_module.register_module_forward_pre_hook(before)
    try:
        yield rows, of_copies
    finally:
        hook.remove()
