"""A small GPTModel trained by Megatron's own schedules, DDP and DistributedOptimizer, as it is and balanced.

Symbols: M micro-batches, L MoE layers of a pipeline stage, T tokens, K experts per token.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tests.megatron_core import layer_runs, models, shims, stand_ins
from tests.megatron_core.verl_replay import VerlReplay
from torch import Tensor

from equilibra.core.errors import ExecuteError, InputError
from equilibra.core.placement import Migration, Placement
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.integrations.megatron import MegatronSetting, balance, set_replay

MICRO_BATCHES = 3


class Training:
    """One model and its optimizer."""

    def __init__(
        self, options: dict[str, Any], *, num_layers: int = 2, overlap: bool = False, gather: bool = False
    ) -> None:
        from megatron.core import parallel_state as groups
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        self.num_layers, self.stages = num_layers, groups.get_pipeline_model_parallel_world_size()
        self.config = models.config(num_layers, finalize_model_grads_func=finalize_model_grads, **options)
        first, last = groups.is_pipeline_first_stage(), groups.is_pipeline_last_stage()
        model = models.gpt(self.config, pre=first, post=last)
        self.bare, short = model, self.config.bf16
        wrap = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=overlap,
            overlap_param_gather=gather,
            grad_reduce_in_fp32=short,
        )
        self.model = DistributedDataParallel(self.config, wrap, Float16Module(self.config, model) if short else model)
        self.model.broadcast_params()
        setting = OptimizerConfig(
            # a larger epsilon: Adam would make steps of equal size out of rounding; norms are summed as homes lie
            optimizer="adam", lr=0.01, adam_eps=1e-5, use_distributed_optimizer=True, clip_grad=0.0 if short else 1.0,
            bf16=short, params_dtype=self.config.params_dtype, overlap_param_gather=gather,
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(setting, [self.model], use_gloo_process_groups=False)
        self.balancer: Any = None
        self.moves = 0
        self.steps: list[Any] = []
        self.layers = [layer.mlp for layer in model.decoder.layers if hasattr(layer.mlp, "router")]
        self.verl = False
        self.prepares, self.prepared = False, {}

    def balance(
        self, homes: str, planner: str = "equilibra", spare_slots: int = 2, *, prefetch: bool = True,
        standing_slots: int = 0, per_node: int | None = None, path: str = "auto",
    ) -> Training:  # fmt: skip
        """homes: "stay", "planned" (across nodes of two ranks), or "shuffled" before every step."""
        self.homes = homes
        setting = MegatronSetting(
            planner=planner, spare_slots=spare_slots, rates=Rates.free(), prefetch=prefetch, path=path,
            standing_slots=standing_slots, ranks_per_node=2 if homes == "planned" else per_node,
        )  # fmt: skip
        self.balancer = balance(self.model, setting, optimizer=None if homes == "stay" else self.optimizer)
        return self

    def use_verl(self) -> None:
        """Replay through what verl puts in place of Megatron's; the last token of every micro-batch is routed live."""
        self.verl = True
        for layer in self.layers:
            layer.router.router_replay = VerlReplay()

    def shuffle(self, seed: int) -> int:
        """Other homes, the same on every rank; returns how many moved."""
        before = self.balancer.placement
        rng = np.random.default_rng(seed)
        home_LE = np.stack([rng.permutation(home) for home in np.sort(before.home_of_expert, axis=1)])
        after = Placement(home_of_expert=home_LE, cluster=before.cluster)
        self.balancer.move_homes(after)
        return Migration(before=before, after=after).num_moves

    def routing(self, number: int) -> list[list[Tensor]]:
        """[M][L] of this stage."""
        from megatron.core import parallel_state as groups

        rank, stage = groups.get_data_parallel_rank(), groups.get_pipeline_model_parallel_rank()
        whole = models.routing(number, rank, MICRO_BATCHES, self.num_layers, models.SEQUENCE, models.SKEW)
        part, kinds = self.num_layers // self.stages, self.config.moe_layer_freq
        here = [at for at in range(stage * part, (stage + 1) * part) if kinds == 1 or kinds[at]]
        if self.verl:
            for ids in (ids for layers in whole for ids in layers):
                ids[-1] = -1
        rows = rows_of_rank()
        return [[layers[at][rows] for at in here] for layers in whole]

    def step(self, number: int, *, forward_only: bool = False, again: bool = False) -> float:
        """One optimizer step; returns the sum of the losses of this rank (0 where it is not the last stage).

        again: another pass over the micro-batches of the step that began last.
        """
        routing = self.routing(number)
        if self.balancer is not None and again:
            self.balancer.arm(self.steps[-1])
        elif self.balancer is not None:
            if self.homes == "shuffled":
                self.moves += self.shuffle(number)
            stage = Stage.LOGPROB if forward_only else Stage.UPDATE
            # by_micro_batch makes nothing at all of no layers
            planned: Any = self.prepared.pop(number, routing if self.layers or number % 2 else [])
            self.steps.append(self.balancer.begin(planned, stage))
            if self.prepares:
                self.prepared[number + 1] = self.balancer.prepare(self.routing(number + 1))
            self.moves += self.steps[-1].plan.migration.num_moves
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.passes(number, routing, forward_only=forward_only)
        if not forward_only:
            self.optimizer.step()
        return float(sum(one["loss"] for one in losses)) if losses else 0.0

    def passes(self, number: int, routing: list[list[Tensor]], *, forward_only: bool = False) -> Any:
        """What Megatron's schedule returns for the micro-batches of a step."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        losses = get_forward_backward_func()(
            forward_step_func=lambda _data, model: self._replayed(model, number, routing), data_iterator=iter(()),
            model=[self.model], num_microbatches=MICRO_BATCHES, seq_length=models.SEQUENCE, micro_batch_size=1,
            forward_only=forward_only,
        )  # fmt: skip
        self._begun = 0
        for layer in self.layers:
            if self.config.moe_enable_routing_replay:
                layer.router.router_replay.clear_indices()
        return losses

    _begun = 0

    def _replayed(self, model: Any, number: int, routing: list[list[Tensor]]) -> Any:
        """A forward step as RL frameworks have it: the recorded experts, then what backward computes anew."""
        from megatron.core.transformer.moe.router_replay import RouterReplayAction

        self._act(RouterReplayAction.REPLAY_FORWARD)
        set_replay([layer.router.router_replay for layer in self.layers], routing[self._begun])
        out = model(*inputs(number, self._begun))
        self._act(RouterReplayAction.REPLAY_BACKWARD)
        self._begun += 1
        return out, lambda tensor: (tensor.mean(), {"loss": tensor.detach().mean()})

    def _act(self, action: Any) -> None:
        for layer in self.layers:
            layer.router.router_replay.set_router_replay_action(action)

    def weights(self) -> dict[str, Tensor]:
        """Parameters of this stage by name, experts by number, from all expert-parallel ranks."""
        from megatron.core import parallel_state as groups

        found: dict[str, Tensor] = {}
        if self.model.ddp_config.overlap_param_gather:
            self.model.start_param_sync(force_sync=True)
        for name, parameter in self.bare.named_parameters():
            head, at, tail = name.partition("local_experts.")
            if at:
                slot, _, part = tail.partition(".")
                layer = self.bare.get_submodule(head.removesuffix(".experts."))
                number = models.expert_of_slot(layer, "experts", int(slot))
                if self.balancer is not None:
                    number = layer.visits.homes.expert_of_home[int(slot)]
                found[f"{head}{number}.{part}"] = parameter.detach().clone()
            else:
                found[f"{name} of part {groups.get_tensor_model_parallel_rank()}"] = parameter.detach().clone()
        group = groups.get_expert_model_parallel_group()
        every: list[Any] = [None] * group.size()
        torch.distributed.all_gather_object(every, found, group=group)
        return {name: value for part in every for name, value in part.items()}


def inputs(number: int, micro_batch: int) -> tuple[Any, ...]:
    """Tokens, positions, mask, labels."""
    from megatron.core import parallel_state as groups

    rng = np.random.default_rng([5, number, micro_batch, groups.get_data_parallel_rank()])
    ids = torch.from_numpy(rng.integers(models.VOCABULARY, size=(1, models.SEQUENCE + 1)))
    causal = torch.ones(models.SEQUENCE, models.SEQUENCE).tril().view(1, 1, models.SEQUENCE, -1) < 0.5
    here = positions()
    return ids[:, here], here[None], causal, None, ids[:, here + 1]


def positions() -> Tensor:
    """Of this rank's tokens in their sequence: cut for context parallelism."""
    from megatron.core import parallel_state as groups

    size, rank = groups.get_context_parallel_world_size(), groups.get_context_parallel_rank()
    return stand_ins.positions(size, models.SEQUENCE)[rank]


