"""The simulator and the runtime count the same tokens, exactly, for the same routing and plan."""

import numpy as np
import pytest
import torch
from tests.distributed.ranks import run_ranks

from equilibra.core.model import MoEModel
from equilibra.core.placement import Cluster, contiguous
from equilibra.core.plan import Stage
from equilibra.cost.presets import prices_named
from equilibra.cost.rates import Rates
from equilibra.events.run import Run, load_run, save_run
from equilibra.events.schema import Kind
from equilibra.execute.experts import MoESpec
from equilibra.execute.group import join_expert_group
from equilibra.execute.moe import BalancedMoE
from equilibra.execute.runtime import CopySetting, Runtime
from equilibra.execute.steps.balancer import Balancer, BalancerSetting
from equilibra.report.page import render
from equilibra.simulate.entry import predict
from equilibra.simulate.times import Pricing, RunSetting
from equilibra.trace.open import load_trace
from equilibra.trace.routing import RoutingTrace

CLUSTER = Cluster(num_nodes=2, ranks_per_node=2)
TOKENS, LAYERS = 600, 3


def own_part(trace: str, rank: int, world: int) -> RoutingTrace:
    """A few layers of every fourth sequence, cut short."""
    recording = load_trace(trace)
    lengths = np.minimum(recording.length_of_sequence, 40)
    mine = list(range(rank, recording.num_sequences, world))[: TOKENS // (40 * world) + 1]
    piece = next(iter(recording.pieces()))
    ids = [piece.ids[recording.offsets[s] : recording.offsets[s] + lengths[s], :LAYERS] for s in mine]
    ids = [part for part in ids if len(part)]
    return RoutingTrace(
        ids=np.ascontiguousarray(np.concatenate(ids)),
        offsets=np.concatenate([[0], np.cumsum([len(part) for part in ids])]).astype(np.int64),
        num_experts=recording.num_experts,
    )  # fmt: skip


def execute(trace: str, folder: str):
    group = join_expert_group(CLUSTER, timeout_s=60)
    routing = own_part(trace, group.world_rank, group.world_size)
    spec = MoESpec(hidden=8, expert_ffn=4, num_experts=routing.num_experts, top_k=routing.top_k)
    placement = contiguous(CLUSTER, num_layers=LAYERS, num_experts=spec.num_experts)
    runtime = Runtime(group, placement, CopySetting(spare_slots=3))
    layers = [BalancedMoE(spec, runtime) for _ in range(LAYERS)]
    balancer = Balancer(runtime, BalancerSetting(tokens_per_rank=120, rates=Rates.free()))
    step = balancer.begin(routing)
    for stage in Stage:
        for micro_batch in step.micro_batches(stage):
            with micro_batch, torch.set_grad_enabled(stage is Stage.UPDATE):
                hidden = torch.randn(micro_batch.num_tokens, spec.hidden)
                for layer in layers:
                    hidden = layer(hidden)
                if stage is Stage.UPDATE:
                    hidden.sum().backward()
    balancer.finish_gradients()
    measured = step.record(seconds=1.0)
    if measured is None:
        return None
    model = MoEModel(
        name="tiny", num_layers=LAYERS, hidden=8, expert_ffn=4, num_experts=spec.num_experts, top_k=spec.top_k
    )
    pricing = Pricing(model=model, hardware=prices_named("h200"), cluster=CLUSTER, setting=RunSetting())
    predicted = predict(step.plan, step.sequence_loads, pricing, spare_slots=3)
    about = {"kind": "measured", "command": "test", "model": {"name": "tiny"}}
    save_run(Run(about=about, planners={"equilibra": measured, "predicted": predicted}), folder)
    return {
        "equal": bool(np.array_equal(measured.rank_tokens_LMR, predicted.rank_tokens_LMR)),
        "executed": int(measured.rank_tokens_LMR.sum()),
        "routed": int(step.armed.load.tokens_MLER.sum()),
        "copies": step.plan.stages[Stage.UPDATE].num_copies + step.plan.standing.num_copies,
    }


@pytest.mark.parametrize("name", ["gpt-oss-20b.npz", "dsv2-lite-law.npz"])
def test_simulated_and_executed_counts_are_equal(name, traces, tmp_path):
    found, *_ = run_ranks(4, execute, str(traces / name), str(tmp_path / "run"))
    assert found["equal"]
    assert found["executed"] == found["routed"] > 0
    assert found["copies"] > 0
    run = load_run(tmp_path / "run")
    kinds = set(run.planners["equilibra"].events.rows["kind"].tolist())
    assert {Kind.DISPATCH, Kind.EXPERTS, Kind.COMBINE, Kind.PLAN} <= kinds
    page = render(run)
    assert "predicted" in page
    assert "Equilibra took" in page
