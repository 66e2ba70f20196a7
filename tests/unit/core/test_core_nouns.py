"""The nouns check themselves: a wrong value is an error that names it, and the algebra of placements holds."""

from dataclasses import replace

import numpy as np
import pytest

from equilibra.core.errors import BudgetError, EquilibraError, InputError, PlanError, TraceFormatError
from equilibra.core.load import Schedule, SequenceLoad, StepLoad, step_load
from equilibra.core.model import MODELS, MoEModel, model_named
from equilibra.core.placement import Cluster, Migration, Placement, contiguous

CLUSTER = Cluster(num_nodes=2, ranks_per_node=2)


def placement(*homes: int, cluster: Cluster = CLUSTER) -> Placement:
    return Placement(home_of_expert=np.array([homes], np.int32), cluster=cluster)


def test_every_error_is_one_of_ours_and_input_errors_are_value_errors():
    for kind in (InputError, TraceFormatError, BudgetError):
        assert issubclass(kind, EquilibraError)
        assert issubclass(kind, ValueError)
    assert issubclass(PlanError, EquilibraError)
    assert not issubclass(PlanError, ValueError)


@pytest.mark.parametrize("value", [0, -1, 1.0, "2", None, 65_537])
@pytest.mark.parametrize("name", ["num_nodes", "ranks_per_node"])
def test_a_cluster_names_the_field_and_the_value(name, value):
    with pytest.raises(InputError, match=f"{name} must be a whole number from 1 to 65536, not {value!r}"):
        Cluster(**{name: value})


def test_a_cluster_counts_its_ranks_and_nodes():
    cluster = Cluster(num_nodes=3, ranks_per_node=2)
    assert cluster.num_ranks == 6
    assert cluster.node_of_rank().tolist() == [0, 0, 1, 1, 2, 2]
    assert cluster.experts_per_rank(12) == 2


@pytest.mark.parametrize("num_experts", [0, -4, 5, 6, 3])
def test_experts_that_do_not_divide_say_how_many_and_what_to_do(num_experts):
    with pytest.raises(InputError, match=rf"{num_experts} experts equal homes on 4 ranks \(2 nodes x 2\).*divides"):
        CLUSTER.experts_per_rank(num_experts)


@pytest.mark.parametrize("field", ["num_layers", "hidden", "expert_ffn", "num_experts", "top_k", "weight_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_a_model_names_itself_the_field_and_the_value(field, value):
    good = {"num_layers": 1, "hidden": 2, "expert_ffn": 3, "num_experts": 4, "top_k": 2}
    with pytest.raises(
        InputError, match=f"model odd: {field} must be a whole number from 1 to {2**50 - 1}, not {value}"
    ):
        MoEModel(name="odd", **{**good, field: value})


def test_a_model_cannot_choose_more_experts_than_it_has():
    with pytest.raises(InputError, match="top-5 of 4 experts"):
        MoEModel(name="odd", num_layers=1, hidden=2, expert_ffn=3, num_experts=4, top_k=5)


def test_model_bytes_add_up():
    model = MoEModel(name="m", num_layers=1, hidden=10, expert_ffn=7, num_experts=4, top_k=2)
    assert model.expert_parameters == 210
    assert model.expert_bytes == 420
    assert model.expert_gradient_bytes == 840
    assert model.expert_home_bytes == 210 * 14


def test_models_are_found_by_name_and_an_unknown_name_lists_them():
    assert model_named("olmoe") is MODELS["olmoe"]
    with pytest.raises(InputError, match=r"'olmo'.*qwen3-30b-a3b.*olmoe"):
        model_named("olmo")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.zeros((2, 3), np.int32), r"\[sequences, layers, experts\].*\(2, 3\)"),
        (np.zeros((0, 1, 2), np.int32), r"\(0, 1, 2\)"),
        (np.zeros((2, 1, 2), np.int64), "int32, not int64"),
        (np.full((2, 1, 2), -1, np.int32), "not negative"),
        (np.zeros((3, 1, 2), np.int32), r"3 sequences need one length each, not lengths of shape \(2,\)"),
    ],
)
def test_sequence_loads_check_themselves(tokens, message):
    with pytest.raises(InputError, match=message):
        SequenceLoad(tokens_SLE=tokens, length_of_sequence=np.array([4, 4]))


