"""A planner is one method. This one makes flash copies and nothing else; compare it with the others."""

from dataclasses import dataclass

from equilibra import Cluster, StepPlan
from equilibra.core.load import imbalance
from equilibra.plan.entry import step_problem
from equilibra.plan.planner import StepProblem, planner_named
from equilibra.plan.step import Equilibra
from equilibra.trace.synth import SynthKnobs, SynthShape, synthesize_loads


@dataclass(frozen=True)
class OnlyFlash:
    """Flash copies, and nothing else."""

    name: str = "only-flash"

    def plan(self, problem: StepProblem) -> StepPlan:
        return Equilibra(pack=False, reorder=False, standing=False).plan(problem)


size = SynthShape(num_prompts=16, answers_per_prompt=8, num_layers=4, num_experts=64, top_k=8)
sequences = synthesize_loads(size, SynthKnobs(max_length=8192))
problem = step_problem(sequences, cluster=Cluster(num_nodes=2, ranks_per_node=4), tokens_per_rank=8192)
for planner in (planner_named("static"), OnlyFlash(), planner_named("equilibra")):
    plan = planner.plan(problem)
    load = problem.load_under(plan.schedule)
    print(f"{planner.name:12} imbalance {imbalance(plan.rank_load(load)).mean():.3f}")
