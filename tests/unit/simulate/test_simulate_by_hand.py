"""Timelines small enough to compute on paper, to the microsecond."""

from dataclasses import replace

import numpy as np
import pytest
from tests.references.machines import round_hardware, small_model

from equilibra.core.load import SequenceLoad
from equilibra.core.placement import Cluster
from equilibra.cost.rates import rates_for
from equilibra.plan.planner import planner_named
from equilibra.simulate.scenario import step_problems
from equilibra.simulate.step import simulate_step
from equilibra.simulate.timeline import run_group
from equilibra.simulate.times import Pricing, RunSetting, Times

UPDATE_ONLY = RunSetting(logprob_stage=False, activation_recompute=False)


def nothing(layers: int, micro_batches: int, ranks: int, nodes: int = 1) -> Times:
    """Times of a step in which everything is free."""
    by_rank, by_node = (layers, micro_batches, ranks), (layers, micro_batches, nodes)
    return Times(
        attention_us=np.zeros((2, micro_batches, ranks)), outer_us=np.zeros((2, micro_batches, ranks)),
        experts_us=np.zeros((3, *by_rank)), slowed_us=np.zeros((3, *by_rank)), inside_us=np.zeros((2, *by_rank)),
        across_us=np.zeros((2, *by_rank)), flash_us=np.zeros((2, *by_node)), flash_return_us=np.zeros(by_node),
        setup_inside_us=np.zeros((2, layers)), setup_across_us=np.zeros((2, layers)),
        return_inside_us=np.zeros(layers), return_across_us=np.zeros(layers), reduce_us=0.0,
        plan_ready_us=np.zeros(layers), latency_us=0.0, counts_us=0.0, exposed_copies=False, optimizer_us=0.0,
        hop_us=np.zeros(micro_batches), host_path=(False, False),
    )  # fmt: skip


def two_layers() -> Times:
    """One node of two ranks, two layers, one micro-batch.

    attention forward 10 / 20, backward 30 / 25; all-to-all 5 + 8; outer parts 11 and 22; optimizer 7;
    experts forward 40 / 50 and 60 / 30, backward 80 / 100 and 120 / 60.

        forward  layer 0:  20 attention, 33 dispatched,  83 computed,  96 combined
        forward  layer 1: 116 attention, 129 dispatched, 189 computed, 202 combined
        output head forward 213, backward 235
        backward layer 1: 248 dispatched, 368 computed, 381 combined, 411 attention
        backward layer 0: 424 dispatched, 524 computed, 537 combined, 567 attention
        optimizer 574
    """
    free = nothing(2, 1, 2)
    experts = np.array([[[[0, 0]], [[0, 0]]], [[[40, 50]], [[60, 30]]], [[[80, 100]], [[120, 60]]]], float)
    return replace(
        free,
        attention_us=np.array([[[10.0, 20]], [[30, 25]]]),
        outer_us=np.array([[[11.0, 11]], [[22, 22]]]),
        experts_us=experts,
        inside_us=np.broadcast_to(np.array([8.0, 6]), (2, 2, 1, 2)),
        latency_us=5.0,
        optimizer_us=7.0,
    )


def with_copy(us: float) -> Times:
    """Layer 1 has a flash copy that takes so long on NVLink."""
    times = two_layers()
    flash = np.zeros_like(times.flash_us)
    flash[1, 1, 0, 0] = us
    return replace(times, flash_us=flash)


def test_two_layers_forward_and_backward():
    found = run_group(two_layers(), UPDATE_ONLY, window=0)
    assert found.step_us == 574
    assert found.layer_us_PLM[:, :, 0].tolist() == [[0, 0], [96, 106], [156, 176]]
    [record] = found.records
    assert record.begin_us.tolist() == [0, 96, 235, 411]
    rows = record.times_us  # attention start and end, dispatched, experts start and end, combined
    assert rows[0].tolist() == [[0, 10, 33, 33, 73, 96], [0, 20, 33, 33, 83, 96]]
    assert rows[2].tolist() == [[381, 411, 248, 248, 368, 381], [381, 406, 248, 248, 308, 381]]


