"""Which test files look at a source file, the nearest first."""

from __future__ import annotations

from pathlib import Path

from benchmarks.mutants.sample import SOURCE

__all__ = ["nearest_tests"]

TESTS = SOURCE.parents[1] / "tests"
PLAN = ("unit/plan/*.py", "golden/*.py", "property/plan/*.py", "contracts/test_planners.py")
LAYER = ("distributed/test_layer.py", "distributed/test_mini_batches.py", "distributed/test_training.py")
NEAREST: dict[str, tuple[str, ...]] = {
    "plan/baselines/": ("unit/plan/test_baselines.py", "golden/*.py"),
    "plan/": (),
    "core/visit.py": ("unit/core/test_visit.py", *LAYER),
    "core/tables.py": ("unit/core/test_visit.py", *LAYER),
    "execute/experts/": (
        "unit/execute/test_expert_math.py", "unit/execute/test_first_gradients.py", "unit/execute/test_bands.py",
        *LAYER,
    ),
    "execute/moe/": (
        "unit/execute/test_expert_math.py", "unit/execute/test_router.py", "unit/execute/test_laden.py",
        "unit/execute/test_first_gradients.py", "unit/execute/test_bands.py", *LAYER,
    ),
    "execute/kernels/": ("unit/execute/test_shares.py", "unit/execute/test_bands.py"),
    "execute/copies/": (
        "unit/execute/test_paths.py", "unit/execute/test_segment.py", *LAYER, "distributed/test_failures.py",
    ),
    "execute/steps/": ("unit/execute/test_planning.py", "distributed/test_counts.py", *LAYER),
    "execute/state/checkpoint": ("distributed/test_checkpoint.py",),
    "execute/state/migrate": ("distributed/test_migrate.py", "distributed/test_checkpoint.py"),
    "execute/state/safetensors": ("distributed/test_safetensors.py", "distributed/test_stream.py"),
    "execute/state/": (
        "distributed/test_stream.py", "distributed/test_safetensors.py", "distributed/test_checkpoint.py",
    ),
    "execute/": (
        "distributed/test_migrate.py", *LAYER, "distributed/test_checkpoint.py", "distributed/test_failures.py",
        "unit/execute/test_planning.py",
    ),
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
