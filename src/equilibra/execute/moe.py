"""MoE layers: `BalancedMoE` runs on several ranks under a plan; `ReferenceMoE` in one process defines correct.

    router (replayed or live) -> split -> dispatch -> experts (homes and copies) -> combine (+ shared expert)

Symbols: T tokens, D width, E experts, K experts per token, G groups of experts, N rows.

Routing replay (R3) takes the recorded experts and weights them by the live router's scores. Training computes what the
rollout computed, and the router still learns from the gradients of those weights.

Dispatch, experts and combine are autograd functions. The token tensor is threaded through all three, so a rank without
rows still runs every collective, and all ranks save the same number of tensors, which activation checkpointing needs. A
token's results are summed in the order of its choices, wherever experts are.

Combine weights results at their tokens and does not keep them. Gradients of weights are computed at the experts: in the
backward pass weights travel there with the rows' gradients and return as gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from equilibra.core.errors import ExecuteError, InputError, StaleError
from equilibra.events.schema import Direction, Kind, Resource
from equilibra.execute.experts import GroupScore, MoESpec, RouterSpec, Score, expert_math
from equilibra.execute.experts.expert_math import activate
from equilibra.execute.experts.weights import ExpertWeights
from equilibra.execute.group import Channel
from equilibra.execute.kernels import RowWeights, grouped, on_gpu, row_kernels
from equilibra.execute.micro_batch import Tables
from equilibra.execute.record import direction_now
from equilibra.execute.runtime import Runtime

# --- router ---


class Router(nn.Module):
    """Scores tokens with a linear map; a selection bias, where the model has one, affects the choice only."""

    def __init__(self, spec: MoESpec, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.num_experts, spec.hidden, device=device, dtype=dtype))
        self.bias = (
            nn.Parameter(torch.zeros(spec.num_experts, device=device, dtype=dtype)) if spec.router.bias else None
        )
        self.selection_bias: Tensor | None
        bias = torch.zeros(spec.num_experts, device=device) if spec.router.selection_bias else None
        self.register_buffer("selection_bias", bias)
        nn.init.normal_(self.weight, std=0.02)

    def scores(self, tokens_TD: Tensor) -> Tensor:
        """[T, E] scores in at least float32, because small differences change the top-k."""
        with torch.autocast(tokens_TD.device.type, enabled=False):
            dtype = torch.promote_types(self.weight.dtype, torch.float32)
            bias = None if self.bias is None else self.bias.to(dtype)
            logits = nn.functional.linear(tokens_TD.to(dtype), self.weight.to(dtype), bias)
            return logits.sigmoid() if self.spec.router.score is Score.SIGMOID else logits.softmax(dim=-1)

    def forward(
        self, tokens_TD: Tensor, recorded_TK: Tensor | None = None, *, complete: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Experts [T, K] and weights [T, K]; tokens without recorded experts (None, or -1) are routed live.

        complete: whether every token has recorded experts.
        """
        scores_TE = self.scores(tokens_TD)
        if recorded_TK is not None and complete:
            experts_TK = recorded_TK.long()  # what gather takes
        else:
            experts_TK = choose_experts(scores_TE, self.spec, self.selection_bias)
            if recorded_TK is not None:
                experts_TK = torch.where(recorded_TK < 0, experts_TK, recorded_TK)
        return experts_TK, weights_of_experts(scores_TE, experts_TK, self.spec.router)


