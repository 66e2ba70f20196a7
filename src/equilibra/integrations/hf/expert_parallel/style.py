"""transformers' style of expert parallelism with slots in place of experts.

`EpDispatchExpertsParallel` sends each pair of a token and an expert to the rank that has the expert, runs the experts
there, and combines. Here ranks have slots: homes, then copies. Everything else is transformers' own code, and without a
plan nothing is different.

The style must be registered under transformers' own name, for which its FSDP looks, before a model is loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.distributed.expert_parallel import EpDispatchExpertsParallel
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from equilibra.core.errors import InputError
from equilibra.integrations.hf.expert_parallel.visits import TransformersVisits, to_slots

__all__ = ["NAME", "PlannedExpertsParallel", "register_expert_parallel", "style_of"]

NAME = "ep_dispatch_experts"
OVERRIDDEN = {
    "install_forward": ("self", "module", "ep_mesh", "tp_mesh"),
    "_dispatch_tokens": ("self", "hidden_states", "top_k_index", "num_local_experts", "ep_group", "ep_size"),
    "_run_local_experts": ("self", "experts_forward", "tokens", "expert_ids"),
}
"""what transformers must have for this style to be asked: a method of another name would be left out without a word"""


class PlannedExpertsParallel(EpDispatchExpertsParallel):
    """The style of one module; the registered one makes one of its own for every module."""

    def __init__(self) -> None:
        self.visits: TransformersVisits | None = None
        """the module's layer, once it is planned"""

    def install_forward(self, module: nn.Module, ep_mesh: Any, *, tp_mesh: Any = None) -> nn.Module:  # noqa: ANN401
        """Replace the module's forward by transformers', which asks the module's own style."""
        style = PlannedExpertsParallel()
        module.expert_parallel_style = style  # type: ignore[assignment]
        super(PlannedExpertsParallel, style).install_forward(module, ep_mesh, tp_mesh=tp_mesh)  # type: ignore[no-untyped-call]
        return module

    def _dispatch_tokens(
        self, hidden_TD: Tensor, experts_TK: Tensor, num_local: int, ep_group: Any, ep_size: int  # noqa: ANN401
    ) -> Any:  # noqa: ANN401  # fmt: skip
        visits = self.visits
        if visits is not None and visits.current is not None:
            experts_TK, num_local = to_slots(experts_TK, visits.current), visits.num_slots
        return super()._dispatch_tokens(hidden_TD, experts_TK, num_local, ep_group, ep_size)

    def _run_local_experts(
        self, experts_forward: Callable[..., Tensor], rows_ND: Tensor, slot_of_row: Tensor
    ) -> Tensor:
        run = partial(super()._run_local_experts, experts_forward)
        if self.visits is None or self.visits.current is None:
            return run(rows_ND, slot_of_row)
        return self.visits.run(run, rows_ND, slot_of_row)


def register_expert_parallel() -> None:
    """Models that are loaded from now on with `DistributedConfig(ep_size=...)` can be planned."""
    for name, expected in OVERRIDDEN.items():
        method = getattr(EpDispatchExpertsParallel, name, None)
        found = None if method is None else tuple(inspect.signature(method).parameters)
        if found != expected:
            raise InputError(
                f"cannot plan expert parallelism of transformers {transformers.__version__}: its {name} takes {found}, "
                f"{expected} are known; use 5.22.2"
            )
    ALL_PARALLEL_STYLES.register(NAME, PlannedExpertsParallel())  # type: ignore[arg-type]  # annotated for functions


def style_of(experts: nn.Module) -> PlannedExpertsParallel | None:
    """The module's own style, if it was loaded with this one."""
    found = getattr(experts, "expert_parallel_style", None)
    return found if isinstance(found, PlannedExpertsParallel) else None
