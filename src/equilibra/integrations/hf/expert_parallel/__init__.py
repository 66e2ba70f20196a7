"""Runs transformers' own expert parallelism, `DistributedConfig(ep_size=...)`, under plans; for transformers 5.22.

`equilibra.integrations.hf` does not import it, since older transformers lack this parallelism.
"""

from equilibra.integrations.hf.expert_parallel.balancer import (
    ParallelBalancer,
    ParallelSetting,
    PlannedExpertsParallel,
    plan_expert_parallel,
    register_expert_parallel,
)

__all__ = [
    "ParallelBalancer", "ParallelSetting", "PlannedExpertsParallel", "plan_expert_parallel", "register_expert_parallel",
]  # fmt: skip
