"""Plan a whole RL step from a routing recording, save the plan, and plan the next step from its homes."""

import tempfile
from pathlib import Path

from equilibra import Cluster, load_plan, plan_step, save_plan, sequence_loads
from equilibra.core.load import step_load
from equilibra.trace.synth import SynthKnobs, SynthShape, synthesize

# A recording of your own run would come from `equilibra.load_trace("routing.npz")`.
size = SynthShape(num_prompts=16, answers_per_prompt=8, num_layers=4, num_experts=64, top_k=8)
knobs = SynthKnobs(median_length=300.0, max_length=1024)
trace = synthesize(size, knobs, seed=1)
cluster = Cluster(num_nodes=2, ranks_per_node=4)

plan = plan_step(trace, cluster=cluster, tokens_per_rank=1024)
load = step_load(sequence_loads(trace), plan.schedule, cluster)
plan.check(load, spare_slots=2)  # every (token, expert) pair exactly once, within the slots
print(f"{plan.num_micro_batches} micro-batches, {plan.standing.num_copies} standing copies, gap {plan.gap(load):.2%}")

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "plan.npz"
    save_plan(plan, file)
    assert load_plan(file).digest == plan.digest

following = plan_step(
    synthesize(size, knobs, seed=1, step=1), cluster=cluster, tokens_per_rank=1024, previous=plan.placement
)
print(f"the next step moves {following.migration.num_moves} homes")
