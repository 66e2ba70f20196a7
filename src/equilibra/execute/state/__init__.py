"""What outlives a step: homes, checkpoints, files."""