def test_a_sequence_has_at_least_one_token():
    with pytest.raises(InputError, match="at least 1"):
        SequenceLoad(tokens_SLE=np.zeros((2, 1, 2), np.int32), length_of_sequence=np.array([4, 0]))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.zeros((1, 2, 3), np.int32), r"source ranks\], all > 0, not \(1, 2, 3\)"),
        (np.zeros((1, 0, 2, 2), np.int32), r"\(1, 0, 2, 2\)"),
        (np.zeros((1, 1, 2, 2), np.int64), "int32 array, not int64"),
        (np.zeros((1, 1, 2, 2)), "int32 array, not float64"),
        (np.zeros((2, 2, 2, 2), np.int32).transpose(3, 2, 1, 0), "contiguous"),
        (np.full((1, 1, 2, 2), -1, np.int32), "not be negative"),
    ],
)
def test_step_loads_check_themselves(tokens, message):
    with pytest.raises(InputError, match=message):
        StepLoad(tokens_MLER=tokens)


def test_expert_loads_do_not_overflow_where_sources_do():
    load = StepLoad(tokens_MLER=np.full((1, 1, 2, 4), 2**31 - 1, np.int32))
    assert load.expert_load().tolist() == [[[4 * (2**31 - 1)] * 2]]


@pytest.mark.parametrize(
    ("homes", "message"),
    [
        (np.zeros(4, np.int32), r"int32 \[layers, experts\], not int32 \(4,\)"),
        (np.zeros((1, 0), np.int32), r"\(1, 0\)"),
        (np.zeros((1, 4), np.int64), "not int64"),
        (np.array([[0, 1, 2, 4]], np.int32), "ranks 0 to 3, not 0 to 4"),
        (np.array([[0, -1, 2, 3]], np.int32), "ranks 0 to 3, not -1 to 3"),
    ],
)
def test_placements_check_themselves(homes, message):
    with pytest.raises(InputError, match=message):
        Placement(home_of_expert=homes, cluster=CLUSTER)


def test_placements_are_compared_by_value():
    assert placement(0, 1, 2, 3) == placement(0, 1, 2, 3)
    assert placement(0, 1, 2, 3) != placement(0, 1, 3, 2)
    assert placement(0, 1, 2, 3) != placement(0, 1, 2, 3, cluster=Cluster(num_nodes=1, ranks_per_node=4))
    assert placement(0, 1, 2, 3) != "placement"
    with pytest.raises(TypeError, match="unhashable"):
        hash(placement(0, 1, 2, 3))


def test_contiguous_homes_are_even_and_others_say_so():
    even = contiguous(CLUSTER, num_layers=2, num_experts=8)
    assert even.home_of_expert.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]] * 2
    assert even.num_homes().tolist() == [[2, 2, 2, 2]] * 2
    assert even.is_even()
    assert not placement(0, 0, 1, 2).is_even()
    assert placement(0, 0, 1, 2).num_homes().tolist() == [[2, 1, 1, 0]]


def test_a_migration_lists_who_moves_where():
    before, after = placement(0, 1, 2, 3), placement(1, 0, 2, 3)
    there = Migration(before=before, after=after)
    assert there.moves().tolist() == [[0, 0, 0, 1], [0, 1, 1, 0]]
    assert there.num_moves == 2
    across = Migration(before=before, after=placement(2, 1, 0, 3))
    assert across.moves().tolist() == [[0, 0, 0, 2], [0, 2, 2, 0]]


def test_migrations_compose_and_come_back():
    rng = np.random.default_rng(0)
    a, b = (
        Placement(
            home_of_expert=np.stack([rng.permutation(np.repeat(np.arange(4), 2)) for _ in range(3)]).astype(np.int32),
            cluster=CLUSTER,
        )
        for _ in range(2)
    )
    there, back = Migration(before=a, after=b), Migration(before=b, after=a)
    homes = a.home_of_expert.copy()
    for layer, expert, source, target in there.moves():
        assert homes[layer, expert] == source != target
        homes[layer, expert] = target
    np.testing.assert_array_equal(homes, b.home_of_expert)
    np.testing.assert_array_equal(there.moves()[:, [0, 1, 3, 2]], back.moves())
    assert Migration(before=a, after=a).num_moves == 0
    assert Migration(before=a, after=a).moves().shape == (0, 4)


def test_there_is_no_migration_between_models_or_clusters():
    with pytest.raises(InputError, match=r"\(1, 4\).*\(1, 8\).*must be the same"):
        Migration(before=placement(0, 1, 2, 3), after=placement(0, 0, 1, 1, 2, 2, 3, 3))
    with pytest.raises(InputError, match=r"num_nodes=2.*num_nodes=1"):
        Migration(before=placement(0, 1, 2, 3), after=placement(0, 1, 2, 3, cluster=Cluster(ranks_per_node=4)))


@pytest.mark.parametrize(
    ("micro_batch", "rank", "message"),
    [
        ([0, 1], [0], r"\(2,\) and \(1,\)"),
        ([], [], r"\(0,\)"),
        ([0, 2], [0, 0], "0 to 1, not 0 to 2"),
        ([-1, 0], [0, 0], "0 to 1, not -1 to 0"),
        ([0, 0], [0, -1], "ranks not negative"),
    ],
)
def test_schedules_check_themselves(micro_batch, rank, message):
    with pytest.raises(InputError, match=message):
        Schedule(
            micro_batch_of_sequence=np.array(micro_batch, np.int32),
            rank_of_sequence=np.array(rank, np.int32),
            num_micro_batches=2,
        )


