"""Gradients over ranks: FSDP2 as documented, wrappers that are refused, weights that differ, NaN on one rank."""

import pytest
from tests.distributed.gradient_checks import all_checks
from tests.distributed.ranks import run_ranks

CLUSTERS = [pytest.param((1, 2), id="2 ranks"), pytest.param((2, 2), id="4 ranks", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=CLUSTERS)
def seen(request):
    nodes, per_node = request.param
    return run_ranks(nodes * per_node, all_checks, nodes, per_node)


def test_the_documented_fsdp_recipe_gives_the_gradients_of_one_process(seen):
    for rank in seen:
        for dtype, limit in {"torch.float64": 1e-9, "torch.float32": 1e-4}.items():
            found = rank["fsdp"][dtype]
            assert found.pop("stepped")
            assert max(found.values()) < limit, found


def test_fsdp_that_takes_means_or_shards_experts_is_refused(seen):
    for rank in seen:
        found = rank["naive_fsdp"]
        assert "FSDP divides the gradients of" in found["refused"]
        assert found["shares"] == pytest.approx(1 / len(seen)), "what would have been trained on"
        assert found["experts"] < 1e-9
        assert "the experts of MoE layer 0 are sharded (DTensor)" in found["sharded experts"]


def test_wrappers_that_replicate_experts_are_refused_before_they_send_anything(seen):
    for rank in seen:
        found = rank["wrappers"]
        assert "InputError: DistributedDataParallel takes the experts of every rank" in found["ddp"]
        assert "InputError: FullyShardedDataParallel takes the experts of every rank" in found["fsdp1"]
        assert found["dense alone"] == "nothing"
        assert found["kept"]


def test_dense_weights_that_differ_between_ranks_are_an_error_on_every_rank(seen):
    for rank in seen:
        found = rank["different"]
        assert found["nothing"] == "nothing"
        assert (
            f"weight moe.1.router.weight is not the same on all ranks: rank {len(seen) - 1} differs" in found["router"]
        )
        assert "embed.bias is not the same on all ranks: rank 1 differs" in found["sign"], "-0.0 is not 0.0"
        assert "scale is not the same on all ranks: rank 1 differs" in found["buffer"]
        assert "ranks have different dense parameters or buffers" in found["shape"]


def test_a_parameter_used_on_some_ranks_is_summed_and_one_used_nowhere_has_no_gradient(seen):
    for rank in seen:
        assert rank["used_on_some_ranks"] == {"some": [[2.0, 2.0, 2.0]], "none": True}


def test_a_nan_on_one_rank_is_seen_by_all(seen):
    assert len({rank["nonfinite"]["finite"] for rank in seen}) == 1, "the same norm, to the bit"
    for rank in seen:
        found = rank["nonfinite"]
        assert found["norm"] == "nan"
        assert found["kept"]
        wanted = f"moe.2.experts.down of expert {found['expert']} (rank 1)"
        assert found["error"].startswith("NonFiniteError: the norm of the gradient is nan")
        assert wanted in found["error"]


def test_ranks_skip_the_same_steps_of_a_gradscaler(seen):
    for rank in seen:
        assert rank["scaler"] == {"changed": [True, False, True], "scale": 1.0}
