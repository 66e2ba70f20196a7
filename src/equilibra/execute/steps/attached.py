"""The optimizers that a balancer is attached to: which masters each holds, and whose step the summed gradients await.

A gradient is summed over ranks once. From then on it waits, at its parameter or its master, for the step of the
optimizer that holds it; a step that is skipped ends the wait too, when the optimizer's `zero_grad` throws it away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equilibra.core.errors import ExecuteError, InputError
from equilibra.execute.group import Channel
from equilibra.execute.runtime import Runtime
from equilibra.execute.steps.masters import LOW, accumulate_in_masters_type, hand_over_gradients, write_weights

__all__ = ["Attached"]

Masters = dict[nn.Parameter, nn.Parameter]
SUMMED = "equilibra_summed"
"""attribute of gradients that are summed over ranks: it is lost with the tensor"""


class Attached:
    """Optimizers, and the masters they work on."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], masters: Masters, runtime: Runtime) -> None:
        self.optimizers, self.masters, self.runtime = list(optimizers), masters, runtime
        held = [{id(parameter) for parameter in _held(one)} for one in self.optimizers]
        _check_experts(runtime, set().union(*held), masters)
        self._masters_of = {
            id(one): {p: master for p, master in masters.items() if id(master) in ids}
            for one, ids in zip(self.optimizers, held, strict=True)
        }
        _check_masters(masters, set().union(*held))
        accumulate_in_masters_type(masters)
        runtime.masters = masters
        parts = {id(masters.get(part, part)) for weights in runtime.weights for part in weights.parts()}
        self._experts_of = {id(one): bool(parts & ids) for one, ids in zip(self.optimizers, held, strict=True)}
        self._handed: set[nn.Parameter] = set()
        """parameters whose masters have the summed gradient"""
        self._waiting: list[torch.optim.Optimizer] = []
        """whose step summed gradients wait for"""
        self._summed = False

    def holds_experts(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step of it changes experts."""
        return self._experts_of[id(optimizer)]

    @property
    def summed(self) -> bool:
        """Whether gradients that are summed over ranks wait for a step."""
        if not self._summed or not self.optimizers:
            return self._summed
        gradients = [parameter.grad for one in self._waiting for parameter in _held(one)]
        return any(getattr(gradient, SUMMED, False) for gradient in gradients)

    def gradients_are_summed(self, *, dense: bool) -> None:
        """Hand the sums to the masters, dense ones too if they are summed; from now on they wait for the optimizers."""
        experts = {part for weights in self.runtime.weights for part in weights.parts()}
        ready = {p: master for p, master in self.masters.items() if dense or p in experts}
        hand_over_gradients(ready)
        self._handed, self._waiting, self._summed = set(ready), list(self.optimizers), True
        for one in self.optimizers:
            for parameter in _held(one):
                if parameter.grad is not None:
                    setattr(parameter.grad, SUMMED, True)

    def forget(self) -> None:
        """Nothing waits: weights are new, or gradients were thrown away."""
        self._handed, self._waiting, self._summed = set(), [], False

    def discard(self) -> None:
        """Throw away the gradients that masters have."""
        for master in self.masters.values():
            master.grad = None
        self.forget()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Masters get the gradients that they do not have yet."""
        own = self._masters_of[id(optimizer)]
        late = [parameter for parameter in own if parameter in self._handed and parameter.grad is not None]
        if late:
            raise ExecuteError(
                f"a backward pass ran after finish_gradients(): {len(late)} parameters have gradients that are in no "
                "sum; call finish_gradients() once, after the last backward pass before optimizer.step()"
            )
        hand_over_gradients({p: master for p, master in own.items() if p not in self._handed})

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Write the weights whose masters this optimizer has changed."""
        own = self._masters_of[id(optimizer)]
        write_weights(own)
        self._handed -= set(own)
        self._waiting = [one for one in self._waiting if one is not optimizer]
        self._summed = self._summed and bool(self._waiting)

    @torch.no_grad()
    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        """Collective: divide gradients by the scale. An infinity on any rank makes all ranks skip all optimizers."""
        found: list[Tensor] = []
        for one in self.optimizers:
            scaler.unscale_(one)
            found += scaler._found_inf_per_device(one).values()  # noqa: SLF001 - where torch keeps it for subclasses
        total = torch.zeros(1, device=self.runtime.weights[0].device)
        for flag in found:
            total += flag.to(total.device).view(1)
        self.runtime.group.sum(Channel.DENSE, total, what="looking for infinities in scaled gradients").wait()
        for flag in found:
            flag.copy_(total.view_as(flag))


def _held(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _check_masters(masters: Masters, held: set[int]) -> None:
    """A master that no optimizer holds would never learn, and its parameter neither."""
    alone = [parameter for parameter, master in masters.items() if id(master) not in held]
    if alone:
        raise InputError(
            f"no attached optimizer holds the masters of {len(alone)} parameters, the first of shape "
            f"{tuple(alone[0].shape)}: they would never be trained; pass all optimizers to Balancer, or leave these "
            "masters out"
        )


def _check_experts(runtime: Runtime, held: set[int], masters: Masters) -> None:
    """The optimizers must hold every expert that learns, in enough precision: their state moves with homes."""
    for layer, weights in enumerate(runtime.weights if held else []):
        for name in weights.names:
            part = weights.get_parameter(name)
            if not part.requires_grad:
                continue
            if id(masters.get(part, part)) not in held:
                raise InputError(
                    f"no attached optimizer holds {name} of MoE layer {layer}: pass all optimizers that train experts, "
                    "and masters where they work on copies"
                )
            if part not in masters and part.dtype in LOW:
                raise InputError(
                    f"{name} of MoE layer {layer} is {part.dtype} and its gradient float32: give the optimizer float32 "
                    "masters (equilibra.execute.steps.masters.float32_masters) and pass them to Balancer"
                )