def choose_experts(scores_TE: Tensor, spec: MoESpec, selection_bias_E: Tensor | None = None) -> Tensor:
    """[T, K] top-k experts by live scores; no gradient flows through the choice."""
    router = spec.router
    choice_TE = scores_TE.detach()
    if selection_bias_E is not None:
        choice_TE = choice_TE + selection_bias_E.to(choice_TE.dtype)
    if router.num_groups > 1:
        choice_TGe = choice_TE.view(len(choice_TE), router.num_groups, spec.num_experts // router.num_groups)
        best = min(2 if router.group_score is GroupScore.TOP2 else 1, choice_TGe.shape[-1])
        rank_TG = choice_TGe.topk(best, dim=-1).values.sum(dim=-1)
        kept = rank_TG.topk(router.top_groups, dim=-1).indices
        allowed_TG = torch.zeros_like(rank_TG, dtype=torch.bool).scatter(1, kept, value=True)
        choice_TE = choice_TGe.masked_fill(~allowed_TG[:, :, None], -torch.inf).flatten(1)
    return choice_TE.topk(spec.top_k, dim=-1).indices


def weights_of_experts(scores_TE: Tensor, experts_TK: Tensor, router: RouterSpec) -> Tensor:
    """[T, K] weights of the given experts from live scores."""
    weights_TK = scores_TE.gather(1, experts_TK)
    if router.normalise:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return weights_TK * router.scale


# --- layers ---


class ReferenceMoE(nn.Module):
    """All experts in one process and plain autograd, slow on purpose: `BalancedMoE` gives the same under every plan."""

    def __init__(self, spec: MoESpec, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.router = Router(spec, dtype=dtype)
        self.experts = nn.ParameterDict({
            name: nn.Parameter(torch.randn(spec.num_experts, *shape, dtype=dtype) / shape[-1] ** 0.5)
            for name, shape in spec.part_shapes().items()
        })  # fmt: skip
        self.shared = SharedExpert(spec, dtype=dtype) if spec.shared_ffn else None

    def forward(self, hidden: Tensor, recorded_TK: Tensor | None = None) -> Tensor:
        """Takes hidden states [..., D]; recorded experts are replayed with live weights, rows of -1 are routed live."""
        tokens_TD = hidden.reshape(-1, self.spec.hidden)
        experts_TK, weights_TK = self.router(tokens_TD, recorded_TK, complete=False)
        out_TD = torch.zeros_like(tokens_TD)
        for expert in range(self.spec.num_experts):
            token, choice = torch.nonzero(experts_TK == expert, as_tuple=True)
            result = self.expert(expert, tokens_TD[token]) * weights_TK[token, choice, None].to(tokens_TD.dtype)
            out_TD = out_TD.index_add(0, token, result)
        if self.shared is not None:
            out_TD = out_TD + self.shared(tokens_TD)
        return out_TD.reshape(hidden.shape)

    def expert(self, expert: int, rows_ND: Tensor) -> Tensor:
        part = self.experts
        h = rows_ND @ part["gate_up"][expert].t()
        if self.spec.expert_bias:
            h = h + part["gate_up_bias"][expert]
        y = activate(self.spec.activation, h) @ part["down"][expert].t()
        result: Tensor = y + part["down_bias"][expert] if self.spec.expert_bias else y
        return result


class SharedExpert(nn.Module):
    """The dense expert that every token passes."""

    def __init__(self, spec: MoESpec, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.kind = spec.activation
        self.gate_up = nn.Linear(spec.hidden, 2 * spec.shared_ffn, bias=False, device=device, dtype=dtype)
        self.down = nn.Linear(spec.shared_ffn, spec.hidden, bias=False, device=device, dtype=dtype)

    def forward(self, tokens_TD: Tensor) -> Tensor:
        result: Tensor = self.down(activate(self.kind, self.gate_up(tokens_TD)))
        return result


class BalancedMoE(nn.Module):
    """One expert-parallel layer. Build a model's layers in order; they share a runtime.

    Inside `with micro_batch:` it follows the armed plan; elsewhere tokens are routed live to the homes of experts.
    """

    def __init__(
        self, spec: MoESpec, runtime: Runtime, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.spec = spec
        self.runtime = runtime
        layer = len(runtime.weights)
        placement = runtime.placement
        if placement.num_experts != spec.num_experts or layer >= placement.num_layers:
            raise InputError(
                f"cannot add MoE layer {layer} with {spec.num_experts} experts: the runtime's placement has "
                f"{placement.num_layers} layers of {placement.num_experts} experts; build it for this model"
            )
        self.router = Router(spec, device=device, dtype=dtype)
        homes = placement.homes_on(layer, runtime.group.rank)
        self.experts = ExpertWeights(spec, homes, device=device, dtype=dtype)
        self.shared = SharedExpert(spec, device=device, dtype=dtype) if spec.shared_ffn else None
        self.layer = runtime.register(self.experts)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # collectives are not for a compiler
    def forward(self, hidden: Tensor) -> Tensor:
        """Takes hidden states [..., D]; padding (see `MicroBatch.rows`) gets zeros."""
        if hidden.shape[-1] != self.spec.hidden:
            raise InputError(f"hidden states must be {self.spec.hidden} wide, not {tuple(hidden.shape)}")
        runtime, micro_batch = self.runtime, self.runtime.current
        flat_TD = hidden.reshape(-1, self.spec.hidden)
        runtime.enter_layer(runtime.key(self.layer), direction_now())
        tokens_TD, recorded_TK = flat_TD, None
        if micro_batch is not None:
            tokens_TD, recorded_TK = micro_batch.select(flat_TD), micro_batch.experts(self.layer, hidden.device)
        experts_TK, weights_TK = self.router(
            tokens_TD, recorded_TK, complete=micro_batch is not None and micro_batch.planned
        )
        kind, cast_TD = hidden.device.type, tokens_TD
        if torch.is_autocast_enabled(kind):  # rows travel and are computed in its dtype
            cast_TD = tokens_TD.to(torch.get_autocast_dtype(kind))
        out_TD = run_visit(runtime, self.layer, cast_TD, experts_TK, weights_TK)
        if self.shared is not None:
            out_TD = out_TD + self.shared(tokens_TD)
        out_TD = out_TD if micro_batch is None else micro_batch.among_padding(out_TD, flat_TD)
        return out_TD.reshape(hidden.shape)

    @torch.no_grad()
    def load_reference(self, reference: ReferenceMoE) -> None:
        """Copy this rank's share of a reference layer."""
        self.router.load_state_dict(reference.router.state_dict())
        if self.shared is not None and reference.shared is not None:
            self.shared.load_state_dict(reference.shared.state_dict())
        homes = torch.from_numpy(self.experts.experts.astype("int64"))
        for name in self.experts.names:
            self.experts.get_parameter(name).copy_(reference.experts[name][homes])


# --- dispatch, experts, combine ---

ALIGNED = 16
"""bytes; alignment of rows and of their numbers"""


class Laden(NamedTuple):
    """Rows with one number each, which travels at the end of its row so that one exchange carries both.

    In the backward pass the number is a row's weight on the way out and its gradient on the way back. Read as values of
    16-bit rows its bits mean nothing, so NaN checks on the wire buffer give false positives.
    """

    rows_ND: Tensor
    """may be a view of `every`"""
    numbers_N: Tensor
    """float32, or float64 if rows are; may be a view of `every`"""
    every: Tensor | None = None
    """the wire buffer; None on a single rank"""

    @classmethod
    def empty(cls, num_rows: int, width: int, like: Tensor, *, travels: bool) -> Laden:
        """Uninitialised rows and numbers, with a wire buffer if they travel."""
        if not travels:
            return cls(like.new_empty(num_rows, width), like.new_empty(num_rows, dtype=_kind(like)))
        step = ALIGNED // like.itemsize
        return cls._of(like.new_empty(num_rows, (-(-width // step) + 1) * step), width)

    @classmethod
    def _of(cls, every: Tensor, width: int) -> Laden:
        room = every[:, every.shape[1] - ALIGNED // every.itemsize :]
        return cls(every[:, :width], room.view(_kind(every))[:, 0], every)

    def sent(self, exchange: Callable[[Tensor], Tensor]) -> Laden:
        """The rows and numbers that arrive when `exchange` sends the wire buffer."""
        return self if self.every is None else self._of(exchange(self.every), self.rows_ND.shape[1])

    def fill(
        self, tokens_TD: Tensor, token_of_row: Callable[[], Tensor], row_of_pair_TK: Tensor, pairs_TK: Tensor
    ) -> None:
        """Write every token once per choice, with the number of the pair."""
        if on_gpu(tokens_TD):
            row_kernels().spread(tokens_TD, row_of_pair_TK, self.rows_ND, pairs_TK.contiguous(), self.numbers_N)
            return
        torch.index_select(tokens_TD, 0, token_of_row(), out=self.rows_ND)
        self.numbers_N[row_of_pair_TK.flatten().long()] = pairs_TK.flatten().to(self.numbers_N.dtype)

    def sum_of_choices(self, row_of_pair_TK: Tensor, pairs_TK: Tensor) -> Tensor:
        """[T, D] each token's rows summed in the order of its choices; numbers are written to `pairs_TK`."""
        if on_gpu(self.rows_ND):
            out_TD: Tensor = row_kernels().plain_sum(self.rows_ND, row_of_pair_TK, self.numbers_N, pairs_TK)
            return out_TD
        pairs_TK.copy_(self.numbers_N.index_select(0, row_of_pair_TK.flatten()).view_as(pairs_TK))
        whole = self.rows_ND if self.every is None else self.every  # strided rows are summed slowly
        return embedding_bag(row_of_pair_TK, whole, mode="sum")[:, : self.rows_ND.shape[1]]


def _kind(like: Tensor) -> torch.dtype:
    return torch.float64 if like.dtype is torch.float64 else torch.float32


class LayerPass:
    """A visit in progress on this rank: its tables, its micro-batch, the version of the weights."""

    def __init__(self, runtime: Runtime, tables: Tables) -> None:
        self.runtime, self.tables, self.micro_batch = runtime, tables, runtime.current
        self.key = tables.visit.key
        self.direction = direction_now()
        self.version = runtime.version
        self.numbers_N: Tensor | None = None
        """per row, in the backward pass: weights from combine to experts, then their gradients on to dispatch"""

    def take_numbers(self) -> Tensor:
        """The rows' numbers that the previous step of the backward pass left."""
        numbers_N, self.numbers_N = self.numbers_N, None
        if numbers_N is None:
            raise ExecuteError("dispatch, experts and combine of a visit must all run, forward and backward")
        return numbers_N

    def begin_backward(self) -> None:
        """Raise unless the micro-batch and the weights are those of the forward pass."""
        if self.micro_batch is not None and self.runtime.current is not self.micro_batch:
            raise ExecuteError(
                f"the backward pass of micro-batch {self.micro_batch.number} ran outside of its `with micro_batch:`; "
                "activation checkpointing needs it there"
            )
        if self.micro_batch is not None:
            self.micro_batch.check_armed()
        if self.version != self.runtime.version:
            raise StaleError("weights changed between the forward and the backward pass of a micro-batch")

    def exchange(self, kind: Kind, direction: Direction, rows_ND: Tensor, *, out: bool) -> Tensor:
        """All-to-all of rows to their instances (`out`) or back."""
        tables, runtime = self.tables, self.runtime
        sent, received = (
            (tables.sent_sizes, tables.received_sizes) if out else (tables.received_sizes, tables.sent_sizes)
        )
        if len(sent) == 1:
            return rows_ND  # a single rank sends nothing
        result = rows_ND.new_empty(sum(received), rows_ND.shape[1])
        me = runtime.group.rank
        num_bytes = max(sum(sent) - sent[me], sum(received) - received[me]) * rows_ND.shape[1] * rows_ND.itemsize
        with runtime.recorder.span(kind, Resource.NVLINK, self.key, direction, num_bytes=num_bytes):
            runtime.group.all_to_all(
                Channel.DISPATCH, rows_ND, sent, result, received, what=f"{kind.name.lower()} of layer {self.key.layer}"
            ).wait()
        return result


def _rows_of(tokens_TD: Tensor, tables: Tables) -> Tensor:
    """[N, D] every token once per choice, in the order rows are sent."""
    if on_gpu(tokens_TD):
        rows_ND = tokens_TD.new_empty(tables.row_of_pair.numel(), tokens_TD.shape[1])
        row_kernels().spread(tokens_TD, tables.row_of_pair, rows_ND)
        return rows_ND
    return tokens_TD.index_select(0, tables.token_of_row)


def _in_order(rows_ND: Tensor, index: Tensor | None) -> Tensor:
    return rows_ND if index is None else rows_ND.index_select(0, index)


def _weighted_sum_of_choices(rows_ND: Tensor, row_of_pair_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, D] each token's rows, weighted and summed in the order of its choices."""
    if on_gpu(rows_ND):
        out_TD: Tensor = row_kernels().weighted_sum(rows_ND, row_of_pair_TK, weights_TK)
        return out_TD
    if rows_ND.dtype == weights_TK.dtype:
        return embedding_bag(row_of_pair_TK, rows_ND, mode="sum", per_sample_weights=weights_TK)
    total_TD = rows_ND.new_zeros(len(weights_TK), rows_ND.shape[1], dtype=weights_TK.dtype)
    for choice in range(weights_TK.shape[1]):
        rows = rows_ND.index_select(0, row_of_pair_TK[:, choice])
        total_TD.addcmul_(rows.to(total_TD.dtype), weights_TK[:, choice, None])
    return total_TD


class Dispatch(torch.autograd.Function):
    """Tokens [T, D] to rows [N, D] grouped by instance. Gradients of the weights [T, K] arrive here."""

    @staticmethod
    def forward(ctx: Any, tokens_TD: Tensor, weights_TK: Tensor, visit: LayerPass) -> Tensor:  # noqa: ANN401
        ctx.visit, ctx.kind_of_weights = visit, weights_TK.dtype
        tables = visit.tables
        grouped.expect(tokens_TD, tables.instance_sizes)
        received = visit.exchange(Kind.DISPATCH, visit.direction, _rows_of(tokens_TD, tables), out=True)
        return _in_order(received, tables.received_of_grouped)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
        (drows_ND,) = gradients
        visit: LayerPass = ctx.visit
        tables, dweights_N = visit.tables, visit.take_numbers()
        laden = Laden(drows_ND, dweights_N)
        from_row, to_row = tables.grouped_of_received, tables.received_of_grouped
        if from_row is not None and to_row is not None:
            laden = Laden.empty(len(drows_ND), drows_ND.shape[1], drows_ND, travels=True)
            laden.fill(drows_ND, lambda: from_row, to_row[:, None], dweights_N[:, None])
        returned = laden.sent(lambda every: visit.exchange(Kind.DISPATCH, Direction.BACKWARD, every, out=False))
        visit.runtime.leave_layer()
        dweights_TK = drows_ND.new_empty(tables.row_of_pair.shape, dtype=ctx.kind_of_weights)
        return returned.sum_of_choices(tables.row_of_pair, dweights_TK), dweights_TK, None


class Experts(torch.autograd.Function):
    """Rows through this rank's instances. Parameter gradients bypass autograd and are summed in place."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, visit: LayerPass, *parameters: Tensor) -> Tensor:  # noqa: ANN401, ARG004
        """`parameters` are arguments only so that autograd calls `backward`."""
        ctx.visit = visit
        runtime, key = visit.runtime, visit.key
        instances = runtime.instances(key, visit.direction)
        with runtime.recorder.span(Kind.EXPERTS, Resource.COMPUTE, key, visit.direction, tokens=visit.tables.num_rows):
            y, h = expert_math.forward(
                runtime.spec.activation, rows_ND, visit.tables.instance_sizes, instances, keep=any(ctx.needs_input_grad)
            )
        ctx.save_for_backward(rows_ND, h)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Gradients of flash copies leave as soon as they are ready."""
        (dy_ND,) = gradients
        visit: LayerPass = ctx.visit
        rows_ND, h = ctx.saved_tensors
        dx_ND, weights_N = torch.empty_like(rows_ND), visit.take_numbers()
        weighted = RowWeights(weights_N, torch.empty_like(weights_N))
        visit.runtime.backward(visit.tables, (rows_ND, h, dy_ND.contiguous()), dx_ND, weighted)
        visit.numbers_N = weighted.gradients_N
        return (dx_ND, None, *(None for _ in range(len(ctx.needs_input_grad) - 2)))


class Combine(torch.autograd.Function):
    """Results [N, D] back to their tokens [T, D], where they are weighted and summed."""

    @staticmethod
    def forward(ctx: Any, results_ND: Tensor, weights_TK: Tensor, visit: LayerPass) -> Tensor:  # noqa: ANN401
        ctx.visit = visit
        tables = visit.tables
        ungrouped = _in_order(results_ND, tables.grouped_of_received)
        returned = visit.exchange(Kind.COMBINE, visit.direction, ungrouped, out=False)
        ctx.save_for_backward(weights_TK)  # results are not needed: see `expert_math`
        out_TD = _weighted_sum_of_choices(returned, tables.row_of_pair, weights_TK)
        visit.runtime.leave_layer()
        return out_TD.to(results_ND.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:  # noqa: ANN401
        """Send every row its token's gradient and weight; the expert applies the weight."""
        (dout_TD,) = gradients
        visit: LayerPass = ctx.visit
        visit.begin_backward()
        visit.runtime.enter_layer(visit.key, Direction.BACKWARD)
        tables = visit.tables
        (weights_TK,) = ctx.saved_tensors
        laden = Laden.empty(tables.row_of_pair.numel(), dout_TD.shape[1], dout_TD, travels=len(tables.sent_sizes) > 1)
        laden.fill(dout_TD, lambda: tables.token_of_row, tables.row_of_pair, weights_TK)
        received = laden.sent(lambda every: visit.exchange(Kind.COMBINE, Direction.BACKWARD, every, out=True))
        visit.numbers_N = _in_order(received.numbers_N, tables.received_of_grouped)
        return _in_order(received.rows_ND, tables.received_of_grouped), None, None


def run_visit(runtime: Runtime, layer: int, tokens_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, D] a layer's results for tokens routed to these experts with these weights."""
    visit = LayerPass(runtime, runtime.tables(layer, experts_TK))
    rows_ND = Dispatch.apply(tokens_TD, weights_TK, visit)  # type: ignore[no-untyped-call]
    results_ND = Experts.apply(rows_ND, visit, *runtime.weights[layer].parts())  # type: ignore[no-untyped-call]
    out_TD: Tensor = Combine.apply(results_ND, weights_TK.detach(), visit)  # type: ignore[no-untyped-call]
    return out_TD
