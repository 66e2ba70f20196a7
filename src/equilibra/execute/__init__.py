"""The doing half: expert parallelism in PyTorch that executes a plan and changes nothing else."""
