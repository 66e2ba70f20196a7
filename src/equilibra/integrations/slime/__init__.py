"""slime: the routing of its samples as sequences. slime itself is not needed."""

from equilibra.integrations.slime.routing import sequences_of_samples

__all__ = ["sequences_of_samples"]