def test_step_load_puts_every_sequence_where_it_is_scheduled():
    tokens = np.arange(3 * 2 * 4, dtype=np.int32).reshape(3, 2, 4)
    sequences = SequenceLoad(tokens_SLE=tokens, length_of_sequence=np.array([5, 6, 7]))
    schedule = Schedule(
        micro_batch_of_sequence=np.array([1, 0, 1], np.int32),
        rank_of_sequence=np.array([3, 0, 3], np.int32),
        num_micro_batches=2,
    )
    load = step_load(sequences, schedule, CLUSTER).tokens_MLER
    np.testing.assert_array_equal(load[0, :, :, 0], tokens[1])
    np.testing.assert_array_equal(load[1, :, :, 3], tokens[0] + tokens[2])
    assert load.sum() == tokens.sum()
    with pytest.raises(InputError, match="rank 3 and 1 ranks per sequence, the cluster has 2"):
        step_load(sequences, schedule, Cluster(ranks_per_node=2))
    short = Schedule(
        micro_batch_of_sequence=np.zeros(2, np.int32), rank_of_sequence=np.zeros(2, np.int32), num_micro_batches=1
    )
    with pytest.raises(InputError, match="2 sequences, the load 3"):
        step_load(sequences, short, CLUSTER)


def shared_load(width: int, seed: int = 0) -> tuple[SequenceLoad, Schedule, np.ndarray]:
    """Sequences on cells of `width` of 12 ranks, and the load of these cells by hand, [M, L, E, cells]."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 50, (20, 3, 5)).astype(np.int32)
    micro_batch, cell = rng.integers(0, 4, 20), rng.integers(0, 12 // width, 20)
    by_cell = np.zeros((4, 3, 5, 12 // width), np.int64)
    for s in range(20):
        by_cell[micro_batch[s], :, :, cell[s]] += tokens[s]
    schedule = Schedule(
        micro_batch_of_sequence=micro_batch.astype(np.int32),
        rank_of_sequence=(cell * width).astype(np.int32),
        num_micro_batches=4,
        ranks_per_sequence=width,
    )
    return SequenceLoad(tokens_SLE=tokens, length_of_sequence=np.full(20, 50)), schedule, by_cell


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6, 12])
def test_ranks_that_share_a_sequence_have_equal_parts_and_no_token_is_lost(width):
    sequences, schedule, by_cell = shared_load(width)
    load = step_load(sequences, schedule, Cluster(num_nodes=3, ranks_per_node=4)).tokens_MLER
    assert load.shape == (4, 3, 5, 12)
    parts = load.reshape(4, 3, 5, 12 // width, width)
    np.testing.assert_array_equal(parts.sum(axis=4), by_cell)
    assert (parts.max(axis=4) - parts.min(axis=4)).max() == (0 if width == 1 else 1)


def test_odd_tokens_of_different_experts_go_to_different_ranks():
    sequences = SequenceLoad(tokens_SLE=np.full((1, 1, 4), 5, np.int32), length_of_sequence=np.array([5]))
    schedule = Schedule(
        micro_batch_of_sequence=np.zeros(1, np.int32),
        rank_of_sequence=np.zeros(1, np.int32),
        num_micro_batches=1,
        ranks_per_sequence=4,
    )
    load = step_load(sequences, schedule, CLUSTER).tokens_MLER
    assert load[0, 0].tolist() == [[2, 1, 1, 1], [1, 2, 1, 1], [1, 1, 2, 1], [1, 1, 1, 2]]


def test_ranks_that_share_a_sequence_must_divide_the_cluster_and_begin_on_a_multiple():
    sequences, schedule, _ = shared_load(4)
    with pytest.raises(InputError, match="must start on a multiple of that"):
        Schedule(
            micro_batch_of_sequence=schedule.micro_batch_of_sequence,
            rank_of_sequence=schedule.rank_of_sequence + 2,
            num_micro_batches=4,
            ranks_per_sequence=4,
        )
    with pytest.raises(InputError, match="on 0 ranks each"):
        replace(schedule, ranks_per_sequence=0)
    with pytest.raises(InputError, match="uses rank 11 and 4 ranks per sequence, the cluster has 8"):
        step_load(sequences, schedule, Cluster(num_nodes=2, ranks_per_node=4))
    with pytest.raises(InputError, match="4 ranks per sequence, the cluster has 14"):
        step_load(sequences, schedule, Cluster(num_nodes=2, ranks_per_node=7))
