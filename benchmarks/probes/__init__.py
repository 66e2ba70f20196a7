"""Questions asked once of one machine: each file says how to run it; its results are in benchmarks/results."""