def rows_of_rank() -> Tensor:
    """Tokens of a sequence that reach this rank's experts: cut for tensor parallelism too."""
    from megatron.core import parallel_state as groups

    parts = positions().chunk(groups.get_tensor_model_parallel_world_size())
    return parts[groups.get_tensor_model_parallel_rank()]


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train."""

    expert_parallel: int = 2
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    num_layers: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    """of Megatron's configuration"""
    homes: str = "stay"
    spare_slots: int = 2
    fused: bool = False
    """weight gradients go to main_grad in kernels"""
    overlap: bool = False
    """gradients are reduced during backward"""
    gather: bool = False
    """the optimizer's shards are gathered during the next forward"""
    verl: bool = False
    """replay through verl's class"""
    standing_slots: int = 0
    per_node: int | None = None
    """expert-parallel ranks that count as a node"""
    path: str = "auto"
    """of flash copies"""
    sabotage: str | None = None


def against_plain(case: Case) -> dict[str, Any]:
    """Losses of four steps, weights afterwards, and what was done."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    models.join(case.expert_parallel, case.pipeline, tensor=case.tensor, context=case.context)
    if case.fused:
        shims.fake_fused_gradients()
    options = {**case.options, "gradient_accumulation_fusion": case.fused}
    shape = {"num_layers": case.num_layers, "overlap": case.overlap, "gather": case.gather}
    plain = Training(options, **shape)
    if case.verl:
        plain.use_verl()
    wanted = [plain.step(number) for number in range(4)]
    RouterReplay.clear_global_router_replay_instances()
    training = Training(options, **shape).balance(
        case.homes, spare_slots=case.spare_slots, standing_slots=case.standing_slots, per_node=case.per_node,
        path=case.path,
    )  # fmt: skip
    if case.verl:
        training.use_verl()
    layer_runs.break_something(case.sabotage)
    found = [training.step(number) for number in range(4)]
    weights = training.weights()
    return {
        "plain": wanted,
        "balanced": found,
        "weights": max(float((value - weights[name]).abs().max()) for name, value in plain.weights().items()),
        "copies": sum(step.plan.stages[Stage.UPDATE].num_copies for step in training.steps),
        "standing": sum(step.plan.standing.num_copies for step in training.steps),
        "moves": training.moves,
        "layers": len(training.balancer.layers),
        "norms": [value.tolist() for name, value in training.bare.named_parameters() if "norm" in name],
        "static": float(np.mean([step.static_imbalance for step in training.steps])),
        "planned": float(np.mean([step.planned_imbalance for step in training.steps])),
    }


def ahead_against_late(case: Case) -> dict[str, Any]:
    """Copies that are fetched ahead and copies that are fetched when they are used: the same training."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    models.join(case.expert_parallel, case.pipeline)
    late = Training(case.options, num_layers=case.num_layers).balance(case.homes, prefetch=False)
    wanted = [late.step(0, forward_only=True), *(late.step(number) for number in range(3))]
    RouterReplay.clear_global_router_replay_instances()
    ahead = Training(case.options, num_layers=case.num_layers).balance(case.homes)
    layer_runs.break_something(case.sabotage)
    found = [ahead.step(0, forward_only=True), *(ahead.step(number) for number in range(3))]
    layers, weights = ahead.balancer.layers, ahead.weights()
    return {
        "late": wanted,
        "ahead": found,
        "weights": max(float((value - weights[name]).abs().max()) for name, value in late.weights().items()),
        "visits ahead": sum(one.num_ahead for one in layers),
        "visits late": sum(one.num_late for one in layers),
        "left": arriving(ahead),
    }


