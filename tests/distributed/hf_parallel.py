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
from equilibra.execute.group import Channel
from equilibra.integrations.hf.expert_parallel import (
    ParallelSetting,
    plan_expert_parallel,
    register_expert_parallel,
)
from equilibra.integrations.hf.expert_parallel.copies import Exchange
from equilibra.integrations.hf.families import family_of
from equilibra.integrations.hf.replay import route_recorded

EXPERTS, VOCABULARY, MICRO_BATCHES, BATCH, LENGTH = 8, 300, 3, 2, 12


def tokens_of(rank):
    random = torch.Generator().manual_seed(100 + rank)
    return torch.randint(0, VOCABULARY, (MICRO_BATCHES, BATCH, LENGTH), generator=random)


def routing_of(rank, num_layers, top_k):
    """[M][L] ids [T, K]: two experts are chosen most of the time, other ones in every layer; some rows have none."""
    random = torch.Generator().manual_seed(200 + rank)
    found = []
    for number in range(MICRO_BATCHES):
        layers = []
        for layer in range(num_layers):
            liked = torch.ones(EXPERTS)
            liked[[(layer + number) % EXPERTS, (layer + number + 1) % EXPERTS]] = 40.0
            ids = torch.multinomial(liked.expand(BATCH * LENGTH, -1), top_k, generator=random)
            ids[5], ids[7, 1] = -1, ids[7, 0]
            layers.append(ids)
        found.append(layers)
    return found


def live_rows(ids):
    """What the adapter must make of rows that are not known, written down again."""
    ids = ids.clone()
    for row in ids:
        if (row < 0).any() or len(set(row.tolist())) < len(row):
            row[:] = -1
    return ids


def blocks_of(model):
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def replay(model, routing):
    """Routers of a model that is not planned choose what was recorded, micro-batch by micro-batch."""
    family, now = family_of(model.config.model_type), {"micro_batch": 0}

    def route(layer, forward, hidden):
        ids = live_rows(routing[now["micro_batch"]][layer])
        return route_recorded(lambda: forward(hidden), ids, rows=None, num_experts=EXPERTS, layer=layer)

    for layer, block in enumerate(blocks_of(model)):
        router = getattr(block, family.router)
        object.__setattr__(router, "forward", partial(route, layer, router.forward))
    return now


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


def train(model, rank, before=lambda number: None):
    """Losses of the micro-batches, and whole gradients of their mean."""
    losses = []
    for number, tokens in enumerate(tokens_of(rank)):
        before(number)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        (loss / MICRO_BATCHES).backward()
        losses.append(float(loss.detach()))
    return losses, gradients_of(model)


def gradients_of(model):
    found = {}
    for name, value in model.named_parameters():
        found[name] = value.grad.full_tensor() if hasattr(value.grad, "full_tensor") else value.grad
    return found


def reference(folder, world, num_layers, top_k):
    """One process with all ranks' micro-batches."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    model.set_experts_implementation("eager")
    losses, now = [], {}
    routings = [routing_of(rank, num_layers, top_k) for rank in range(world)]
    mixed = [layers for routing in routings for layers in routing]
    now = replay(model, mixed)
    for rank in range(world):
        of_rank = []
        for number, tokens in enumerate(tokens_of(rank)):
            now["micro_batch"] = rank * MICRO_BATCHES + number
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            (loss / MICRO_BATCHES / world).backward()
            of_rank.append(float(loss.detach()))
        losses.append(of_rank)
    return losses, gradients_of(model)


def gaps(found, wanted, *, factor=1.0):
    """Largest relative difference of losses, of experts' gradients and of others'."""
    (losses, gradients), (wanted_losses, wanted_gradients) = found, wanted
    worst = {
        "loss": max(abs(a / b - 1) for a, b in zip(losses, wanted_losses, strict=True)),
        "experts": 0.0,
        "dense": 0.0,
    }
    for name, gradient in gradients.items():
        kind = "experts" if ".experts." in name else "dense"
        whole = wanted_gradients[name] * (factor if kind == "experts" else 1.0)
        worst[kind] = max(worst[kind], float((gradient - whole).abs().max() / whole.abs().max()))
    return worst


def setting(**changes):
    return ParallelSetting(**{"spare_slots": 2, "rates": Rates.free(), "timeout_s": 100, **changes})


def check(folder: Path, world: int, ep: int, runs: list[str]):
    """Gaps of several kinds of runs, by name."""
    rank = dist.get_rank()
    os.environ.update(WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK=str(rank))
    found = {}
    plain = load(folder, world, ep, planned=False)
    top_k, num_layers = family_of(plain.config.model_type).spec(plain.config).top_k, len(blocks_of(plain))
    losses, gradients = reference(folder, world, num_layers, top_k)
    wanted = losses[rank], gradients
    mine = routing_of(rank, num_layers, top_k)
    now = replay(plain, mine)
    unplanned = train(plain, rank, lambda number: now.update(micro_batch=number))
    found["unplanned against one process"] = gaps(unplanned, wanted, factor=1.0 if world > ep else 1 / world)
    for run in runs:
        model = load(folder, world, ep, planned=True, checkpointing="checkpointing" in run)
        balancer = plan_expert_parallel(model, setting(planner="static" if run == "static" else "equilibra"))
        step = balancer.begin(mine)
        found[f"{run}: copies"] = step.plan.stages[Stage.UPDATE].num_copies
        found[f"{run}: imbalance"] = (step.static_imbalance, step.planned_imbalance)
        send = Exchange.send
        if run == "gradients dropped":
            Exchange.send = lambda *args, **kwargs: [
                part.zero_() if args[1] is Channel.GRADIENTS else part for part in send(*args, **kwargs)
            ]
        try:
            found[run] = gaps(train(model, rank), unplanned)
        finally:
            Exchange.send = send
        balancer.end()
    return found
