"""Measurements made once on one machine: each file says how to run it; results are in benchmarks/results."""