def arriving(training: Any) -> int:
    """Visits whose flash copies are on their way."""
    return sum(bank.arriving is not None for bank in training.balancer.copies.found._slots._banks)


def short_gradients(case: Case) -> dict[str, Any]:
    """One step's gradients in main_grad: bfloat16 as it is, bfloat16 with copies, and float32 to compare both with."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    models.join(case.expert_parallel)
    if case.fused:
        shims.fake_fused_gradients()
    short = {"bf16": True, "params_dtype": torch.bfloat16, "gradient_accumulation_fusion": case.fused, **case.options}
    losses, gradients = {}, {}
    for name, options in (("exact", case.options), ("plain", short), ("balanced", short)):
        RouterReplay.clear_global_router_replay_instances()
        training = Training(options, overlap=case.overlap)
        with torch.no_grad():
            for parameter in training.bare.parameters():
                parameter.copy_(parameter.bfloat16())
        if name == "balanced":
            training.balance("stay")
            layer_runs.break_something(case.sabotage)
        training.optimizer.step = lambda: None
        losses[name] = training.step(0)
        gradients[name] = {
            at: value.main_grad.clone() for at, value in training.bare.named_parameters() if "experts" in at
        }
    return {
        "losses": losses,
        "dtypes": {str(value.dtype) for value in gradients["balanced"].values()},
        "copies": training.steps[-1].plan.stages[Stage.UPDATE].num_copies,
        "apart": _error(gradients["plain"], gradients["balanced"]),
        **{name: _error(gradients["exact"], gradients[name]) for name in ("plain", "balanced")},
    }


def _error(exact: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """The largest over all parameters, relative to the parameter's largest gradient."""
    return max(float((found[at] - value).abs().max() / value.abs().max()) for at, value in exact.items())


