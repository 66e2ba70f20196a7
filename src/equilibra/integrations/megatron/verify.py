"""Runs a model's forward and backward with and without balancing, and says how far the numbers differ.

    differences = verify(balancer, model, routing, lambda: forward_backward_func(...))     # on all ranks, after balance

The unbalanced pass runs as plain Megatron does: no copies, and homes where Megatron puts them. Both passes replay the
same routing, with no optimizer step between them. Afterwards gradients are those of the balanced pass.

It compares what the function returns and the gradients of all parameters, in `main_grad` or `grad`, reduced or not.
Gradients of the first pass wait in host memory. Those of experts that move follow their homes, and must be reduced when
the function returns, as Megatron's schedules do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equilibra.core.errors import InputError
from equilibra.core.plan import Stage
from equilibra.execute.group import Channel
from equilibra.integrations import differences
from equilibra.integrations.differences import Difference, apart, largest
from equilibra.integrations.executor.balancer import Routing
from equilibra.integrations.megatron.balancer import Balancer
from equilibra.integrations.megatron.homes import StateOfParameters, exchange
from equilibra.integrations.megatron.visits import MegatronVisits
from equilibra.integrations.planned import HomeMove, HomeSlots
from equilibra.rl.mismatch import unit_roundoff

RANDOM = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")
"""options that make two passes differ"""


def verify(
    balancer: Balancer, model: nn.Module | Sequence[nn.Module], routing: Routing,
    forward_backward: Callable[[], Any], *, say: Callable[[str], None] = print,
) -> list[Difference]:  # fmt: skip
    """Collective over the world: compare the passes, print the table on rank 0, raise if rounding does not explain it.

    routing: as `begin` takes it, of the micro-batches that the function runs. forward_backward: runs them and replays
    their routing; returns losses and outputs, of which tensors and numbers are compared, however nested.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0

    def under_plan() -> Any:  # noqa: ANN401
        step = balancer.begin(routing)
        if is_first:
            say(
                f"slowest rank {step.static_imbalance:.3f} times the mean, {step.planned_imbalance:.3f} under the plan "
                f"with {step.plan.stages[Stage.UPDATE].num_copies + step.plan.standing.num_copies} copies and "
                f"{step.plan.migration.num_moves} moved homes"
            )
        return forward_backward()

    _, found = compare(balancer, model, forward_backward, under_plan)
    if is_first:
        say(differences.table(found))
    differences.check(found)
    return found


