"""transformers' own expert parallelism, planned, against the same unplanned and against one process; on every rank."""

import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import EpDispatchExpertsParallel
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from equilibra.core.errors import EquilibraError
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.integrations.hf import expert_parallel
from equilibra.integrations.hf.expert_parallel import (
    ParallelSetting,
    exchange,
    plan_expert_parallel,
    register_expert_parallel,
)
from equilibra.integrations.hf.families import family_of
from equilibra.integrations.hf.sharded_experts import route_recorded

EXPERTS, VOCABULARY, MICRO_BATCHES, BATCH, LENGTH, RATE = 8, 300, 3, 2, 12, 0.05


def tokens_of(rank):
    random = torch.Generator().manual_seed(100 + rank)
    return torch.randint(0, VOCABULARY, (MICRO_BATCHES, BATCH, LENGTH), generator=random)


def routing_of(rank, model):
    """[M][L] ids [T, K]: two experts are chosen most of the time, other ones in every layer; some rows have none."""
    random = torch.Generator().manual_seed(200 + rank)
    top_k = family_of(model.config.model_type).spec(model.config).top_k
    found = []
    for number in range(MICRO_BATCHES):
        layers = []
        for layer in range(len(blocks_of(model))):
            liked = torch.ones(EXPERTS)
            liked[[(layer + number) % EXPERTS, (layer + number + 1) % EXPERTS]] = 40.0
            ids = torch.multinomial(liked.expand(BATCH * LENGTH, -1), top_k, generator=random)
            ids[5], ids[7, 1] = -1, ids[7, 0]
            layers.append(ids)
        found.append(layers)
    return found


def live_rows(ids):
    """What must become of rows that are not known, written down again."""
    ids = ids.clone()
    for row in ids:
        if (row < 0).any() or len(set(row.tolist())) < len(row):
            row[:] = -1
    return ids


def blocks_of(model):
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def replay(model, routing):
    """Routers of a model that is not planned choose what was recorded for the micro-batch that is set."""
    family, now = family_of(model.config.model_type), {"micro_batch": 0}

    def route(layer, forward, hidden):
        ids = live_rows(routing[now["micro_batch"]][layer])
        return route_recorded(lambda: forward(hidden), ids, rows=None, num_experts=EXPERTS, layer=layer)

    for layer, block in enumerate(blocks_of(model)):
        router = getattr(block, family.router)
        object.__setattr__(router, "forward", partial(route, layer, router.forward))
    return now


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


@torch.no_grad()
def live_loss(model, rank):
    return float(loss_of(model, tokens_of(rank)[0]))


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients_of(model):
    return {name: whole(value.grad) for name, value in model.named_parameters()}


