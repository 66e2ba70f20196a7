"""verl: the routing of its batches as sequences, which needs no verl; and `plugin`, which verl imports."""

from equilibra.integrations.verl.routing import sequences_of_batch

__all__ = ["sequences_of_batch"]