def test_a_copy_that_fits_into_the_gaps_is_hidden():
    # Layer 1's copy may start with layer 0 and has the link from 0 to 20, 33 to 83 and 96 to 116: 90 us. The second
    # fetch, for the backward pass, starts with layer 1 (96) after the first: 129 to 189 and 202 to 235, 93 us.
    assert run_group(with_copy(90), UPDATE_ONLY).step_us == 574


def test_a_copy_that_does_not_fit_is_waited_for_by_exactly_the_rest():
    # 100 us: 90 fit, layer 1 waits 10 more. From then on 139 to 199 and 212 to 245 are 93 of the second fetch's 100:
    # the backward pass waits 7. Together 17.
    assert run_group(with_copy(100), UPDATE_ONLY).step_us == 574 + 10 + 7


def test_without_prefetch_a_copy_has_only_the_layers_own_attention():
    # 90 us: 96 to 116 are 20, so layer 1 waits 70. Backward nothing comes before dispatch: all 90 are waited for.
    setting = replace(UPDATE_ONLY, prefetch_depth=0)
    assert run_group(with_copy(90), setting).step_us == 574 + 70 + 90
    assert run_group(with_copy(20), setting).step_us == 574 + 0 + 20


def test_an_online_planner_waits_for_counts_and_copies():
    # Forward each layer counts for 9. Layer 1's copy starts after its dispatch: 30 all exposed. The weights are fetched
    # anew for the backward pass, known by then: from 202 + 48 on, while the output head runs 33: hidden.
    times = replace(with_copy(30), counts_us=9.0, exposed_copies=True)
    assert run_group(times, UPDATE_ONLY).step_us == 574 + 9 + 9 + 30
    assert run_group(times.without_overhead(), UPDATE_ONLY).step_us == 574


def test_the_host_link_is_never_interrupted():
    # From 0 to 129 without a break: 129 fit. The second fetch has 129 to 248: 119 of 129, 10 are waited for.
    times = replace(with_copy(129), host_path=(False, True))
    assert run_group(times, UPDATE_ONLY).step_us == 574 + 10


def test_the_optimizer_waits_for_gradients():
    # Layer 0's gradients leave after its combine (537), 50 us later the optimizer may start; the reduction over
    # replicas has the network for itself: 40 for layer 1 from 411, 40 for layer 0 from 542 (latency 5 after 524 + 13).
    times = two_layers()
    back = replace(times, flash_return_us=np.array([[[50.0]], [[0.0]]]))
    assert run_group(back, UPDATE_ONLY).step_us == 537 + 50 + 7
    assert run_group(replace(times, reduce_us=80.0), UPDATE_ONLY).step_us == 524 + 5 + 80 + 7


def test_planning_and_moved_homes_are_waited_for():
    # The plan is there at 50 (30 later than attention), then 100 us of standing copies come, of which 13 run during
    # dispatch: the network does not carry tokens, only the latency of 5 is kept free.
    times = replace(two_layers(), plan_ready_us=np.array([50.0, 50.0]))
    assert run_group(times, UPDATE_ONLY).step_us == 574 + 30
    moved = replace(times, setup_across_us=np.array([[100.0, 0], [100, 0]]))
    assert run_group(moved, UPDATE_ONLY).step_us == 574 + 30 + (5 + 100 - 13)


def test_activation_recompute_runs_every_layer_again():
    # Each backward visit is preceded by a forward one: 106 for layer 1 more, and 91 for layer 0, where rank 1 begins
    # its 20 of attention 5 before rank 0 is through with layer 1.
    setting = RunSetting(logprob_stage=False, activation_recompute=True)
    found = run_group(two_layers(), setting, window=0)
    assert found.step_us == 574 + 106 + 91
    assert found.layer_us_PLM[2, :, 0].tolist() == [156 + 91, 176 + 106]


def test_two_pipeline_stages_have_their_bubble():
    # A layer per stage, two micro-batches: forward 10, backward 10 again + 20, a hop 1.
    #   stage 0: F0 0-10, F1 10-20,                          B0 52-82,          B1 92-122, optimizer 127
    #   stage 1:          F0 11-21, B0 21-51, F1 51-61, B1 61-91, optimizer 96
    free = nothing(2, 2, 1)
    experts = np.zeros((3, 2, 2, 1))
    experts[1], experts[2] = 9, 18
    times = replace(free, experts_us=experts, attention_us=np.stack([np.full((2, 1), 1.0), np.full((2, 1), 2.0)]),
                    hop_us=np.ones(2), optimizer_us=5.0)  # fmt: skip
    setting = RunSetting(logprob_stage=False, pipeline_stages=2)
    found = run_group(times, setting)
    assert found.step_us == 127
    assert found.records[0].begin_us.tolist() == [0, 10, 52, 62, 92, 102]
    assert found.records[1].begin_us.tolist() == [11, 21, 31, 51, 61, 71]
    assert run_group(times, replace(setting, pipeline_stages=1)).step_us == 2 * (20 + 60) + 5


