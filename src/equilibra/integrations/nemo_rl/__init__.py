"""NeMo-RL: the routing of its batches as sequences. NeMo-RL itself is not needed."""

from equilibra.integrations.nemo_rl.routing import sequences_of_batch

__all__ = ["sequences_of_batch"]
