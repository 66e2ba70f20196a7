"""Runs transformers' own expert parallelism, `DistributedConfig(ep_size=...)`, under plans; for transformers 5.22.

    register_expert_parallel()                                          # before the model is loaded
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(fsdp_size=8, ep_size=4))
    balancer = plan_expert_parallel(model, ParallelSetting(spare_slots=2))      # on all ranks, once

    step = balancer.begin(routing)      # collective: counts and plan; routing is [M][L] ids [T, K] of this rank
    ...                                 # forward and backward of the micro-batches in the same order, as before
    balancer.end()                      # unplanned passes (evaluation) may follow

transformers' `EpDispatchExpertsParallel` sends each (token, expert) pair to the expert's rank, runs the experts there
and combines. `PlannedExpertsParallel` replaces experts by slots: homes, then copies. Without a plan nothing differs. It
is registered under transformers' own name for the style, which its FSDP looks up.

FSDP owns the parameters, as DTensors sharded where transformers put them, and gathers them around each pass. So homes
do not move, and checkpoints, optimizers and `save_pretrained` are unaffected. Copies are made and kept inside autograd,
not by the runtime's engines. Rows pass through `carry`'s autograd function: every rank joins the exchange of gradients,
even with no copy of its own, before it sends gradients of rows. A copy travels as one line per part; its gradients are
summed in the order of the holding ranks and added to those of the stacked parameter, which FSDP reduces.

Symbols: T tokens of this rank, K experts per token, N rows that this rank computes, H homes, C copies that it holds. A
part is a stacked parameter [H, ...] of a layer's homes. `equilibra.integrations.hf` does not import this module, since
older transformers lack this parallelism.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.distributed.expert_parallel import EpDispatchExpertsParallel
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from equilibra.core.errors import InputError
from equilibra.core.model import MoEModel
from equilibra.core.visit import CopyList, Stage
from equilibra.execute.group import Channel, ExpertGroup, device_name
from equilibra.integrations.executor.balancer import LayerVisits, Routing, Step, VisitBalancer, routed_live, stage_group
from equilibra.integrations.hf.families import family_of, moe_layers
from equilibra.integrations.hf.sharded_experts import route_recorded
from equilibra.integrations.planned import PlanSetting, SlotCounts, SlotTable, cluster_of

ParallelSetting = PlanSetting
NAME = "ep_dispatch_experts"
OVERRIDDEN = {
    "install_forward": ("self", "module", "ep_mesh", "tp_mesh"),
    "_dispatch_tokens": ("self", "hidden_states", "top_k_index", "num_local_experts", "ep_group", "ep_size"),
    "_run_local_experts": ("self", "experts_forward", "tokens", "expert_ids"),
}
"""signatures that transformers must have: if it renamed a method, ours would silently never be called"""
Run = Callable[[Tensor, Tensor], Tensor]
"""results of rows, given rows and the slot of each among the module's weights"""


def exchange(group: ExpertGroup, copies: CopyList, parts: Sequence[Tensor], *, home: bool) -> list[Tensor]:
    """Collective: exchange lines [lines, ...] of all parts; weights go to the holders, gradients home."""
    channel = Channel.GRADIENTS if home else Channel.COPIES
    sizes, received_sizes = copies.served_sizes, copies.held_sizes
    if home:
        sizes, received_sizes = received_sizes, sizes
    what = f"{'returning gradients of' if home else 'fetching'} copies of MoE layer {copies.layer}"
    received = [part.new_empty(sum(received_sizes), *part.shape[1:]) for part in parts]
    pending = [
        group.all_to_all(channel, sent.contiguous(), sizes, into, received_sizes, what=what)
        for sent, into in zip(parts, received, strict=True)
    ]
    for one in pending:
        one.wait()
    return received


