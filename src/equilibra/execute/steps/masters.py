"""Masters: float32 copies of low-precision weights, for the optimizer to work on.

    masters = float32_masters(model)
    optimizer = torch.optim.AdamW(masters_or_parameters(model, masters))
    balancer = Balancer(runtime, setting, optimizer=optimizer, masters=masters)

Gradients of a parameter with a master are accumulated in float32. `Balancer.finish_gradients` hands them to the
masters, where the optimizer, clipping and a GradScaler find them; after an optimizer's step the balancer writes
the weights. Masters and their moments move with homes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equilibra.core.errors import ExecuteError, InputError
from equilibra.execute.group import Channel
from equilibra.execute.runtime import Runtime

LOW = (torch.bfloat16, torch.float16)

Masters = dict[nn.Parameter, nn.Parameter]
SUMMED = "equilibra_summed"
"""attribute that marks a gradient tensor as summed over ranks; it disappears with the tensor"""


class Attached:
    """The optimizers a balancer is attached to, their masters, and whether summed gradients still wait for a step.

    A gradient is summed over ranks once, then waits at its parameter or master until that optimizer steps, or until
    `zero_grad` drops it because the step was skipped.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], masters: Masters, runtime: Runtime) -> None:
        self.optimizers, self.masters, self.runtime = list(optimizers), masters, runtime
        held = {id(parameter) for one in self.optimizers for parameter in _held(one)}
        _check_experts(runtime, held, masters)
        _check_masters(masters, held)
        accumulate_in_masters_type(masters)
        runtime.masters = masters
        self._handed: set[nn.Parameter] = set()
        """parameters whose masters have the summed gradient"""
        self._waiting: list[torch.optim.Optimizer] = []
        """optimizers that have not stepped on the summed gradients yet"""
        self._summed = False

    def holds_experts(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimizer's step changes experts."""
        parts = {id(self.masters.get(part, part)) for weights in self.runtime.weights for part in weights.parts()}
        return any(id(parameter) in parts for parameter in _held(optimizer))

    def _masters_of(self, optimizer: torch.optim.Optimizer) -> Masters:
        held = {id(parameter) for parameter in _held(optimizer)}
        return {parameter: master for parameter, master in self.masters.items() if id(master) in held}

    @property
    def summed(self) -> bool:
        """Whether gradients summed over ranks wait for a step."""
        if not self._summed or not self.optimizers:
            return self._summed
        gradients = [parameter.grad for one in self._waiting for parameter in _held(one)]
        return any(getattr(gradient, SUMMED, False) for gradient in gradients)

    def gradients_are_summed(self, *, dense: bool) -> None:
        """Hand the summed gradients to the masters (`dense`: also those of dense parameters) for the optimizers."""
        experts = {part for weights in self.runtime.weights for part in weights.parts()}
        ready = {p: master for p, master in self.masters.items() if dense or p in experts}
        hand_over_gradients(ready)
        self._handed, self._waiting, self._summed = set(ready), list(self.optimizers), True
        for one in self.optimizers:
            for parameter in _held(one):
                if parameter.grad is not None:
                    setattr(parameter.grad, SUMMED, True)

    def forget(self) -> None:
        """Gradients no longer wait: weights are new, or the gradients were dropped."""
        self._handed, self._waiting, self._summed = set(), [], False

    def discard(self) -> None:
        for master in self.masters.values():
            master.grad = None
        self.forget()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Hand over gradients that masters do not have yet."""
        own = self._masters_of(optimizer)
        late = [parameter for parameter in own if parameter in self._handed and parameter.grad is not None]
        if late:
            raise ExecuteError(
                f"a backward pass ran after finish_gradients(): {len(late)} parameters have gradients that were not "
                "summed over ranks; call finish_gradients() once, after the last backward pass and before "
                "optimizer.step()"
            )
        hand_over_gradients({p: master for p, master in own.items() if p not in self._handed})

    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Round the masters that this optimizer changed into their weights."""
        own = self._masters_of(optimizer)
        for parameter, master in own.items():
            parameter.copy_(master)
        self._handed -= set(own)
        self._waiting = [one for one in self._waiting if one is not optimizer]
        self._summed = self._summed and bool(self._waiting)

    @torch.no_grad()
    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        """Collective: unscale gradients. An infinity on any rank makes every rank skip every optimizer."""
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
    alone = [parameter for parameter, master in masters.items() if id(master) not in held]
    if alone:
        raise InputError(
            f"no attached optimizer holds the masters of {len(alone)} parameters (the first has shape "
            f"{tuple(alone[0].shape)}), so they would never be trained; pass all optimizers to Balancer, or leave "
            "these masters out"
        )


def _check_experts(runtime: Runtime, held: set[int], masters: Masters) -> None:
    """Every trained expert must be held by an optimizer, in float32: its state moves with the home."""
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


def float32_masters(module: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """A float32 copy of every trainable low-precision parameter."""
    return {
        parameter: nn.Parameter(parameter.detach().float())
        for parameter in module.parameters()
        if parameter.requires_grad and parameter.dtype in LOW
    }


def masters_or_parameters(module: nn.Module, masters: Mapping[nn.Parameter, nn.Parameter]) -> list[nn.Parameter]:
    """Parameters for the optimizer: each parameter's master, or the parameter itself."""
    return [masters.get(parameter, parameter) for parameter in module.parameters() if parameter.requires_grad]


def accumulate_in_masters_type(masters: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Let autograd accumulate gradients in the masters' dtype, because many micro-batches are summed."""
    for parameter, master in masters.items():
        if parameter.is_leaf and parameter.grad_dtype != master.dtype:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = master.dtype
            parameter.grad = None if gradient is None else gradient.to(master.dtype)


@torch.no_grad()
def hand_over_gradients(masters: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Move gradients from parameters to their masters; no copy where the dtype is the same."""
    for parameter, master in masters.items():
        master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        parameter.grad = None
