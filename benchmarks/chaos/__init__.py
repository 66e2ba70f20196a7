"""Training runs with failures: a rank is killed, stopped or slowed, or its disk fills up.

    python -m benchmarks.chaos --runs 500 --seed 0        # writes benchmarks/results/chaos.md and chaos.json

Every run is the training program itself, with a tiny model on 2 to 4 ranks. After the injection it must finish with the
numbers of an undisturbed run, or end in time with an error that names the cause; then `--resume` must reach those
numbers, to the bit: metrics, weights and checkpoints.
"""
