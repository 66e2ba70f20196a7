"""The GPU bench: planned rows of every rank as real kernels on one device, one rank after another."""
