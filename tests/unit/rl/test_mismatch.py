"""The comparison of the engine's log-probabilities with the trainer's: which tokens, which limit, what is said."""

import numpy as np
import pytest
import torch

from equilibra.core.errors import MismatchError
from equilibra.core.placement import Cluster
from equilibra.execute.group import join_expert_group
from equilibra.rl.engine import Sample
from equilibra.rl.mismatch import Mismatch, MismatchCheck, measure_mismatch, mismatch_limit, unit_roundoff

ALONE = join_expert_group(Cluster(num_nodes=1, ranks_per_node=1))


def grown(sample, logprobs, version):
    answer = np.arange(len(logprobs))
    rows = sample.prompt.size + sample.answer.size + answer.size - 1
    experts = np.zeros((rows, 1, 1), np.int32)
    return sample.grown(answer=answer, logprobs=np.array(logprobs), experts=experts, version=version, finished=False)


BEGUN = Sample(problem=0, group=0, number=0, prompt=np.array([1, 2]))


def test_only_tokens_of_this_steps_window_are_compared():
    """T-PPO: an answer holds tokens of several versions; those of older ones differ, and should."""
    sample = grown(grown(BEGUN, [-1.0, -2.0], version=3), [-0.5, -0.25], version=5)
    found = measure_mismatch([sample], [np.array([-4.0, -7.0, -0.5, -0.75])], ALONE)
    assert (found.mean, found.largest, found.num_tokens) == (0.25, 0.5, 2)
    assert (found.oldest, found.newest) == (5, 5)


def test_versions_of_all_answers_count():
    samples = [grown(BEGUN, [-1.0], version=4), grown(BEGUN, [-1.0], version=2)]
    found = measure_mismatch(samples, [np.array([-1.0])] * 2, ALONE)
    assert (found.oldest, found.newest) == (2, 4)
    check = MismatchCheck(limit=1.0, stop=True, say=print)
    with pytest.raises(MismatchError, match="answered with weights of version 2, but was given version 4"):
        check(found, step=7, version=4)


def test_a_step_without_answers_says_nothing():
    found = measure_mismatch([], [], ALONE)
    MismatchCheck(limit=0.0, stop=True, say=print)(found, step=0, version=9)
    assert (found.mean, found.largest) == (0.0, 0.0)


@pytest.mark.parametrize(("mean", "stop", "ends"), [(0.9, True, ""), (1.1, True, "error"), (1.1, False, "line")])
def test_the_limit(mean, stop, ends):
    said = []
    check = MismatchCheck(limit=1.0, stop=stop, say=said.append)
    found = Mismatch(mean=mean, largest=3.0, num_tokens=50, oldest=2, newest=2)
    if ends == "error":
        with pytest.raises(MismatchError, match=r"by 1\.1 on average \(at most 3\), rounding explains 1\."):
            check(found, step=1, version=2)
    else:
        check(found, step=1, version=2)
    assert len(said) == (ends == "line")


def test_the_coarsest_type_decides():
    on_cpu = [unit_roundoff(kind, "cpu") for kind in (torch.float64, torch.float32, torch.float16, torch.bfloat16)]
    assert on_cpu == [2.0**-24, 2.0**-24, 2.0**-11, 2.0**-8]
    assert unit_roundoff(torch.float32, "cuda") == 2.0**-11  # TF32
    limit = mismatch_limit(on_cpu, num_layers=16, temperature=1.0)
    assert limit == mismatch_limit(on_cpu, num_layers=16, temperature=2.0) == 16 * 2.0**-8 + 2.0**-20
    assert mismatch_limit(on_cpu, num_layers=16, temperature=0.5) == 2 * limit
    assert mismatch_limit(on_cpu, num_layers=64, temperature=1.0) == pytest.approx(2 * limit, rel=1e-3)