def nothing_to_balance() -> str:
    """What is said about a model of dense layers."""
    models.join(2)
    dense = models.gpt(models.config(2, moe_layer_freq=[0, 0]))
    try:
        balance(dense)
    except InputError as error:
        return str(error)
    return "nothing"


def prepared_against_planned() -> list[dict[str, Any]]:
    """Steps planned while the one before runs; with homes that move in between too, so that plans are made again."""
    models.join(2)
    result = []
    for homes in ("stay", "shuffled"):
        now, before = Training({}).balance(homes), Training({}).balance(homes)
        before.prepares = True
        losses = [[one.step(number) for number in range(3)] for one in (now, before)]
        digests = [[step.plan.digest for step in one.steps] for one in (now, before)]
        result.append({"losses": losses, "digests": digests, "moves": before.moves})
    return result


def cut_off() -> dict[str, Any]:
    """Passes that end while copies are on their way: by end(), and by an error in the middle of a layer."""
    models.join(2)
    late, ahead = Training({}).balance("stay", prefetch=False), Training({}).balance("stay")
    losses = [[one.step(0, forward_only=True), one.step(0, again=True)] for one in (late, ahead)]
    left = []
    for fails in (False, True):
        ahead.balancer.begin(ahead.routing(1), Stage.UPDATE if fails else Stage.LOGPROB)
        combine = ahead.layers[0].combine
        if fails:
            ahead.layers[0].combine = None  # as if memory ran out, on every rank
        with contextlib.suppress(TypeError):
            ahead._replayed(ahead.model, 1, ahead.routing(1))
        ahead.layers[0].combine, ahead._begun = combine, 0
        left.append(arriving(ahead))
        ahead.balancer.end()
        left.append(arriving(ahead))
    for found, one in zip(losses, (late, ahead), strict=True):
        found.append(one.step(1))
    return {"losses": losses, "left": left}


def two_passes() -> dict[str, Any]:
    """A pass without backward, then the update of the same step; then one pass too many."""
    models.join(2)
    plain, training = Training({}), Training({}).balance("shuffled")
    losses = [
        [one.step(0, forward_only=True), one.step(0, again=True), one.step(1, forward_only=True)]
        for one in (plain, training)
    ]
    try:
        training._replayed(training.model, 1, training.routing(1))
    except ExecuteError as error:
        return {"losses": losses, "said": str(error)}
    return {"losses": losses, "said": "nothing"}
