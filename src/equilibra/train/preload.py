"""What every rank would load for itself, loaded once in the process that they are forked from."""

import torch._dynamo  # optimizers load it when they are made
import torch.distributed.checkpoint
import transformers.models.qwen3_moe.modeling_qwen3_moe  # of the embedded model

import equilibra.execute.warm

__all__ = ["equilibra", "torch", "transformers"]