def test_two_optimizer_steps_fetch_standing_copies_twice():
    # One layer, two micro-batches, an optimizer step each: experts 10 and 20, a standing copy 100 in and 50 back.
    #   100 copied, 110 forward, 130 backward, 180 gradient home, 185 optimizer; and the same again from 185.
    experts = np.array([0.0, 10, 20])[:, None, None, None] * np.ones((3, 1, 2, 1))
    times = replace(nothing(1, 2, 1), experts_us=experts, setup_across_us=np.full((2, 1), 100.0),
                    return_across_us=np.array([50.0]), optimizer_us=5.0)  # fmt: skip
    setting = replace(UPDATE_ONLY, optimizer_steps=2)
    assert run_group(times, setting).step_us == 2 * 185
    inside = replace(times, setup_inside_us=times.setup_across_us, return_inside_us=times.return_across_us,
                     setup_across_us=np.zeros((2, 1)), return_across_us=np.zeros(1))  # fmt: skip
    for depth in (0, 1, 3):  # gradients of the first step are no credit for copies of the second
        assert run_group(inside, replace(setting, prefetch_depth=depth)).step_us == 2 * 185


def test_a_whole_step_from_tokens_to_seconds():
    """Two sequences of 100 tokens on two ranks, one layer, two experts, top-1, static placement.

    A row is 1000 wide: 2 us on NVLink, 2 * 3 * 1000 * 500 FLOP: 3 us forward, 6 backward, 10 for any call. Dense parts
    2 us a token, attention 2 * 1000 * 100² FLOP: 20 us. Expert 0 has 175 tokens, 75 of them on its rank; expert 1 has
    25, all from the other rank. So NVLink carries 100 rows one way: 200 us, and every all-to-all takes 205.

        forward   220 + 7 counts + 205 + (10 + 525) + 205 = 1172, twice (log-prob, update): 2344
        backward  forward again without counts: 1165, 3509
                  205 + (10 + 1050) + 205: 4979, attention 2 * 200 + 2.5 * 20: 5429
        gradients of a million dense weights, 6 bytes, half of them over NVLink: 3000 us from 4779 (latency after
                  experts) on: 7779

    Balanced: 100 rows and 62.5 on the links, 125 us: forward 220 + 130 + 310 + 130 = 790; the third backward part ends
    at 3 * 790 + 130 + 610 + 5 = 3115, and 3000 more are 6115.
    """
    model = small_model(
        num_layers=1, num_experts=2, top_k=1, hidden=1000, expert_ffn=500, dense_parameters=10**6, attention_width=1000
    )
    machine, cluster = round_hardware(hbm_gb_per_s=1e12), Cluster(num_nodes=1, ranks_per_node=2)
    sequences = SequenceLoad(
        tokens_SLE=np.array([[[75, 25]], [[100, 0]]], np.int32), length_of_sequence=np.array([100, 100])
    )
    problems = step_problems(
        sequences, cluster, rates_for(model, machine), tokens_per_microbatch=200, ranks_per_sequence=1
    )
    setting = RunSetting()
    result = simulate_step(
        problems, planner_named("static"), Pricing(model=model, hardware=machine, cluster=cluster, setting=setting)
    )
    assert result.step_s == pytest.approx(7779e-6, abs=1e-9)
    assert result.ideal_s == pytest.approx(6115e-6, abs=1e-9)
    assert result.exposed_s == pytest.approx(2 * 7e-6, abs=1e-9)
    assert result.num_tokens == 200
    assert result.imbalances().tolist() == [1.75]
    [group] = result.groups
    assert group.times.inside_us.ravel().tolist() == [200.0] * 4
    assert group.copy_bytes == group.migration_bytes == 0
