"""Training on several processes that share a GPU equals training in one, on every path; in float64, to rounding."""

import pytest
from tests.distributed.ranks import run_ranks
from tests.distributed.test_training import AFTER_ADAM, ROUNDING, WORLDS, seen
from tests.distributed.training import train_cases
from tests.gpu.delays import delayed_cases

from equilibra.execute.copies.transfer import Path

ALL = tuple(Path)
CASES = [*[(path, False) for path in ALL], (Path.IPC, True), (Path.BOTH, True)]
"""path, and whether gradients are pulled as between GPUs"""


def compare(results, seeds):
    for rank, cases in enumerate(results):
        for seed, case in zip(seeds, cases, strict=True):
            assert case.first < ROUNDING, f"rank {rank}, seed {seed}: {case}"
            assert case.worst() < AFTER_ADAM, f"rank {rank}, seed {seed}: {case}"


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_equals_the_reference_with_delays_in_every_stream(backend):
    cluster, processes = WORLDS["4 ranks"]
    seeds = list(range(100, 104))
    found = run_ranks(processes, delayed_cases, CASES, seeds, cluster, timeout_s=400, backend=backend)
    assert all(delays > 100 for _, delays in found)
    for case in CASES:
        results = [gaps[case] for gaps, _ in found]
        compare(results, seeds)
        for what in ("flash", "moves"):
            assert seen(results, what) > 0, (case, what)


@pytest.mark.parametrize(("path", "without"), [(Path.IPC, "waiting for copies"), (Path.HOST, "waiting for signals")])
def test_delays_show_what_is_not_waited_for(path, without):
    cluster, processes = WORLDS["4 ranks"]
    seeds = list(range(100, 104))
    found = run_ranks(
        processes, delayed_cases, [(path, True)], seeds, cluster, 0.0, without, timeout_s=300, backend="nccl"
    )
    assert max(case.worst() for gaps, _ in found for case in gaps[path, True]) > 1e-4


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_nodes_and_mixed_paths(backend):
    cluster, processes = WORLDS["2 nodes of 2"]
    seeds = list(range(300, 305))
    results = run_ranks(
        processes, train_cases, seeds, cluster, 0.1, "", "cuda", ALL, timeout_s=300, backend=backend
    )  # fmt: skip
    compare(results, seeds)
    assert seen(results, "from_standing") > 0


def test_two_groups():
    cluster, processes = WORLDS["2 groups of 2"]
    seeds = list(range(400, 404))
    results = run_ranks(processes, train_cases, seeds, cluster, 0.1, "", "cuda", ALL, timeout_s=300, backend="nccl")
    compare(results, seeds)


@pytest.mark.parametrize("path", [Path.IPC, Path.HOST])
def test_the_comparison_notices(path):
    cluster, processes = WORLDS["4 ranks"]
    results = run_ranks(
        processes, train_cases, [100, 101, 102], cluster, 0.0, "drop gradients of copies", "cuda", (path,),
        timeout_s=300, backend="nccl",
    )  # fmt: skip
    assert max(case.worst() for cases in results for case in cases) > 1e-4
