"""A GPTModel under Megatron's schedules, DDP and DistributedOptimizer learns the same, balanced or not."""

import numpy as np
import pytest
import torch
from tests.distributed.ranks import run_ranks
from tests.megatron_core import attention_runs, gpt_runs, interleaved_runs
from tests.megatron_core.gpt_runs import FULL, SELECTIVE, Case


def same(found: list[dict], *, moves: bool = False, most: float = 1.05) -> None:
    assert any(one["plain"][0] for one in found)
    for one in found:
        np.testing.assert_allclose(one["balanced"], one["plain"], rtol=2e-6)
        assert one["weights"] < 2e-5
        assert one["copies"] > 0
        assert (one["moves"] > 0) == moves
        assert one["planned"] < most < one["static"]


def apart(found: list[dict]) -> None:
    assert max(one["weights"] for one in found) > 1e-3
    assert any(abs(a - b) > 1e-3 for one in found for a, b in zip(one["balanced"], one["plain"], strict=True))


def test_two_expert_ranks_and_two_replicas_with_moving_homes_and_full_recompute() -> None:
    same(run_ranks(4, gpt_runs.against_plain, Case(options=FULL, homes="shuffled")), moves=True)


def test_two_pipeline_stages_with_micro_batches_in_flight_and_full_recompute() -> None:
    same(run_ranks(4, gpt_runs.against_plain, Case(pipeline=2, num_layers=4, options=FULL)))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(tensor=2), marks=pytest.mark.slow),
        pytest.param(Case(context=2), marks=pytest.mark.slow),
        Case(expert_parallel=4, tensor=2, context=2, options=FULL, homes="shuffled"),
    ],
    ids=["tensor", "context", "both"],
)
def test_whole_models_under_tensor_and_context_parallelism(case: Case) -> None:
    """Two modules stand in for those of Transformer Engine; ranks that share a sequence keep the same norms."""
    found = run_ranks(4, gpt_runs.against_plain, case)
    same(found, moves=case.homes == "shuffled")
    for one in found:
        np.testing.assert_allclose(one["norms"], found[0]["norms"], rtol=0, atol=1e-6)
    assert np.max(found[0]["norms"]) > 1 + 1e-3, "they are trained"


@pytest.mark.slow
def test_dropped_gradients_are_noticed_under_tensor_parallelism() -> None:
    apart(run_ranks(4, gpt_runs.against_plain, Case(tensor=2, sabotage="drop gradients of copies")))


def test_the_attention_that_stands_in_is_megatrons() -> None:
    assert max(run_ranks(2, attention_runs.against_whole_sequences)) < 2e-6


@pytest.mark.parametrize("kinds", [[0, 0, 1, 1], pytest.param([0, 1, 1, 1], marks=pytest.mark.slow)])
def test_pipeline_stages_with_different_numbers_of_moe_layers(kinds: list[int]) -> None:
    """Also with none: every stage plans for itself."""
    case = Case(pipeline=2, num_layers=4, options={**FULL, "moe_layer_freq": kinds}, homes="shuffled")
    found = run_ranks(4, gpt_runs.against_plain, case)
    assert [one["layers"] for one in found] == [sum(kinds[:2])] * 2 + [sum(kinds[2:])] * 2
    same([one for one in found if one["layers"]], moves=True)
    for one in found:
        assert one["weights"] < 2e-5
        assert one["layers"] or (one["copies"], one["static"], one["planned"]) == (0, 1, 1)


def test_models_without_moe_layers_are_refused() -> None:
    for said in run_ranks(2, gpt_runs.nothing_to_balance):
        assert "there is nothing to balance: no pipeline stage of the model has MoE layers" in said


def test_homes_move_to_the_bit_with_masters_in_float32() -> None:
    """In bfloat16 the optimizer has masters apart from the weights. Without copies an expert's products have the same
    shapes wherever it is, and without clipping no sum runs over experts.
    """
    case = Case(options={"bf16": True, "params_dtype": torch.bfloat16}, homes="shuffled", spare_slots=0)
    for found in run_ranks(4, gpt_runs.against_plain, case):
        assert found["balanced"] == found["plain"]
        assert found["weights"] == 0
        assert found["moves"] > 0


@pytest.mark.parametrize(
    "case",
    [pytest.param(Case(), marks=pytest.mark.slow), Case(options=FULL, fused=True, overlap=True)],
    ids=["plain", "fused"],
)
def test_gradients_of_copies_in_bfloat16(case: Case) -> None:
    """In main_grad, which is float32: as near to exact ones as without copies; losses are as near."""
    for found in run_ranks(2, gpt_runs.short_gradients, case):
        assert found["dtypes"] == {"torch.float32"}
        assert found["copies"] > 0
        assert found["losses"]["balanced"] == pytest.approx(found["losses"]["plain"], rel=2**-8)
        assert found["losses"]["plain"] != found["losses"]["exact"], "the control: it is computed in bfloat16"
        assert found["balanced"] < 1.1 * found["plain"]
        assert found["apart"] < 2**-7, "two roundings of bfloat16"


def test_dropped_gradients_are_noticed_in_bfloat16() -> None:
    for found in run_ranks(2, gpt_runs.short_gradients, Case(sabotage="drop gradients of copies")):
        assert found["balanced"] > 5 * found["plain"]
        assert found["apart"] > 2**-3


