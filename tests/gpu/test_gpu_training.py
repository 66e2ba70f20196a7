"""Training on several processes that share a GPU equals training in one, on every path; in float64, to rounding."""

import pytest
from tests.distributed.ranks import run_ranks
from tests.distributed.test_training import AFTER_ADAM, ROUNDING, WORLDS, seen
from tests.distributed.training import train_cases

from equilibra.execute.copies.transfer import Path

ALL = tuple(Path)


@pytest.mark.parametrize(
    ("path", "how"), [*[(path, "") for path in ALL], (Path.IPC, "pull gradients"), (Path.BOTH, "pull gradients")]
)
def test_equals_the_reference_on_every_path(path, how):
    cluster, processes = WORLDS["4 ranks"]
    seeds = list(range(100, 104))
    results = run_ranks(processes, train_cases, seeds, cluster, 0.0, how, "cuda", (path,), timeout_s=300)
    for rank, cases in enumerate(results):
        for seed, case in zip(seeds, cases, strict=True):
            assert case.first < ROUNDING, f"rank {rank}, seed {seed}: {case}"
            assert case.worst() < AFTER_ADAM, f"rank {rank}, seed {seed}: {case}"
    for what in ("flash", "moves"):
        assert seen(results, what) > 0, what


def test_nodes_and_mixed_paths():
    cluster, processes = WORLDS["2 nodes of 2"]
    results = run_ranks(processes, train_cases, list(range(300, 305)), cluster, 0.1, "", "cuda", ALL, timeout_s=300)
    assert max(case.first for cases in results for case in cases) < ROUNDING
    assert max(case.worst() for cases in results for case in cases) < AFTER_ADAM
    assert seen(results, "from_standing") > 0


@pytest.mark.parametrize("path", [Path.IPC, Path.HOST])
def test_the_comparison_notices(path):
    cluster, processes = WORLDS["4 ranks"]
    results = run_ranks(
        processes,
        train_cases,
        [100, 101, 102],
        cluster,
        0.0,
        "drop gradients of copies",
        "cuda",
        (path,),
        timeout_s=300,
    )
    assert max(case.worst() for cases in results for case in cases) > 1e-4
