"""What of verl numbers experts by rank, while homes are elsewhere.

    get_per_tensor_param, ..._shard         weights for rollouts: while they are read, ranks lend each other experts
    checkpoint_mananager.save_checkpoint    homes go back until all is written, optimizer state included
    checkpoint_mananager.load_checkpoint    homes go back before, and stay until a step moves them
    copy_megatron_model_to_cpu              refused: verl puts such copies back by rank, when homes may be others

Homes move only in passes, and passes and these calls do not overlap. All ranks make all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import wraps
from typing import Any

from equilibra.core.errors import InputError
from equilibra.integrations.megatron import Balancer

__all__ = ["number_logically"]

COPIES = "verl.utils.megatron_utils"
"""the module with verl's copies of models in host memory"""


def number_logically(engine: Any, balancer: Balancer, option: str) -> None:  # noqa: ANN401 - verl's MegatronEngine
    """Have an engine export, save and load experts by their numbers. option: the one by which homes stay."""
    for name in ("get_per_tensor_param", "get_per_tensor_param_shard"):
        setattr(engine, name, _lent(getattr(engine, name), balancer))
    manager = engine.checkpoint_mananager
    manager.save_checkpoint = _restored(manager.save_checkpoint, balancer)
    manager.load_checkpoint = _after_restoring(manager.load_checkpoint, balancer)
    copies: Any = importlib.import_module(COPIES)
    copies.copy_megatron_model_to_cpu = _refused(copies.copy_megatron_model_to_cpu, engine, option)


def _lent(export: Any, balancer: Balancer) -> Any:  # noqa: ANN401
    """Exporters are generators that gather each weight when it is asked for."""

    def in_order(tensors: Iterator[Any]) -> Iterator[Any]:
        with balancer.logical_weights():
            yield from tensors

    @wraps(export)
    def then_lend(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        tensors, others = export(*arguments, **options)
        return in_order(tensors), others

    return then_lend


def _restored(save: Any, balancer: Balancer) -> Any:  # noqa: ANN401
    @wraps(save)
    def restored(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        with balancer.homes_restored():
            return save(*arguments, **options)

    return restored


def _after_restoring(load: Any, balancer: Balancer) -> Any:  # noqa: ANN401
    @wraps(load)
    def restored(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        balancer.restore_homes()
        return load(*arguments, **options)

    return restored


def _refused(copy: Any, engine: Any, option: str) -> Any:  # noqa: ANN401
    @wraps(copy)
    def unless_balanced(models: Any) -> Any:  # noqa: ANN401
        if models is engine.module:
            raise InputError(
                "cannot keep copies of the actor's weights (save_model_to_cpu, of verl's asynchronous trainers) while "
                f"homes move: they would return to other experts; set {option}=0"
            )
        return copy(models)

    return unless_balanced