def test_fused_gradients_with_overlapped_reduction() -> None:
    same(run_ranks(2, gpt_runs.against_plain, Case(fused=True, overlap=True)))


@pytest.mark.slow
def test_four_pipeline_stages() -> None:
    same(run_ranks(8, gpt_runs.against_plain, Case(pipeline=4, num_layers=4, options=FULL)))


@pytest.mark.parametrize("homes", [pytest.param("stay", marks=pytest.mark.slow), "shuffled"])
def test_weights_that_are_gathered_during_the_next_forward(homes: str) -> None:
    case = Case(overlap=True, gather=True, homes=homes, options=FULL)
    same(run_ranks(4, gpt_runs.against_plain, case), moves=homes == "shuffled")


def test_copies_of_weights_that_were_not_gathered_are_noticed() -> None:
    apart(run_ranks(4, gpt_runs.against_plain, Case(overlap=True, gather=True, sabotage="do not wait for weights")))


def test_replay_through_verl_with_rows_that_are_routed_live() -> None:
    same(run_ranks(2, gpt_runs.against_plain, Case(options=SELECTIVE, verl=True)))


def test_a_pass_without_backward_before_the_update() -> None:
    for found in run_ranks(2, gpt_runs.two_passes):
        plain, balanced = found["losses"]
        np.testing.assert_allclose(balanced, plain, rtol=2e-6)
        assert plain[0] == plain[1] != plain[2]
        assert "forward 4 of MoE layer 0 has no plan: the step has 3 micro-batches" in found["said"]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(options=FULL, homes="shuffled"), marks=pytest.mark.slow),
        Case(pipeline=2, num_layers=4, options=FULL),
        pytest.param(Case(num_layers=4, options={**FULL, "recompute_num_layers": 2}), marks=pytest.mark.slow),
        pytest.param(Case(num_layers=3, options={**FULL, "recompute_method": "block"}), marks=pytest.mark.slow),
        pytest.param(Case(num_layers=3, options=SELECTIVE), marks=pytest.mark.slow),
        pytest.param(Case(pipeline=2, num_layers=4), marks=pytest.mark.slow),
    ],
    ids=["moved homes", "pipeline", "two layers at a time", "block", "selective", "pipeline without recompute"],
)
def test_copies_fetched_ahead_are_those_fetched_when_used(case: Case) -> None:
    """To the bit; most of them are on their way before their layer begins, and none is left over."""
    found = run_ranks(2 * case.pipeline, gpt_runs.ahead_against_late, case)
    assert any(one["late"][0] for one in found)
    for one in found:
        assert one["ahead"] == one["late"]
        assert one["weights"] == 0
        assert one["visits ahead"] > one["visits late"]
        assert one["left"] == 0


def test_copies_of_another_layer_are_noticed() -> None:
    case = Case(sabotage="fetch copies of another layer ahead")
    for one in run_ranks(2, gpt_runs.ahead_against_late, case):
        assert max(abs(a - b) for a, b in zip(one["ahead"], one["late"], strict=True)) > 1e-3
        assert one["weights"] > 1e-3


def test_steps_that_are_planned_while_another_runs() -> None:
    for found in run_ranks(2, gpt_runs.prepared_against_planned):
        for one in found:
            assert one["losses"][0] == one["losses"][1]
            assert one["digests"][0] == one["digests"][1]
            assert len(set(one["digests"][0])) == 3
        assert [one["moves"] > 0 for one in found] == [False, True]


def test_copies_on_their_way_are_waited_for_when_a_pass_is_cut_off() -> None:
    for found in run_ranks(2, gpt_runs.cut_off):
        late, ahead = found["losses"]
        assert late == ahead
        assert found["left"] == [1, 0, 1, 0]


@pytest.mark.parametrize(
    "case",
    [
        Case(sabotage="drop gradients of copies"),
        Case(sabotage="leave main_grad alone", fused=True),
        Case(sabotage="leave optimizer state behind", homes="shuffled"),
    ],
    ids=lambda case: case.sabotage,
)
def test_controls_are_noticed(case: Case) -> None:
    apart(run_ranks(2, gpt_runs.against_plain, case))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, FULL, SELECTIVE], ids=["none", "full", "selective"])
@pytest.mark.parametrize("homes", ["stay", "shuffled"])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_every_way_of_recompute(pipeline: int, homes: str, options: dict) -> None:
    case = Case(pipeline=pipeline, num_layers=2 * pipeline, homes=homes, options=options)
    same(run_ranks(4, gpt_runs.against_plain, case), moves=homes == "shuffled")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, FULL], ids=["none", "full"])
def test_interleaved_pipeline(options: dict) -> None:
    found = run_ranks(4, interleaved_runs.against_plain, options)
    assert any(one["losses"][0][0] for one in found)
    for one in found:
        plain, late, ahead = one["losses"]
        np.testing.assert_allclose(ahead, plain, rtol=2e-6)
        assert one["weights"] < 2e-5
        assert late == ahead
        assert one["weights of late"] == 0
        assert one["copies"] > 0
        assert one["visits ahead"] > 0
        assert one["left"] == 0


@pytest.mark.slow
def test_homes_that_the_planner_moves_between_nodes() -> None:
    case = Case(expert_parallel=4, homes="planned", options=FULL)
    same(run_ranks(4, gpt_runs.against_plain, case), moves=True, most=1.3)
