"""A step from routing to gradients, and what happened in it."""
