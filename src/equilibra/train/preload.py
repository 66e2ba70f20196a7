"""Libraries that every rank needs, loaded once in the process that ranks are forked from."""

import gc
import os
from contextlib import suppress

import torch._dynamo  # else an optimizer loads it when it is made
import torch.distributed.checkpoint
import transformers.models.qwen3_moe.modeling_qwen3_moe  # of the embedded model

from equilibra.core.errors import InputError
from equilibra.execute.steps.planning import warm
from equilibra.integrations.reasoning_gym import dataset_names
from equilibra.train.processes import NODES

__all__ = ["torch", "transformers"]

with suppress(InputError):  # tasks from files work without reasoning-gym
    dataset_names()
warm(int(os.environ.get(NODES, "2")))
gc.freeze()  # else the garbage collector of each rank visits all this, which copies its pages
