"""Single properties of the layer and the balancer, on 2 nodes of 2 ranks."""

import pytest
from tests.distributed.layer_checks import LAYERS, all_checks
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.arithmetic


@pytest.fixture(scope="module")
def seen():
    return run_ranks(4, all_checks)


def of(seen, check, key):
    return [rank[check][key] for rank in seen]


def test_autocast_computes_in_its_type_and_sums_in_float32(seen):
    assert max(of(seen, "autocast", "gap")) < 0.05
    assert min(of(seen, "autocast", "gap")) > 1e-6, "it did compute in bfloat16"
    assert set(of(seen, "autocast", "dtype")) == {"torch.float32"}


def test_low_precision_weights_have_float32_gradients(seen):
    assert set(of(seen, "low_precision", "dtype")) == {"torch.float32"}
    assert set(of(seen, "low_precision", "weights")) == {"torch.bfloat16"}
    assert all(of(seen, "low_precision", "finite"))


def test_a_copy_of_stale_weights_is_impossible(seen):
    for rank in seen:
        found = rank["stale"]
        assert found["optimizer before gradients"].startswith("ExecuteError: gradients of copies have not returned")
        assert found["backward of old weights"].startswith(
            ("StaleError: weights changed between", "RuntimeError: one of")
        )
        assert found["unnoticed change"].startswith("StaleError: the experts of MoE layer 0 have changed")
        assert found["after notice"] == "nothing"
        assert found["change of data"].startswith("StaleError: the experts of MoE layer 0 have changed")
        assert found["enter an old micro-batch"].startswith("StaleError: micro-batch 0 belongs to an earlier step")
        assert found["clip before gradients"].startswith("ExecuteError: gradients of copies have not returned")
        assert found["finish twice"].startswith("ExecuteError: gradients are summed over ranks already")
        assert found["copy the model"].startswith("InputError: cannot deepcopy a model with BalancedMoE layers")


def test_gradients_add_up_over_several_begins(seen):
    assert max(of(seen, "accumulated", "gap")) < 1e-9
    assert min(of(seen, "accumulated", "copies")) > 0


def test_masters_move_with_homes_and_give_the_weights(seen):
    for rank in seen:
        found = rank["masters"]
        assert "give the optimizer float32 masters" in found["refused"]
        assert found["moved"] > 0
        assert found["same"]
        assert found["changed"]


def test_a_part_that_does_not_learn_keeps_out(seen):
    assert max(of(seen, "partly_frozen", "gap")) < 1e-9
    assert all(of(seen, "partly_frozen", "none"))


def test_a_state_dict_of_other_homes_is_refused(seen):
    assert set(of(seen, "moved_state_dict", "same")) == {"nothing"}
    assert any(of(seen, "moved_state_dict", "moved"))
    for rank in seen:
        found = rank["moved_state_dict"]
        assert found["kept"]
        assert ("homes have moved since" in found["error"]) == (found["error"] != "nothing")
        assert found["error"] != "nothing" or not found["moved"]


def test_wrong_arguments_are_errors_on_every_rank(seen):
    for rank in seen:
        found = rank["refusals"]
        assert "3 of 8 experts per token, the model 3 with 2 of 8" in found["routing of one rank"]
        assert found["uneven"].startswith("InputError: every rank of")
        assert found["settings of one rank"].startswith("MismatchError: ranks disagree about how copies are kept")
        assert found["moves without optimizer"].startswith("InputError: the plan moves homes, but no optimizer")
        assert found["closed"] == "InputError: this balancer is closed"


def test_a_backward_pass_outside_of_its_micro_batch_says_so(seen):
    for rank in seen:
        assert rank["outside"]["backward"].startswith("ExecuteError: the backward pass of micro-batch")
        assert "with micro_batch" in rank["outside"]["logprob"]
        assert rank["outside"]["tokens"].startswith("InputError")


def test_two_runs_agree_to_the_bit_whatever_path_and_depth(seen):
    assert all(of(seen, "same_twice", "equal"))


def test_copies_of_the_next_layer_are_fetched_before_a_layer_computes(seen):
    found = [rank["prefetch"] for rank in seen]
    assert all(one["counts"] == 0 for one in found), "a planned micro-batch exchanges no counts"
    assert found[0]["slots"] == 2 * 2 * found[0]["row"], "slots x (depth + 1)"
    early = 0
    for one in found:
        order = one["order"]
        for layer in range(1, LAYERS):
            if f"fetch {layer}" in order:
                assert order.index(f"fetch {layer}") < order.index(f"compute {layer} forward")
                early += order.index(f"fetch {layer}") < order.index(f"compute {layer - 1} forward")
    assert early > 0
    assert [one["order"] for one in found[:2]] == [found[0]["order"]] * 2, "ranks of a node do the same"


def test_transfers_allocate_in_the_first_step_alone(seen):
    found = [rank["transfers_allocate"] for rank in seen]
    assert sum(one["counts"][0] for one in found) > 0, "what is made is counted"
    assert [one["counts"][1:] for one in found] == [[0, 0]] * len(found)
    assert max(one["staged"] for one in found) > 0
    assert all(one["transfers"] >= one["gradients"] + one["staged"] for one in found)


def test_static_is_the_switch(seen):
    assert min(of(seen, "switched_off", "moved")) > 0
    assert all(of(seen, "switched_off", "contiguous"))
    assert set(of(seen, "switched_off", "copies")) == {0}
    assert max(of(seen, "switched_off", "gap")) < 1e-9


def test_a_plan_that_needs_more_slots_is_refused_on_every_rank(seen):
    assert all("spare slots, 0 are allowed" in text for text in of(seen, "too_few_slots", "error"))


def test_frozen_experts_and_a_learning_router(seen):
    assert max(of(seen, "frozen", "gap")) < 1e-9
    assert all(of(seen, "frozen", "none"))


def test_without_a_micro_batch_tokens_are_routed_live(seen):
    assert max(of(seen, "live", "out")) < 1e-12
    assert max(of(seen, "live", "dx")) < 1e-11