def reference(folder, world):
    """One process with all ranks' micro-batches: losses of each rank, gradients, weights after a step of SGD."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    model.set_experts_implementation("eager")
    now = replay(model, [layers for rank in range(world) for layers in routing_of(rank, model)])
    losses = []
    for number, tokens in enumerate(torch.cat([tokens_of(rank) for rank in range(world)])):
        now["micro_batch"] = number
        loss = loss_of(model, tokens)
        (loss / MICRO_BATCHES / world).backward()
        losses.append(float(loss.detach()))
    gradients = gradients_of(model)
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    weights = {name: value.detach() for name, value in model.named_parameters()}
    return [losses[first : first + MICRO_BATCHES] for first in range(0, len(losses), MICRO_BATCHES)], gradients, weights


def load(folder, world, ep, *, planned, checkpointing=False):
    if planned:
        register_expert_parallel()
    else:
        ALL_PARALLEL_STYLES.register("ep_dispatch_experts", EpDispatchExpertsParallel())
    config = DistributedConfig(fsdp_size=world, ep_size=ep)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def train(model, rank, micro_batch=lambda number: None, again=lambda: None):
    """Losses of the micro-batches, before and after a step of SGD, and whole gradients of their mean."""
    losses = []
    for number, tokens in enumerate(tokens_of(rank)):
        micro_batch(number)
        loss = loss_of(model, tokens)
        (loss / MICRO_BATCHES).backward()
        losses.append(float(loss.detach()))
    gradients = gradients_of(model)
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    again()
    with torch.no_grad():
        for number, tokens in enumerate(tokens_of(rank)):
            micro_batch(number)
            losses.append(float(loss_of(model, tokens)))
    return losses, gradients


def gaps(found, wanted, *, factor=1.0):
    """Largest relative difference of losses, of experts' gradients and of others'."""
    (losses, gradients), (wanted_losses, wanted_gradients) = found, wanted
    worst = {"experts": 0.0, "dense": 0.0}
    worst["loss"] = max(abs(mine / theirs - 1) for mine, theirs in zip(losses, wanted_losses, strict=False))
    for name, gradient in gradients.items():
        kind = "experts" if ".experts." in name else "dense"
        theirs = wanted_gradients[name] * (factor if kind == "experts" else 1.0)
        worst[kind] = max(worst[kind], float((gradient - theirs).abs().max() / theirs.abs().max()))
    return worst


def without_gradients(group, lists, parts, *, home):
    """Copies whose gradients do not return."""
    received = exchange(group, lists, parts, home=home)
    return [part.zero_() if home else part for part in received]


def check(folder: Path, world: int, ep: int, wanted, runs: list[str]):
    """Gaps of several kinds of runs, by name. wanted: the reference."""
    rank = dist.get_rank()
    os.environ.update(WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK=str(rank))
    one_process = wanted[0][rank], wanted[1]
    plain = load(folder, world, ep, planned=False)
    mine, live = routing_of(rank, plain), live_loss(plain, rank)
    now = replay(plain, mine)
    unplanned = train(plain, rank, lambda number: now.update(micro_batch=number))
    factor = 1.0 if world > ep else 1 / world  # FSDP of torch 2.13 divides twice where experts are on one rank each
    found = {"unplanned": {**gaps(unplanned, one_process, factor=factor)}}
    for run in runs:
        model = load(folder, world, ep, planned=True, checkpointing="checkpointing" in run)
        if "remedy" in run:
            for block in blocks_of(model):
                block.experts.set_force_sum_reduction_for_comms(False)
        planner = "static" if "static" in run else "equilibra"
        balancer = plan_expert_parallel(model, ParallelSetting(planner=planner, rates=Rates.free(), timeout_s=100))
        before = live_loss(model, rank)
        step = balancer.begin(mine)
        if "dropped" in run:
            expert_parallel.exchange = without_gradients
        result = train(model, rank, again=partial(balancer.arm, step, Stage.LOGPROB))
        expert_parallel.exchange = exchange
        found[run] = gaps(result, one_process if "remedy" in run else unplanned)
        found[run]["copies"] = step.plan.stages[Stage.UPDATE].num_copies
        found[run]["imbalance"] = step.planned_imbalance
        found[run]["live"] = before - live
        if "saved" in run:
            model.save_pretrained(folder / "saved")
        if "refusals" in run:
            found[run]["refusals"] = refusals(model, plain, balancer, rank)
    return found


def refusals(model, plain, balancer, rank):
    """What every rank is told, whatever it did."""

    def said(attempt):
        try:
            attempt()
        except EquilibraError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    mine, tokens = routing_of(rank, model), tokens_of(rank)
    found = {
        "twice": said(lambda: plan_expert_parallel(model)), "plain": said(lambda: plan_expert_parallel(plain)),
        "layers": said(lambda: balancer.begin([layers[:1] for layers in mine] if rank else mine)),
        "over": said(lambda: balancer.arm(None)),
    }  # fmt: skip
    balancer.begin([[ids[:5] for ids in layers] for layers in mine])
    found["tokens"] = said(lambda: loss_of(model, tokens[0]))
    balancer.begin(mine[:1])
    loss_of(model, tokens[0])
    found["too many"] = said(lambda: loss_of(model, tokens[1]))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    balancer.begin(mine)
    losses = loss_of(model, tokens[0]) + loss_of(model, tokens[1])
    found["two at once"] = said(losses.backward)
    balancer.begin(mine)
    loss = loss_of(model, tokens[0])
    balancer.end()
    found["ended"] = said(loss.backward)
    return found
