"""Megatron-Core, plain, balanced and with routing forced to balance, on four processes that share one GPU."""
