"""The order of passes: complete, causal, 1F1B, and optimizer steps do not mix."""

import numpy as np
import pytest
from tests.references.machines import round_hardware, small_model
from tests.references.timeline import one_forward_one_backward

from equilibra.core.errors import InputError
from equilibra.core.placement import Cluster
from equilibra.core.visit import Stage
from equilibra.events.schema import Direction
from equilibra.simulate.timeline import chunks, passes_of_stage, visits_of
from equilibra.simulate.times import Pricing, RunSetting

CASES = [(stages, micro, steps) for stages in (1, 2, 3, 5) for micro in (1, 2, 4, 7) for steps in (1, 2, 3)]


@pytest.mark.parametrize(("stages", "micro_batches", "steps"), CASES)
def test_every_pass_runs_once_and_forward_comes_first(stages, micro_batches, steps):
    setting = RunSetting(pipeline_stages=stages, optimizer_steps=steps)
    for number in range(stages):
        passes = passes_of_stage(number, micro_batches, setting)
        assert len(set(passes)) == len(passes) == 3 * micro_batches
        logprob, update = passes[:micro_batches], passes[micro_batches:]
        assert [one.micro_batch for one in logprob] == list(range(micro_batches))
        assert {one.stage for one in logprob} == {Stage.LOGPROB}
        when = {(one.direction, one.micro_batch): i for i, one in enumerate(update)}
        for m in range(micro_batches):
            assert when[Direction.FORWARD, m] < when[Direction.BACKWARD, m]
        for direction in (Direction.FORWARD, Direction.BACKWARD):
            order = [one.micro_batch for one in update if one.direction is direction]
            assert order == sorted(order)
        assert [one.chunk for one in update] == sorted(one.chunk for one in update)
        in_flight = np.cumsum([1 if one.direction is Direction.FORWARD else -1 for one in update])
        assert in_flight.min() == 0  # the last of it
        assert in_flight.max() <= stages - number
        expected = [
            one for part in chunks(micro_batches, steps) for one in one_forward_one_backward(part, stages, number)
        ]
        letters = {Direction.FORWARD: "F", Direction.BACKWARD: "B"}
        assert [(letters[one.direction], one.micro_batch) for one in update] == expected


def test_chunks_are_even_and_complete():
    for micro_batches in range(1, 20):
        for steps in range(1, 25):
            parts = chunks(micro_batches, steps)
            assert [m for part in parts for m in part] == list(range(micro_batches))
            assert len(parts) == min(steps, micro_batches)
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_last_stage_alternates_and_the_first_starts_all():
    setting = RunSetting(pipeline_stages=3, logprob_stage=False)
    letters = ["".join("FB"[one.direction] for one in passes_of_stage(n, 5, setting)) for n in range(3)]
    assert letters == ["FFFBFBFBBB", "FFBFBFBFBB", "FBFBFBFBFB"]


@pytest.mark.parametrize("again", [True, False])
def test_visits_go_through_the_layers_and_back(again):
    setting = RunSetting(optimizer_steps=2)
    visits = visits_of(passes_of_stage(0, 2, setting), range(3, 6), activation_recompute=again)
    logprob = visits.stage == Stage.LOGPROB.number
    assert visits.layer[logprob].tolist() == [3, 4, 5, 3, 4, 5]
    assert visits.layer[visits.direction == Direction.BACKWARD].tolist() == [5, 4, 3, 5, 4, 3]
    assert np.count_nonzero(visits.direction == Direction.FORWARD_AGAIN) == 6 * again
    if again:
        for v in np.flatnonzero(visits.direction == Direction.FORWARD_AGAIN):
            assert visits.direction[v + 1] == Direction.BACKWARD
            assert visits.layer[v + 1] == visits.layer[v]
    # weights change after micro-batch 0's backward pass: log-prob and the first optimizer step share theirs
    ends = np.unique(visits.last_of_chunk)
    assert ends.tolist() == [6 + 3 + 3 * (1 + again) - 1, visits.layer.size - 1]
    assert (visits.last_of_chunk >= np.arange(visits.layer.size)).all()


def test_more_pipeline_stages_than_layers_are_refused():
    model, cluster = small_model(num_layers=2), Cluster(num_nodes=1, ranks_per_node=2)
    with pytest.raises(InputError, match="2 layers cannot fill 3 pipeline stages"):
        Pricing(model=model, hardware=round_hardware(), cluster=cluster, setting=RunSetting(pipeline_stages=3))


@pytest.mark.parametrize("change", [
    {"prefetch_depth": -1}, {"prefetch_depth": 1001}, {"prefetch_depth": 1.0}, {"pipeline_stages": 0},
    {"pipeline_stages": True}, {"data_parallel": 0}, {"optimizer_steps": 0}, {"optimizer_steps": "2"},
])  # fmt: skip
def test_settings_that_make_no_sense(change):
    with pytest.raises(InputError, match=next(iter(change))):
        RunSetting(**change)
