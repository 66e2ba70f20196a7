"""Which test files look at a source file, the nearest first."""

from __future__ import annotations

from pathlib import Path

from benchmarks.mutants.sample import SOURCE

__all__ = ["nearest_tests"]

TESTS = SOURCE.parents[1] / "tests"
PLAN = ("unit/plan/*.py", "golden/*.py", "property/plan/*.py", "contracts/test_planners.py")
LAYER = ("distributed/test_layer.py", "distributed/test_mini_batches.py", "distributed/test_training.py")
UNIT = "unit/execute/test_"
NEAREST: dict[str, tuple[str, ...]] = {
    "plan/baselines/": ("unit/plan/test_baselines.py", "golden/*.py"),
    "plan/": (),
    "execute/watch.py": (UNIT + "watch.py", "distributed/test_failures.py", "distributed/test_patience.py"),
    "execute/group.py": (
        UNIT + "watch.py", UNIT + "staging.py", UNIT + "planning.py", "distributed/test_counts.py", *LAYER,
    ),
    "execute/record.py": (UNIT + "memory_kept.py", "distributed/test_counts.py", *LAYER),
    "execute/micro_batch.py": (UNIT + "memory_kept.py", UNIT + "paths.py", *LAYER),
    "execute/runtime.py": (UNIT + "paths.py", UNIT + "memory_kept.py", UNIT + "first_gradients.py", *LAYER),
    "execute/experts/": (
        UNIT + "expert_math.py", UNIT + "first_gradients.py", UNIT + "bands.py", UNIT + "memory_kept.py",
        UNIT + "gradients.py", *LAYER, "distributed/test_migrate.py", "distributed/test_checkpoint.py",
    ),
    "execute/moe/": (
        UNIT + "expert_math.py", UNIT + "router.py", UNIT + "laden.py", UNIT + "first_gradients.py",
        UNIT + "bands.py", *LAYER,
    ),
    "execute/kernels/": (UNIT + "shares.py", UNIT + "bands.py", UNIT + "expert_math.py", UNIT + "kernels.py"),
    "execute/copies/segment.py": (UNIT + "segment.py", UNIT + "paths.py"),
    "execute/copies/collective.py": (UNIT + "staging.py", UNIT + "paths.py", *LAYER),
    "execute/copies/": (
        UNIT + "paths.py", UNIT + "segment.py", "protocol/test_protocol.py", *LAYER, "distributed/test_failures.py",
    ),
    "execute/steps/counts.py": (UNIT + "planning.py", "distributed/test_counts.py", *LAYER),
    "execute/steps/gradients.py": (UNIT + "gradients.py", "distributed/test_gradients.py", *LAYER),
    "execute/steps/masters.py": (UNIT + "gradients.py", "distributed/test_gradients.py", *LAYER),
    "execute/steps/": (UNIT + "planning.py", UNIT + "gradients.py", "distributed/test_counts.py", *LAYER),
    "execute/state/checkpoint": ("distributed/test_checkpoint.py", UNIT + "gradients.py"),
    "execute/state/migrate": ("distributed/test_migrate.py", "distributed/test_checkpoint.py"),
    "execute/state/safetensors": ("distributed/test_safetensors.py", "distributed/test_stream.py"),
    "execute/state/": (
        "distributed/test_stream.py", "distributed/test_safetensors.py", "distributed/test_checkpoint.py",
    ),
    "execute/": (*LAYER, "distributed/test_checkpoint.py", "distributed/test_failures.py"),
}  # fmt: skip
"""by the beginning of the path"""


def nearest_tests(file: str) -> list[str]:
    """Test files, below the repository."""
    stem = Path(file).stem
    patterns = [f"unit/plan/test_plan_{stem}*.py", f"property/plan/test_{stem}*.py"] if file.startswith("plan/") else []
    for begin, tests in NEAREST.items():
        if file.startswith(begin):
            patterns += tests
            break
    patterns += PLAN if file.startswith("plan/") else ()
    found = [path for pattern in patterns for path in sorted(TESTS.glob(pattern)) if path.name.startswith("test_")]
    return [f"tests/{path.relative_to(TESTS)}" for path in dict.fromkeys(found)]
