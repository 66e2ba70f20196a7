"""Optimizer steps that are skipped because a gradient is NaN or infinite, and when that ends the run.

One bad batch should not end a run, and must not reach the weights: the step is skipped on all ranks and counted.
Several in a row are no accident: the run ends with an error that names the parameters, and its checkpoints stay.
"""

from __future__ import annotations

import logging
from math import isfinite

from torch import nn

from equilibra.core.errors import NonFiniteError
from equilibra.execute.runtime import Runtime
from equilibra.execute.steps.gradients import nonfinite_gradients

__all__ = ["Skipped"]

LOG = logging.getLogger(__name__)


class Skipped:
    """Counts skipped steps of one learner; every rank counts the same."""

    def __init__(self, limit: int = 3) -> None:
        """limit: steps in a row that may be skipped."""
        self.limit, self.in_a_row = limit, 0

    def skips(self, norm: float, module: nn.Module, runtime: Runtime) -> bool:
        """Collective: whether the step with a gradient of this norm, the same on all ranks, must be skipped."""
        if isfinite(norm):
            self.in_a_row = 0
            return False
        self.in_a_row += 1
        found = f"the norm of the gradient is {norm}, not finite in {'; '.join(nonfinite_gradients(module, runtime))}"
        if self.in_a_row > self.limit:
            raise NonFiniteError(
                f"{found}: {self.in_a_row} optimizer steps in a row, optimizer.max_skipped_steps is {self.limit}. No "
                "weight was changed by them; look at rewards and loss, lower the learning rate, and resume from the "
                "last checkpoint"
            )
        LOG.warning("an optimizer step was skipped: %s", found)
        return True
