"""verl: the routing of its batches as sequences. verl itself is not needed."""

from equilibra.integrations.verl.routing import sequences_of_batch

__all__ = ["sequences_of_batch"]
