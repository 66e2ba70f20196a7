"""`equilibra doctor`: what a machine has, what its links carry, and which transfer paths of the runtime work on it."""
