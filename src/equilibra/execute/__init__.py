"""The doing half: expert parallelism in PyTorch that executes a plan and changes nothing else. Needs torch."""

from equilibra.execute.copies.transfer import Path
from equilibra.execute.experts import Activation, GroupScore, MoESpec, RouterSpec, Score
from equilibra.execute.group import ExpertGroup, join_expert_group
from equilibra.execute.micro_batch import MicroBatch
from equilibra.execute.moe import BalancedMoE, ReferenceMoE
from equilibra.execute.runtime import CopySetting, Runtime
from equilibra.execute.steps.balancer import Balancer, BalancerSetting
from equilibra.execute.steps.step import Step

__all__ = [
    "Activation", "BalancedMoE", "Balancer", "BalancerSetting", "CopySetting", "ExpertGroup", "GroupScore",
    "MicroBatch", "MoESpec", "Path", "ReferenceMoE", "RouterSpec", "Runtime", "Score", "Step", "join_expert_group",
]  # fmt: skip
