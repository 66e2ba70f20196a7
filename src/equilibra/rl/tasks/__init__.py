"""Tasks: problems, and rewards for their answers."""