def carry(
    group: ExpertGroup, copies: CopyList, rows_ND: Tensor, parts: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Rows unchanged, and each part of the copies held here, [C, ...] in the order of slots."""
    rows_ND, *held = _Carry.apply(group, copies, rows_ND, *parts)  # type: ignore[no-untyped-call]
    return rows_ND, held


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ExpertGroup, copies: CopyList, rows_ND: Tensor, *parts: Tensor) -> Any:  # noqa: ANN401
        ctx.group, ctx.copies = group, copies
        ctx.served = (copies.served_expert - group.rank * len(parts[0])).tolist()  # homes are in order and never move
        ctx.homes = [(part.shape, part.dtype) for part in parts]
        served = torch.tensor(ctx.served, dtype=torch.long, device=rows_ND.device)
        sent = [part.detach().index_select(0, served) for part in parts]
        return rows_ND.view_as(rows_ND), *exchange(group, copies, sent, home=False)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, *grads: Tensor) -> Any:  # noqa: ANN401
        if not any(ctx.needs_input_grad[3:]):  # experts are frozen, on every rank alike
            return None, None, grad_rows, *(None for _ in grads)
        received = exchange(ctx.group, ctx.copies, grads, home=True)
        home = [
            _stacked(lines, shape, dtype, ctx.served) for lines, (shape, dtype) in zip(received, ctx.homes, strict=True)
        ]
        return None, None, grad_rows, *home


def _stacked(lines: Tensor, shape: torch.Size, dtype: torch.dtype, served: list[int]) -> Tensor | None:
    """Sums over the lines of each home's copies, as a gradient of all homes; None if no home was copied.

    served: the home slot of each line.
    """
    if not served:
        return None
    wide = torch.promote_types(lines.dtype, torch.float32)
    sums = {slot: lines.new_zeros(lines.shape[1:], dtype=wide) for slot in served}
    for line, slot in zip(lines, served, strict=True):
        sums[slot] += line
    total = lines.new_zeros(shape, dtype=dtype)
    for slot, summed in sums.items():
        total[slot] = summed
    return total


class TransformersVisits(LayerVisits):
    """The armed visits of one layer, with the recorded experts."""

    def __init__(self, layer: int, group: ExpertGroup, experts: nn.Module, num_experts: int, spare_slots: int) -> None:
        super().__init__(layer, group, num_homes=num_experts // group.num_ranks, in_flight=False)
        self.experts, self.num_experts = experts, num_experts
        self.num_slots = self.num_homes + spare_slots
        self.recorded: Sequence[Tensor] = ()
        """[T, K] experts of each micro-batch, -1 where they are routed live"""

    def route(self, forward: Callable[..., Any], hidden: Tensor, *more: Any, **options: Any) -> Any:  # noqa: ANN401
        """Begin a forward: run transformers' router so that it chooses the recorded experts."""
        self.current = self.take()
        if self.current is None:
            return forward(hidden, *more, **options)
        recorded_TK, num_tokens = self.recorded[self.number], hidden.numel() // hidden.shape[-1]
        if len(recorded_TK) != num_tokens:
            raise InputError(
                f"MoE layer {self.layer} got {num_tokens} tokens, {len(recorded_TK)} were given to begin() for this "
                "micro-batch: pass one row per token, in the same order, with -1 for padding"
            )
        return route_recorded(
            lambda: forward(hidden, *more, **options), recorded_TK.to(hidden.device), rows=None,
            num_experts=self.num_experts, layer=self.layer,
        )  # fmt: skip

    def run(self, run: Run, rows_ND: Tensor, slot_of_row: Tensor) -> Tensor:
        """Run homes and copies on rows. The module's parameters must be unsharded, those of its homes."""
        assert self.current is not None
        slots = self.current
        if not slots.flash.num_in_node:
            return run(rows_ND, slot_of_row)
        parts = dict(self.experts.named_parameters(recurse=False))
        rows_ND, copies = carry(self.group, slots.flash, rows_ND, list(parts.values()))
        if not (num_held := slots.flash.held_expert.size):
            return run(rows_ND, slot_of_row)
        of_copy = slot_of_row >= self.num_homes
        order = of_copy.argsort(stable=True)
        num = len(rows_ND) - int(of_copy.sum())
        rows_ND, slot_of_row = rows_ND.index_select(0, order), slot_of_row.index_select(0, order)
        results = run(rows_ND[:num], slot_of_row[:num])
        with _weights(self.experts, dict(zip(parts, copies, strict=True)), num_held):
            more = run(rows_ND[num:], slot_of_row[num:] - self.num_homes)
        return torch.cat([results, more]).index_select(0, order.argsort())


@contextmanager
def _weights(experts: Any, parts: dict[str, Tensor], num: int) -> Iterator[None]:  # noqa: ANN401
    """Swap in other experts' weights, the way transformers itself gives the module local tensors."""
    kept, kept_num = dict(experts._parameters), experts.num_experts  # noqa: SLF001
    experts._parameters.update(parts)  # noqa: SLF001
    experts.num_experts = num
    try:
        yield
    finally:
        experts._parameters.update(kept)  # noqa: SLF001
        experts.num_experts = kept_num


def to_slots(experts_TK: Tensor, slots: SlotTable) -> Tensor:
    """[T, K] the slot of each pair, among those of all ranks. Reads nothing from the device."""
    taken = np.flatnonzero(slots.end_of_slot > slots.first_of_slot)
    taken = taken[np.lexsort((slots.first_of_slot[taken], slots.expert_of_slot[taken]))]
    num_experts = int(slots.expert_of_slot.max()) + 1
    width = experts_TK.numel() + 1  # (expert, number of its pair) becomes expert * width + number
    first = np.minimum(slots.first_of_slot[taken], width - 1)
    key, slot_of_key = (
        torch.from_numpy(values).to(experts_TK.device)
        for values in (slots.expert_of_slot[taken] * width + first, taken)
    )
    experts = experts_TK.flatten()
    order = experts.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.long, device=experts.device)
    counts.scatter_add_(0, experts, torch.ones_like(experts))
    begin = counts.cumsum(0) - counts
    ordered = experts.index_select(0, order)
    number = torch.arange(len(experts), device=experts.device) - begin.index_select(0, ordered)
    found = torch.searchsorted(key, ordered * width + number, right=True) - 1
    slot_of_pair = torch.empty_like(experts)
    slot_of_pair[order] = slot_of_key.index_select(0, found)
    return slot_of_pair.view_as(experts_TK)


