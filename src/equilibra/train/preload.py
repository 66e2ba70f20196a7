"""What every rank would load for itself, loaded once in the process that they are forked from."""

import gc
import os
from contextlib import suppress

import torch._dynamo  # optimizers load it when they are made
import torch.distributed.checkpoint
import transformers.models.qwen3_moe.modeling_qwen3_moe  # of the embedded model

from equilibra.core.errors import InputError
from equilibra.execute.steps.planning import warm
from equilibra.integrations.reasoning_gym import dataset_names
from equilibra.train.processes import NODES

__all__ = ["torch", "transformers"]

with suppress(InputError):  # reasoning-gym is missing: a task from a file does without
    dataset_names()
warm(int(os.environ.get(NODES, "2")))
gc.freeze()  # ranks need not look for garbage in what is loaded, nor copy its pages
