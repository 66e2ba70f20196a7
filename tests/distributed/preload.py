"""What the fork server loads before the first rank starts."""

import pytest
import torch._dynamo  # optimizers load it when they are made
import torch.distributed.checkpoint

__all__ = ["pytest", "torch"]
