"""Slots, scattering and counting of the Megatron integration, which need no Megatron."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibra.core.errors import ExecuteError, InputError
from equilibra.core.load import StepLoad
from equilibra.core.placement import Cluster, Placement
from equilibra.core.plan import Stage
from equilibra.core.visit import VisitKey
from equilibra.events.schema import Direction
from equilibra.execute.copies.transfer import Path
from equilibra.execute.group import ExpertGroup
from equilibra.integrations.executor.balancer import count_routing
from equilibra.integrations.executor.live import PastLoads, SharePlanner
from equilibra.integrations.megatron import by_micro_batch, masked, set_replay
from equilibra.integrations.megatron.copies import slot_and_part
from equilibra.integrations.megatron.layer import check_config, check_wrapping, wait_for_gathers
from equilibra.integrations.megatron.visits import Ahead, MegatronVisits, to_slots
from equilibra.integrations.planned import (
    PATHS,
    MegatronSetting,
    SlotCounts,
    cluster_of,
    contiguous_slots,
    slot_table,
)
from equilibra.plan.entry import plan_step
from equilibra.plan.history import SCALE, rank_load_by_shares, shares_of

CLUSTER = Cluster(num_nodes=1, ranks_per_node=4)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), surprise=st.booleans(), per_node=st.sampled_from([1, 2, 4]))
def test_every_pair_is_in_one_slot_of_its_expert(seed: int, surprise: bool, per_node: int) -> None:
    """Also where other pairs come than were planned for; with those that were, ranks get what the plan says."""
    rng = np.random.default_rng(seed)
    num_tokens, num_experts, top_k = 24, 8, 2
    counts, cluster = SlotCounts(standing=2, flash=2), Cluster(num_nodes=4 // per_node, ranks_per_node=per_node)
    weights = rng.dirichlet(np.full(num_experts, 0.3)) + 1e-9
    maps = np.zeros((4, num_tokens, num_experts), bool)
    for of_rank in maps:
        for row in of_rank:
            row[rng.choice(num_experts, top_k, replace=False, p=weights / weights.sum())] = True
    load = StepLoad(tokens_MLER=np.ascontiguousarray(maps.sum(axis=1).T[None, None], np.int32))
    plan = plan_step(load, cluster=cluster, spare_slots=2, standing_slots=2, max_moves_per_layer=0)
    if surprise:
        maps = np.roll(maps, 3, axis=2)
    slots = contiguous_slots(cluster, num_layers=1, num_experts=num_experts).moved_to(plan.placement)
    received = np.zeros(4, int)
    for rank in range(4):
        node = range(rank - rank % per_node, rank - rank % per_node + per_node)
        visit = slot_table(plan.visit(Stage.UPDATE, 0, 0), slots.expert_of_slot[0], counts, rank, node)
        probs = torch.from_numpy(rng.random((num_tokens, num_experts)) * maps[rank])
        probs_TP, map_TP = to_slots(probs, torch.from_numpy(maps[rank]), visit)
        back = torch.zeros_like(probs).index_add(1, torch.from_numpy(visit.expert_of_slot), probs_TP)
        count = torch.zeros_like(probs).index_add(1, torch.from_numpy(visit.expert_of_slot), map_TP.double())
        assert torch.equal(back, probs)
        assert np.array_equal(count.numpy(), maps[rank])
        received += map_TP.sum(dim=0).view(4, -1).sum(dim=1).numpy()
    if not surprise:
        assert np.array_equal(received, plan.rank_load(load)[0, 0])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_shares_of_past_steps_are_what_slots_take(seed: int) -> None:
    """Of a load that was not planned: every pair in one slot, and ranks get what the fixed rule says."""
    rng = np.random.default_rng(seed)
    cluster, counts = Cluster(num_nodes=4, ranks_per_node=1), SlotCounts(standing=2, flash=0)
    maps = rng.random((2, 4, 24, 8)) < rng.dirichlet(np.full(8, 0.3)) * 3  # past and present, by rank
    past, present = (
        StepLoad(tokens_MLER=np.ascontiguousarray(one.sum(axis=1).T[None, None], np.int32)) for one in maps
    )
    plan = plan_step(past, cluster=cluster, spare_slots=0, standing_slots=2)
    visit = SharePlanner(4).follow(plan, past)[0]
    expert_RH = contiguous_slots(cluster, num_layers=1, num_experts=8).moved_to(plan.placement).expert_of_slot[0]
    received = np.zeros(4, int)
    for rank in range(4):
        table = slot_table(visit, expert_RH, counts, rank, range(rank, rank + 1), SCALE)
        _, map_TP = to_slots(torch.ones(24, 8), torch.from_numpy(maps[1, rank]), table)
        count = torch.zeros(24, 8).index_add(1, torch.from_numpy(table.expert_of_slot), map_TP.float())
        assert np.array_equal(count.numpy(), maps[1, rank])
        received += map_TP.sum(dim=0).view(4, -1).sum(dim=1).numpy()
    assert np.array_equal(received, rank_load_by_shares(present, plan, shares_of(plan, past))[0, 0])


def test_a_pass_that_was_cut_off_leaves_whole_micro_batches() -> None:
    """Its second micro-batch never reached the last layer."""
    group = ExpertGroup(cluster=Cluster(num_nodes=1, ranks_per_node=1), channels={})
    past = PastLoads(group, num_layers=3, num_experts=2, num_steps=2)
    assert past.gather() is None
    past.noting = True
    for layer in (0, 1, 2, 0, 1):
        past.note(layer, torch.tensor([layer, 5]))
    load = past.gather()
    assert load is not None
    assert load.tokens_MLER[..., 0].tolist() == [[[0, 5], [1, 5], [2, 5]]]
    past.note(0, torch.tensor([1, 1]))
    assert past.gather() is None, "not a whole micro-batch"
    assert past.together().num_micro_batches == 1


def test_imbalances_are_averaged_and_forgotten() -> None:
    planner = SharePlanner(2)
    assert (planner.num_seen, planner.take_imbalance()) == (0, (1.0, 1.0))
    for tokens in ([3, 1], [1, 1]):
        planner.observe(StepLoad(tokens_MLER=np.array(tokens, np.int32).reshape(1, 1, 2, 1).repeat(2, axis=3)))
    assert planner.num_seen == 2
    assert planner.take_imbalance() == (1.25, 1.25)
    assert planner.num_seen == 0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_moves_lead_from_one_arrangement_to_the_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = contiguous_slots(CLUSTER, num_layers=2, num_experts=8)
    assert slots.is_contiguous
    for _ in range(3):
        home_LE = np.stack([rng.permutation(np.repeat(np.arange(4, dtype=np.int32), 2)) for _ in range(2)])
        after = slots.moved_to(Placement(home_of_expert=home_LE, cluster=CLUSTER))
        assert np.array_equal(after.placement.home_of_expert, home_LE)
        for layer in range(2):
            found = slots.expert_of_slot[layer].copy()
            for move in slots.moves_to(after, layer):
                assert slots.expert_of_slot[layer, move.source, move.source_slot] == move.expert
                assert move.source != move.target, "experts that stay keep their slots"
                found[move.target, move.target_slot] = move.expert
            assert np.array_equal(found, after.expert_of_slot[layer])
        slots = after


def test_visits_are_a_queue_for_forward_and_recompute() -> None:
    """Two micro-batches in flight: what backward computes anew is of the first, then of the second."""
    place = MegatronVisits(0, None, _Experts(), None, SlotCounts(standing=0, flash=0))
    seen = []
    visits = ["first", "second"]
    place.arm([lambda name=name: name for name in visits])

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            seen.append(place.take())
            return x.clone()

        @staticmethod
        def backward(_ctx, grad):
            seen.append(place.take())
            return grad

    x = torch.ones(1, requires_grad=True)
    outs = [Again.apply(x), Again.apply(x)]
    for out in outs:
        out.backward()
    assert seen == ["first", "second", "first", "second"]
    with pytest.raises(ExecuteError, match="forward 3 of MoE layer 0 has no plan: the step has 2 micro-batches"):
        place.take()


def test_what_comes_next_is_learned_from_what_came() -> None:
    """1F1B with a micro-batch in flight, and two layers that are recomputed: more is foreseen the second time."""
    forward = [(Direction.FORWARD, 0), (Direction.FORWARD, 1)]
    again = [(Direction.FORWARD_AGAIN, 1), (Direction.FORWARD_AGAIN, 0)]

    class Layer:
        def __init__(self, number: int) -> None:
            self.number, self.begun = number, dict.fromkeys(Direction, 0)

        def next_key(self, direction: Direction) -> VisitKey:
            return VisitKey(Stage.UPDATE, self.begun[direction], self.number)

    layers = [Layer(0), Layer(1)]
    ahead, foreseen = Ahead(layers), []
    order = forward + forward + again + forward + again + again
    for _ in range(2):
        ahead.arm(Stage.UPDATE)
        expected: list[VisitKey] = []
        foreseen.append(0)
        for direction, layer in order:
            key = layers[layer].next_key(direction)
            foreseen[-1] += key in expected
            layers[layer].begun[direction] += 1
            expected = ahead(key, direction)
            assert len(expected) <= 1
    assert foreseen[0] < foreseen[1] == len(order) - 1, "all but the first"
    ahead.arm(Stage.LOGPROB)
    assert ahead(VisitKey(Stage.LOGPROB, 0, 0), Direction.FORWARD) == [], "a pass of another kind has another order"


def test_paths_are_those_of_the_engines() -> None:
    assert set(PATHS) == set(Path)


class _Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.local_experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])


def test_rows_without_recorded_routing_are_not_counted() -> None:
    ids = torch.tensor([[0, 1], [1, 2], [3, 3], [2, 0]])
    live = masked(ids, torch.tensor([True, True, True, False]))
    counts = count_routing([[live]], num_layers=1, num_experts=4, top_k=2)
    assert counts.tolist() == [[[1, 2, 1, 0]]]
    with pytest.raises(InputError, match="names expert 3, the model has 3"):
        count_routing([[ids]], num_layers=1, num_experts=3, top_k=2)
    with pytest.raises(InputError, match="routing of 1 layers, this pipeline stage has 2"):
        count_routing([[ids]], num_layers=2, num_experts=4, top_k=2)
    with pytest.raises(InputError, match=r"must be whole numbers \[tokens, 3\]"):
        count_routing([[ids]], num_layers=1, num_experts=4, top_k=3)


def test_lists_of_layers_become_micro_batches() -> None:
    assert by_micro_batch([["a0", "a1"], ["b0", "b1"]]) == [["a0", "b0"], ["a1", "b1"]]


def test_megatrons_own_replay_cannot_route_rows_live() -> None:
    class RouterReplay:
        def set_target_indices(self, topk_indices):
            self.target = topk_indices

    replay = RouterReplay()
    set_replay([replay], [torch.tensor([[0, 1]], dtype=torch.int32)])
    assert replay.target.tolist() == [[0, 1]]
    with pytest.raises(InputError, match="1 tokens have no recorded routing"):
        set_replay([replay], [torch.tensor([[0, 1], [-1, -1]])])


def _config(**options):
    plain = {
        "moe_router_fusion": False,
        "moe_enable_routing_replay": True,
        "moe_token_dispatcher_type": "alltoall",
        "expert_tensor_parallel_size": 1,
    }
    return SimpleNamespace(**{**plain, **options})


def test_options_that_cannot_be_together_are_refused_with_the_reason() -> None:
    check_config(_config(moe_token_dispatcher_type="flex", cuda_graph_impl="none", fp8=None))
    for options, reason in [
        ({"moe_router_fusion": True}, "fused router returns before it looks at the recorded experts"),
        ({"moe_token_dispatcher_type": "allgather"}, "every rank would get every token"),
        ({"expert_tensor_parallel_size": 2}, "experts must be whole"),
        ({"moe_expert_capacity_factor": 1.0}, "dropped by slots"),
        ({"fp8": "hybrid"}, "quantised"),
        ({"moe_expert_rank_capacity_factor": 1.0}, "dropped by slots"),
        ({"delay_wgrad_compute": True}, "before they are computed"),
        ({"overlap_dispatch_backward_with_experts_wgrad": True}, "before they are computed"),
        ({"use_transformer_engine_op_fuser": True}, "fused operations"),
        ({"moe_single_grouped_weight": True}, "separate parameters"),
        ({"moe_ncclep_zero_copy": True}, "buffers that are made for homes alone"),
        ({"cuda_graph_impl": "local"}, "shapes"),
    ]:
        with pytest.raises(InputError, match=reason):
            check_config(_config(**options))


def test_weights_that_come_late_are_refused() -> None:
    check_wrapping(None)
    check_wrapping(SimpleNamespace(overlap_grad_reduce=True, overlap_param_gather=True))
    with pytest.raises(InputError, match="use_megatron_fsdp=True: weights are gathered when an expert runs"):
        check_wrapping(SimpleNamespace(use_megatron_fsdp=True))
    optimizer = SimpleNamespace(ddp_config=SimpleNamespace(overlap_param_gather=True))
    with pytest.raises(InputError, match=r"pass balance.. the model wrapped in DistributedDataParallel"):
        wait_for_gathers([torch.nn.Linear(1, 1)], [], optimizer)


def test_names_of_experts() -> None:
    assert slot_and_part("local_experts.3.linear_fc1.weight") == (3, "linear_fc1.weight")
    assert slot_and_part("linear_fc2.weight11") == (11, "linear_fc2.weight")
    with pytest.raises(InputError, match="cannot tell which expert parameter weight1 belongs to"):
        slot_and_part("weight1")


def test_masks_and_lists_of_other_sizes_are_refused():
    with pytest.raises(InputError, match="a mask of as many tokens"):
        masked(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(5))
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(InputError, match="1 to 2 micro-batches"):
        by_micro_batch([[ids], [ids, ids]])
    assert by_micro_batch([]) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ranks_per_node": 2.5}, "ranks_per_node must be a whole number from 1 to 65535, not 2.5"),
        ({"ranks_per_node": 0}, "ranks_per_node must be a whole number from 1"),
        ({"spare_slots": True}, "spare_slots must be a whole number from 0 to 65535, not True"),
        ({"timeout_s": "x"}, "timeout_s must be a number more than 0 and below 1e+06, not 'x'"),
        ({"timeout_s": float("nan")}, "timeout_s must be a number more than 0 and below 1e+06, not nan"),
        ({"timeout_s": -1}, "timeout_s must be a number more than 0 and below 1e+06, not -1"),
        ({"prefetch": "no"}, "prefetch must be true or false, not 'no'"),
        ({"planner": 3}, "planner must be a name or a Planner, not 3"),
        ({"planner": "equilibre"}, "equilibre"),
        ({"seed": "a"}, "seed must be a whole number from 0 to 2147483647, not 'a'"),
        ({"max_moves_per_layer": -7}, "max_moves_per_layer must be a whole number from -1"),
        ({"standing_slots": -1}, "standing_slots must be a whole number from 0 to 65535, not -1"),
        ({"path": "by hand"}, "path must be one of auto, collective, host, ipc, both, not 'by hand'"),
        ({"hardware": 3}, "hardware must be text, not 3"),
    ],
)
def test_settings_that_cannot_be(given, said):
    with pytest.raises(InputError, match=re.escape(said)):
        MegatronSetting(**given)


def test_nodes_must_be_whole():
    assert cluster_of(12, 6) == Cluster(num_nodes=2, ranks_per_node=6)
    with pytest.raises(InputError, match="12 expert-parallel ranks cannot be nodes of 8: set ranks_per_node"):
        cluster_of(12, None)
