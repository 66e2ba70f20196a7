"""Mutants of the planner and the executor, and the tests that kill them.

    pip install cosmic-ray
    python -m benchmarks.mutants --mutants 320 --seed 0       # writes benchmarks/results/mutants.md and mutants.json

Cosmic Ray's operators make the mutants, but it does not run them. It would rewrite files and start a new process
for each: with torch to load and kernels to compile that is minutes a mutant. Here a process with the libraries loaded
is forked for every mutant; an import hook hands it the changed source, and the ranks of distributed tests are forked
from it. Every test is run once under a tracer first, so a mutant meets only tests that run its line. Where a file has
numba kernels, all kernels run as plain Python (NUMBA_DISABLE_JIT), so neither the cache on disk nor a compiler stands
between a mutant and its test.
"""
