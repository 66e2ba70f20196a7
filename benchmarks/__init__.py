"""Everything that measures this package, outside the wheel.

| what | how it is run |
|---|---|
| planner, paper, runtime, train, gpu | `equilibra bench NAME` (`command`, `gpu.command`) |
| chaos, mutants, million_plans, megatron_steps, slime_schedule, foresight | `python -m benchmarks.NAME` |
| deployment, m2n, pingpong, decode_pingpong | `python -m benchmarks.NAME` |
| megatron_gpu | `benchmarks/megatron_gpu/run.sh`, on a machine with a GPU, after `make megatron-gpu` |
| training_runs, probes.measure_device | `python benchmarks/FILE.py`: they import nothing from here |
| the other probes | `python -m benchmarks.probes.NAME` |

Results are in `results/`, each with the command, commit and machine that made it.
"""
