"""A failure on one rank is an error on every rank that names the cause, within the timeout: on NCCL and every path.

Several groups of processes run at once. Not under MPS: a client that is killed may take the server with it.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
from tests.distributed.failing import fail_at
from tests.distributed.ranks import collect, start_ranks
from tests.distributed.test_failures import check

from equilibra.execute.copies.transfer import Path

TIMEOUT_S = 8.0
AT_ONCE = max(1, (os.cpu_count() or 4) // 4)
PATHS = [Path.COLLECTIVE, Path.HOST, Path.IPC, Path.BOTH]
POINTS = ["gather", "dispatch", "copies", "gradients", "standing", "arm", "plan", "migration", "optimizer"]
HOWS = ["die", "fail", "silent", "memory"]
QUICK = [
    ("dispatch", "die", Path.COLLECTIVE), ("copies", "die", Path.HOST), ("gradients", "die", Path.IPC),
    ("gradients", "die", Path.BOTH), ("dispatch", "silent", Path.IPC), ("copies", "silent", Path.COLLECTIVE),
    ("gradients", "silent", Path.HOST), ("optimizer", "silent", Path.BOTH), ("gradients", "fail", Path.IPC),
    ("dispatch", "memory", Path.COLLECTIVE), ("standing", "fail", Path.BOTH), ("copies", "memory", Path.IPC),
]  # fmt: skip


def outcomes(case, backend="nccl"):
    point, how, path = case
    processes, pipes, _ = start_ranks(4, fail_at, point, how, path, 1, "cuda", TIMEOUT_S, backend=backend)
    try:
        return collect(processes, pipes, timeout_s=90 + 5 * TIMEOUT_S)
    except AssertionError as error:
        return error


def check_all(cases, backend="nccl"):
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda case: outcomes(case, backend), cases))
    wrong = []
    for case, outcome in zip(cases, found, strict=True):
        try:
            if isinstance(outcome, AssertionError):
                raise outcome
            check(outcome, case[1], TIMEOUT_S)
        except AssertionError as error:
            wrong.append(f"{case}: {error}\n    {outcome}")
    assert not wrong, f"{len(wrong)} of {len(cases)}\n" + "\n".join(wrong)


def test_every_other_rank_gets_an_error():
    check_all(QUICK)


def test_also_where_gloo_carries_tokens():
    check_all(
        [("gradients", "die", Path.IPC), ("gradients", "silent", Path.BOTH), ("copies", "fail", Path.HOST)], "gloo"
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_at_every_point(how):
    check_all([case for case in product(POINTS, [how], PATHS) if case not in QUICK])


def test_a_slow_rank_is_waited_for():
    found = outcomes(("dispatch", "slow", Path.IPC))
    assert [outcome.value for outcome in found] == ["finished"] * 4, found
