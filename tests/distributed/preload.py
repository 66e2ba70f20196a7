"""What the fork server loads before the first rank starts."""

import pytest  # noqa: F401
import torch._dynamo  # noqa: F401 - optimizers load it when they are made
import torch.distributed.checkpoint  # noqa: F401