def known_or_live(ids_TK: Tensor) -> Tensor:
    """Ids with -1 in the rows that `count_routing` skips."""
    signed = ids_TK.to(torch.int16) if ids_TK.dtype is torch.uint8 else ids_TK
    return signed.masked_fill(routed_live(ids_TK)[:, None], -1)


class PlannedExpertsParallel(EpDispatchExpertsParallel):
    """The parallel style of one module; the registered instance makes a new one for every module."""

    def __init__(self) -> None:
        self.visits: TransformersVisits | None = None
        """the layer's visits, once it is planned"""

    def install_forward(self, module: nn.Module, ep_mesh: Any, *, tp_mesh: Any = None) -> nn.Module:  # noqa: ANN401
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
    """Allow planning of models loaded after this call with `DistributedConfig(ep_size=...)`."""
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
    """The module's planned style; None if it was loaded without."""
    found = getattr(experts, "expert_parallel_style", None)
    return found if isinstance(found, PlannedExpertsParallel) else None


def plan_expert_parallel(model: Any, setting: ParallelSetting | None = None) -> ParallelBalancer:  # noqa: ANN401
    """Collective over the world: switch the MoE layers of a loaded model to planned execution.

    Call it before or after making the optimizer: no parameter changes.
    """
    setting, family = setting or ParallelSetting(), family_of(model.config.model_type)
    spec, blocks = family.spec(model.config), [layer.mlp for layer in moe_layers(model).values()]
    weight = _check(model, blocks)
    setting = setting.on(device_name(weight.device))
    expert_parallel, expert_data = (weight.device_mesh[name].get_group() for name in ("ep", "efsdp"))
    cluster = cluster_of(expert_parallel.size(), setting.ranks_per_node)
    group = stage_group(expert_parallel, expert_data, cluster, setting.timeout_s)
    group.agree(setting.description(cluster), what="how steps are planned")
    layers = []
    for number, block in enumerate(blocks):
        visits = TransformersVisits(number, group, block.experts, spec.num_experts, setting.spare_slots)
        style, router = style_of(block.experts), getattr(block, family.router)
        assert style is not None
        style.visits = visits
        object.__setattr__(router, "forward", partial(visits.route, router.forward))
        layers.append(visits)
    shapes = MoEModel(
        name="transformers", num_layers=len(layers), hidden=spec.hidden, expert_ffn=spec.expert_ffn,
        num_experts=spec.num_experts, top_k=spec.top_k, weight_bytes=weight.dtype.itemsize,
    )  # fmt: skip
    return ParallelBalancer(group, setting, layers, shapes, SlotCounts(standing=0, flash=setting.spare_slots))