def compare(
    balancer: Balancer, model: nn.Module | Sequence[nn.Module], plain: Callable[[], Any], balanced: Callable[[], Any],
    outputs_of: Callable[[Any], Any] = lambda returned: returned,
) -> tuple[Any, list[Difference]]:  # fmt: skip
    """Collective over the world: what the balanced pass returned, and how far it is from the plain one on all ranks.

    outputs_of: what to compare of what a pass returned.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    config = chunks[0].config
    _check(balancer, config)
    buffers = [(buffer, buffer.clone()) for chunk in chunks for _, buffer in chunk.named_buffers()]
    balancer.restore_homes()
    balancer.end()
    at_home = balancer.slots
    _clear(chunks)
    wanted = dict(_values(outputs_of(plain()), "output"))
    gradients = _gradients(chunks)
    for buffer, before in buffers:
        buffer.copy_(before)
    _clear(chunks)
    returned = balanced()
    balancer.end()
    outputs = dict(_values(outputs_of(returned), "output"))
    found = _gradients_apart(balancer, chunks, gradients, at_home)
    roundoff = max(unit_roundoff(p.dtype, p.device.type) for chunk in chunks for p in chunk.parameters())
    limit = differences.gradient_limit(roundoff, num_layers=config.num_layers)  # type: ignore[union-attr, arg-type]
    own = [largest("losses and outputs", _outputs_apart(wanted, outputs), limit)]
    own += [largest(f"gradients of {kind}", by_name, limit) for kind, by_name in found.items()]
    return returned, differences.of_all_ranks(own)


def _check(balancer: Balancer, config: Any) -> None:  # noqa: ANN401 - Megatron's TransformerConfig
    mode = balancer.setting.mode
    if mode != "replay":
        raise InputError(
            f"cannot verify with mode={mode!r}: routers choose anew in every pass, and rounding may change a choice; "
            "verify with recorded routing and mode='replay'"
        )
    for name in RANDOM:
        if getattr(config, name, None):
            raise InputError(
                f"cannot verify with {name}={getattr(config, name)}: both passes must draw the same; use 0"
            )


def _clear(chunks: Sequence[nn.Module]) -> None:
    for chunk in chunks:
        if hasattr(chunk, "zero_grad_buffer"):
            chunk.zero_grad_buffer()  # type: ignore[operator]
        for parameter in chunk.parameters():
            parameter.grad = None


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    found: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if found is None else found


Gradients = Mapping[nn.Parameter, Tensor]


def _gradients(chunks: Sequence[nn.Module]) -> Gradients:
    """Gradients in host memory, of the parameters that have one."""
    of_parameter = {p: _gradient(p) for chunk in chunks for p in chunk.parameters()}
    return {p: value.detach().to("cpu", copy=True) for p, value in of_parameter.items() if value is not None}


def _pair(plain: Gradients, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
    """Gradients of both passes on the device; zeros where there is none."""
    one, other = plain.get(parameter), _gradient(parameter)
    zeros = torch.zeros_like(parameter) if one is None or other is None else parameter
    return (zeros if one is None else one.to(parameter.device)), (zeros if other is None else other.detach())


@torch.no_grad()
def _gradients_apart(
    balancer: Balancer, chunks: Sequence[nn.Module], plain: Gradients, at_home: HomeSlots
) -> dict[str, dict[str, float]]:
    """Differences by kind and name. at_home: where experts were in the plain pass."""
    found: dict[str, dict[str, float]] = {"experts": {}, "routers": {}, "other weights": {}}
    names = {p: name.replace("module.", "") for chunk in chunks for name, p in chunk.named_parameters()}
    for visits in balancer.layers:
        moves = at_home.moves_to(balancer.slots, visits.layer)
        prefix = names[next(iter(visits.homes.parts[0].values()))].partition("experts.")[0]
        for expert, part, value in _experts_apart(visits, plain, moves, balancer.state):
            found["experts"][f"{prefix}experts.{expert}.{part}"] = value
        for parameter in visits.homes.parameters():
            del names[parameter]
    for parameter, name in names.items():
        one, other = _pair(plain, parameter)
        found["routers" if ".router." in f".{name}" else "other weights"][name] = apart([one], [other])[0]
    return found


def _experts_apart(
    visits: MegatronVisits, plain: Gradients, moves: list[HomeMove], state: StateOfParameters | None
) -> Iterator[tuple[int, str, float]]:
    """Expert, part and difference, of the experts that are at home on this rank now."""
    homes = visits.homes
    for part, like in homes.parts[0].items():
        pairs = {slot[part]: _pair(plain, slot[part]) for slot in homes.parts}
        if moves and state is not None:
            pairs = {p: (_reduced(p, a, state, visits), _reduced(p, b, state, visits)) for p, (a, b) in pairs.items()}
        there = {parameter: one for parameter, (one, _) in pairs.items()}
        found = [other for _, other in pairs.values()]
        width = torch.empty(0, like.numel(), dtype=torch.float32, device=like.device)
        pack = partial(_flat, there)
        for parameter, row in exchange(visits, moves, part, pack, width) if moves else ():
            there[parameter] = row.view_as(parameter)
        for expert, value in zip(homes.expert_of_home, apart(there.values(), found), strict=True):
            yield expert, part, value


def _reduced(parameter: nn.Parameter, gradient: Tensor, state: StateOfParameters, visits: MegatronVisits) -> Tensor:
    """Collective: the whole gradient. Every replica has reduced its own part of the slot, cut where the slot lies."""
    whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if (held := state.pieces(parameter)) is not None:
        whole[held[0]] = gradient.reshape(-1)[held[0]].float()
    visits.group.sum(Channel.REPLICAS, whole, what="gathering gradients").wait()
    return whole.view_as(parameter)


def _flat(gradients: Gradients, parameter: nn.Parameter) -> Tensor:
    return gradients[parameter].float().view(-1)


def _values(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401
    """Tensors and numbers in what a pass returned, in float64 and host memory, by where they are."""
    if isinstance(value, Tensor):
        yield name, (value.values() if value.is_nested else value).detach().to("cpu", torch.float64, copy=True)
    elif isinstance(value, (int, float)):
        yield name, torch.tensor(float(value), dtype=torch.float64)
    elif isinstance(value, (Mapping, list, tuple)):
        for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _values(one, f"{name}[{key!r}]")


def _outputs_apart(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, float]:
    """Differences by name: of a number relative to it or to 1, as a loss may be 0 by cancellation."""
    result = dict.fromkeys(sorted(wanted.keys() ^ found.keys()), float("inf"))
    for name in wanted.keys() & found.keys():
        one, other = wanted[name], found[name]
        if one.shape != other.shape:
            result[name] = float("inf")
        elif one.numel() == 1:
            result[name] = float((other - one).abs()) / max(1.0, float(one.abs()))
        else:
            result[name] = apart([one], [other])[0]
    return result
