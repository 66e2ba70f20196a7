"""What every rank would load for itself, loaded once in the process that they are forked from."""

import os

import torch._dynamo  # optimizers load it when they are made
import torch.distributed.checkpoint
import transformers.models.qwen3_moe.modeling_qwen3_moe  # of the embedded model

from equilibra.execute.steps.planning import warm
from equilibra.train.processes import NODES

__all__ = ["torch", "transformers"]

warm(int(os.environ.get(NODES, "2")))
