"""slime's schedule packed again keeps what slime promises of it, and makes ranks wait less."""

import sys
from argparse import Namespace
from types import ModuleType

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.references import slime_schedule

from equilibra.core.errors import InputError
from equilibra.integrations.slime.schedule import build_dp_schedule

EXPERTS, RANKS = 8, 4


@pytest.fixture(autouse=True)
def slime(monkeypatch):
    for name in ("slime", "slime.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "slime.utils.dp_schedule", slime_schedule)


def arguments(**others):
    values = {
        "use_dynamic_batch_size": True, "max_tokens_per_gpu": 100, "balance_data": False, "micro_batch_size": 2,
        "expert_model_parallel_size": RANKS, "num_experts": EXPERTS, "moe_layer_freq": 1,
    }  # fmt: skip
    return Namespace(**{**values, **others})


def config(**others):
    return {"dp_size": RANKS, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1, **others}


def lengths_of(seed: int, num: int = 64, most: int = 100) -> list[int]:
    return np.random.default_rng(seed).integers(10, most, num).tolist()


def both(args, parallel, lengths, *, batch=32, rollouts=None, **routes):
    asked = {"global_batch_size": batch, "rollout_indices": rollouts or list(range(len(lengths)))}
    own = slime_schedule.build_dp_schedule(args, parallel, lengths, **asked)
    return own, build_dp_schedule(args, parallel, lengths, **asked, **routes)


def check(own, found, lengths, budget, multiple=1) -> None:
    """What slime promises of its schedules, and that steps have the same samples as in its own."""
    partitions, indices, counts, sizes = found
    assert sizes == own[3]
    assert len({len(of_rank) for of_rank in indices}) == 1
    assert len(indices[0]) == sum(counts)
    assert all(count % multiple == 0 and count <= before for count, before in zip(counts, own[2], strict=True))
    for partition, of_rank in zip(partitions, indices, strict=True):
        assert [at for places in of_rank for at in places] == list(range(len(partition)))
        for places in of_rank:
            assert places
            assert sum(lengths[partition[at]] for at in places) <= budget or len(places) == 1
    assert samples_of_steps(own) == samples_of_steps(found)


def samples_of_steps(schedule) -> list[list[int]]:
    partitions, indices, counts, _ = schedule
    steps, first = [], 0
    for count in counts:
        steps.append(
            sorted(
                partition[at]
                for partition, of_rank in zip(partitions, indices, strict=True)
                for places in of_rank[first : first + count]
                for at in places
            )
        )
        first += count
    return steps


def waiting(schedule, lengths) -> int:
    partitions, indices, counts, _ = schedule
    cost = [
        [sum(24_576 * lengths[p[at]] + lengths[p[at]] ** 2 for at in places) for places in of_rank]
        for p, of_rank in zip(partitions, indices, strict=True)
    ]
    return sum(max(of_rank[m] for of_rank in cost) for m in range(sum(counts)))


@pytest.mark.parametrize("balance", [False, True])
def test_ranks_wait_less(balance):
    lengths = lengths_of(1)
    own, found = both(arguments(balance_data=balance), config(), lengths)
    check(own, found, lengths, 100)
    assert waiting(found, lengths) < 0.95 * waiting(own, lengths)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999), num=st.integers(24, 80), most=st.integers(20, 140), ranks=st.integers(1, 4),
    samples_of_rollout=st.integers(1, 3), balance=st.booleans(), virtual=st.booleans(),
)  # fmt: skip
def test_promises_are_kept(seed, num, most, ranks, samples_of_rollout, balance, virtual):
    lengths = lengths_of(seed, num * samples_of_rollout, most)
    parallel = config(dp_size=ranks, vpp_size=1 + virtual, microbatch_group_size_per_vp_stage=2)
    rollouts = [number // samples_of_rollout for number in range(len(lengths))]
    try:
        own, found = both(arguments(balance_data=balance), parallel, lengths, batch=24, rollouts=rollouts)
    except AssertionError as error:
        assume(str(error) != "too few samples")
        raise
    check(own, found, lengths, 100, multiple=1 + virtual)
    assert waiting(found, lengths) <= waiting(own, lengths)


def test_micro_batches_of_a_fixed_size_stay_as_they_are():
    own, found = both(arguments(use_dynamic_batch_size=False), config(), lengths_of(2))
    assert found == own


def test_a_step_with_a_sample_above_the_budget_stays_as_it_is():
    lengths = lengths_of(3)
    lengths[5] = 250
    own, found = both(arguments(), config(), lengths)
    check(own, found, lengths, 100)
    at = own[2][0]
    assert [of_rank[:at] for of_rank in found[1]] == [of_rank[:at] for of_rank in own[1]]
    assert waiting(found, lengths) < waiting(own, lengths), "the other step is packed again"


def routed(lengths: list[int], seed: int = 0, layers: int = 3) -> list[np.ndarray]:
    """Every sample prefers two experts of its own."""
    rng = np.random.default_rng(seed)
    found = []
    for length in lengths:
        hot = rng.permutation(EXPERTS)[:2]
        ids = np.where(rng.random((length - 1, layers, 1)) < 0.8, hot, (hot + 1) % EXPERTS)
        found.append(ids.astype(np.int32))
    return found


def static_imbalance(schedule, routes) -> float:
    partitions, indices, counts, _ = schedule
    ratios = []
    for m in range(sum(counts)):
        samples = [p[at] for p, of_rank in zip(partitions, indices, strict=True) for at in of_rank[m]]
        for layer in range(routes[0].shape[1]):
            ids = np.concatenate([routes[s][:, layer].ravel() for s in samples])
            load = np.bincount(ids // (EXPERTS // RANKS), minlength=RANKS)
            ratios.append(load.max() / load.mean())
    return float(np.mean(ratios))


def test_routes_spread_the_experts_and_cost_no_waiting():
    lengths = lengths_of(4, 256, 60)
    routes = routed(lengths)
    own, blind = both(arguments(), config(), lengths, batch=128)
    _, seeing = both(arguments(), config(), lengths, batch=128, routed_experts=routes)
    check(own, seeing, lengths, 100)
    assert waiting(seeing, lengths) <= waiting(blind, lengths)
    assert static_imbalance(seeing, routes) < 0.97 * static_imbalance(blind, routes)


def test_dense_layers_have_no_routes():
    lengths = lengths_of(4, 128, 60)
    routes = routed(lengths)
    dense = [np.concatenate([np.zeros_like(one[:, :1]), one], axis=1) for one in routes]
    _, without = both(arguments(), config(), lengths, routed_experts=routes)
    _, found = both(arguments(moe_layer_freq=[0, 1, 1, 1]), config(), lengths, routed_experts=dense)
    assert found == without


def test_a_sample_without_routes():
    lengths = lengths_of(4)
    routes = [None, *routed(lengths)[1:]]
    _, blind = both(arguments(), config(), lengths)
    assert both(arguments(), config(), lengths, routed_experts=routes)[1] == blind


def test_routes_of_another_model_are_refused():
    lengths = lengths_of(4)
    with pytest.raises(InputError, match="experts 0 to 3 of --num-experts 4"):
        both(arguments(num_experts=4), config(), lengths, routed_experts=routed(lengths))
