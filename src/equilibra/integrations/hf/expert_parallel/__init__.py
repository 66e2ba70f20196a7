"""transformers' own expert parallelism, `DistributedConfig(ep_size=...)`, under plans; transformers 5.22.

Not imported with `equilibra.integrations.hf`: older transformers have no such parallelism. What plans and executes is
`integrations.executor`, as under Megatron.
"""

from equilibra.integrations.hf.expert_parallel.balancer import (
    ParallelBalancer,
    ParallelSetting,
    PlannedExpertsParallel,
    plan_expert_parallel,
    register_expert_parallel,
)

__all__ = [
    "ParallelBalancer",
    "ParallelSetting",
    "PlannedExpertsParallel",
    "plan_expert_parallel",
    "register_expert_parallel",
]
