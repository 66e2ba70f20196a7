"""Train two MoE layers on four processes, static and balanced: the loss is the same, the slowest rank is not.

Started by hand it makes its four processes; under torchrun it uses those it is given. With a folder it writes the last
step there, measured and predicted side by side:
    torchrun --nproc-per-node 4 examples/balanced_training.py step.run && equilibra report step.run
"""

import os
import sys
import tempfile
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
from torch import multiprocessing

from equilibra import Cluster, MoEModel, RoutingTrace
from equilibra.core.load import imbalance
from equilibra.core.placement import contiguous
from equilibra.core.plan import Stage
from equilibra.cost.presets import prices_named
from equilibra.cost.rates import Rates
from equilibra.events.run import PlannerRecord, Run, save_run
from equilibra.execute import (
    BalancedMoE,
    Balancer,
    BalancerSetting,
    MoESpec,
    ReferenceMoE,
    Runtime,
    Step,
    join_expert_group,
)
from equilibra.execute.steps.gradients import clip_gradients
from equilibra.simulate.entry import beside
from equilibra.simulate.times import Pricing, RunSetting
from equilibra.trace.synth import SynthKnobs, SynthShape, synthesize

SPEC = MoESpec(hidden=64, expert_ffn=96, num_experts=16, top_k=2)
LAYERS, STEPS, PER_RANK = 2, 3, 8


def own_sequences(step: int, rank: int, world: int) -> tuple[RoutingTrace, list[torch.Tensor]]:
    """What a rollout left on this rank: recorded routing and data of its own sequences."""
    size = SynthShape(
        num_prompts=world,
        answers_per_prompt=PER_RANK,
        num_layers=LAYERS,
        num_experts=SPEC.num_experts,
        top_k=SPEC.top_k,
    )
    every = synthesize(size, SynthKnobs(median_length=48, max_length=256), step=step)
    mine = every.offsets[rank * PER_RANK : (rank + 1) * PER_RANK + 1]
    routing = RoutingTrace(ids=every.ids[mine[0] : mine[-1]], offsets=mine - mine[0], num_experts=SPEC.num_experts)
    random = np.random.default_rng([step, rank])
    return routing, [torch.from_numpy(random.normal(size=(n, SPEC.hidden))).float() for n in routing.length_of_sequence]


def write_run(record: PlannerRecord, step: Step, folder: str) -> None:
    """The measured step, and beside it what the cost model says of the same plan."""
    model = MoEModel(
        name="example", num_layers=LAYERS, hidden=SPEC.hidden, expert_ffn=SPEC.expert_ffn,
        num_experts=SPEC.num_experts, top_k=SPEC.top_k,
    )  # fmt: skip
    setting = RunSetting(logprob_stage=False, activation_recompute=False)
    pricing = Pricing(model=model, hardware=prices_named("h200"), cluster=step.plan.cluster, setting=setting)
    records = beside(record, step.plan, step.sequence_loads, pricing)
    about = {"kind": "measured", "command": " ".join(sys.argv), "model": {"name": model.name}}
    save_run(Run(about=about, planners=records), folder, overwrite=True)


def train(planner: str, folder: str | None) -> None:
    """A few steps of training on this rank."""
    cluster = Cluster(num_nodes=1, ranks_per_node=dist.get_world_size())
    group = join_expert_group(cluster, timeout_s=60)
    runtime = Runtime(group, contiguous(cluster, num_layers=LAYERS, num_experts=SPEC.num_experts))
    model = torch.nn.Sequential(*(BalancedMoE(SPEC, runtime) for _ in range(LAYERS)))
    torch.manual_seed(0)
    for layer in model:
        layer.load_reference(ReferenceMoE(SPEC))  # this rank's part of the same weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    setting = BalancerSetting(tokens_per_rank=512, planner=planner, rates=Rates.free())
    balancer = Balancer(runtime, setting, optimizer=optimizer)
    for number in range(STEPS):
        routing, data = own_sequences(number, group.world_rank, group.world_size)
        start = perf_counter()
        step = balancer.begin(routing)  # gather counts, plan, move homes, arm copies
        data_of = dict(zip(step.sequences.tolist(), step.send(data), strict=True))
        total = torch.zeros(())
        for micro_batch in step.micro_batches(Stage.UPDATE):
            tokens = torch.cat([torch.empty(0, SPEC.hidden), *(data_of[s] for s in micro_batch.sequences.tolist())])
            with micro_batch:
                loss = (model(tokens) - tokens.flip(-1)).square().sum() / step.num_tokens
                loss.backward()
            total += loss.detach()
        balancer.finish_gradients(model)  # gradients of copies home, dense ones summed
        clip_gradients(model, runtime, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        record = step.record(seconds=perf_counter() - start)
        if record is not None:
            ratio = imbalance(record.rank_tokens_LMR).mean()
            if folder is not None and number == STEPS - 1 and planner == "equilibra":
                write_run(record, step, folder)
            print(f"{planner:9} step {number}: loss {total.item():.5f}, slowest rank over mean {ratio:.3f}", flush=True)
    balancer.close()


def main(rank: int, world: int, store: str, folder: str | None = None) -> None:
    """One process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    for planner in ("static", "equilibra"):
        train(planner, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    run = sys.argv[1] if len(sys.argv) > 1 else None
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", run)
    else:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.start_processes(main, (4, f"file://{folder}/store", run), nprocs=4, start_method="fork")
