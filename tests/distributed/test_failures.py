"""A failure on one rank is an error on every rank, within the timeout, and never a hang."""

import pytest
from tests.distributed.failing import TIMEOUT_S, fail_at
from tests.distributed.ranks import collect, start_ranks

from equilibra.execute.copies.transfer import Path

OURS = ("RankLostError", "MismatchError", "BrokenStateError", "ExecuteError: planning the step failed")
SAID = {"fail": "ValueError: a defect on one rank", "memory": "OutOfMemoryError: CUDA out of memory. Tried to allocate"}
"""what every rank says of it"""


def outcomes(point, how, path):
    processes, pipes, _ = start_ranks(4, fail_at, point, how, path)
    return collect(processes, pipes, timeout_s=60 + 5 * TIMEOUT_S)


@pytest.mark.parametrize(
    ("point", "how", "path"),
    [
        ("dispatch", "die", Path.COLLECTIVE),
        ("copies", "die", Path.HOST),
        ("gradients", "fail", Path.COLLECTIVE),
        ("gradients", "memory", Path.HOST),
        ("plan", "fail", Path.COLLECTIVE),
        ("standing", "silent", Path.HOST),
    ],
)
def test_every_other_rank_gets_an_error(point, how, path):
    check(outcomes(point, how, path), how)


@pytest.mark.slow
@pytest.mark.parametrize("path", [Path.COLLECTIVE, Path.HOST])  # the others are between GPUs
@pytest.mark.parametrize("how", ["die", "fail", "silent"])
@pytest.mark.parametrize(
    "point", ["gather", "dispatch", "copies", "gradients", "standing", "arm", "plan", "migration", "optimizer"]
)
def test_at_every_point(point, how, path):
    check(outcomes(point, how, path), how)


def check(found, how, timeout_s=TIMEOUT_S):
    victim, others = found[1], [found[0], *found[2:]]
    if how == "die":
        assert victim.died == -9
    elif how in SAID:
        assert (victim.error or "").startswith(SAID[how].partition(":")[0]), victim
    for outcome in others:
        assert outcome.error is not None, outcome
        assert outcome.error.startswith(OURS), outcome.error
        assert SAID.get(how, "") in outcome.error, outcome.error
        assert outcome.seconds < 30 + 3 * timeout_s


def test_a_slow_rank_is_waited_for():
    assert [outcome.value for outcome in outcomes("dispatch", "slow", Path.COLLECTIVE)] == ["finished"] * 4


def test_ranks_with_other_plans_say_both_hashes():
    found = outcomes("another plan", "", Path.COLLECTIVE)
    texts = [outcome.error for outcome in found]
    assert all(text is not None and text.startswith("MismatchError") for text in texts), texts
    assert len(set(texts)) == 1
    assert texts[0].count("plan ") >= 3, "rank 0 has plan <hash>, rank 1 has plan <hash>"
