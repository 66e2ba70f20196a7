"""Mutants of the planner and the executor, and the tests that kill them.

    pip install cosmic-ray
    python -m benchmarks.mutants --mutants 320 --seed 0       # writes benchmarks/results/mutants.md and mutants.json

Cosmic Ray's operators make the mutants, but do not run them: it would rewrite files and start a new process for each,
and loading torch and compiling kernels takes minutes. Here every mutant is a fork of a process with the libraries
loaded; an import hook gives it the changed source, and the ranks of distributed tests are forked from it. Every test
runs once under a tracer first, so a mutant meets only tests that run its line. Where a file has numba kernels, all
kernels run as plain Python (NUMBA_DISABLE_JIT), so neither the disk cache nor a compiler hides a mutant.
"""