def _check(model: Any, blocks: list[Any]) -> DTensor:  # noqa: ANN401
    """Refuse models that cannot be planned; returns a parameter of the experts."""
    styles = [style_of(block.experts) for block in blocks]
    if not blocks or None in styles:
        raise InputError(
            "there is nothing to plan: the model has no MoE layers, or was loaded without Equilibra's style; call "
            "register_expert_parallel() first, then from_pretrained(..., distributed_config=DistributedConfig("
            "fsdp_size=..., ep_size=...)) with ep_size of 2 or more"
        )
    if any(style is not None and style.visits is not None for style in styles):
        raise InputError("the model is planned already: call plan_expert_parallel() once")
    config = model.config.distributed_config
    if config.tp_size > 1:
        raise InputError(
            f"cannot plan with tp_size={config.tp_size}: ranks that share a batch would each dispatch a part of it, "
            "but routing is given per batch; use tp_size=1"
        )
    weight = next(blocks[0].experts.parameters())
    assert isinstance(weight, DTensor)
    return weight


class ParallelBalancer(VisitBalancer[TransformersVisits, PlanSetting]):
    """Plans steps and arms the layers of this rank."""

    _begun: tuple[Step, Routing] | None = None

    def begin(self, routing: Routing, stage: Stage = Stage.UPDATE) -> Step:
        """Collective: plan the micro-batches of an optimizer step, and arm the layers.

        routing: for each micro-batch of this rank, in order, the experts [T, K] of each MoE layer; T includes padding.
        Rows with a negative id or a repeated expert are routed live and not counted.
        """
        self.end()
        load = self._load(routing)
        plan = self._plan(load, self.placement)
        if plan.placement != self.placement:
            raise InputError(
                f"planner {self.planner.name!r} moved homes, but FSDP owns the experts' parameters: use a planner that "
                "obeys max_moves_per_layer=0"
            )
        self.group.agree(f"plan {plan.digest}", what="the plan of the step")
        step = Step(plan=plan, load=load)
        self._begun = step, [[known_or_live(ids) for ids in layers] for layers in routing]
        self.arm(step, stage)
        return step

    def arm(self, step: Step, stage: Stage = Stage.UPDATE) -> None:
        """Begin another pass over the step's micro-batches, from the first one.

        LOGPROB is a pass without backward (old log-probs), UPDATE one with backward.
        """
        if self._begun is None or self._begun[0] is not step:
            raise InputError("cannot arm a step that is over: arm the one that begin() returned last")
        self._arm(step, stage)
        for visits in self.layers:
            visits.recorded = [layers[visits.layer] for layers in self._begun[1]]

    def end(self) -> None:
        """Disarm: later passes run without a plan."""
        self._begun = None
        for visits in self.layers:
            visits.arm(None)
            visits.recorded = ()
