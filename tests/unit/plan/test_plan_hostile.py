"""Hostile use: kernels do not check bounds, so nothing wrong may reach them, and nothing right may leave them.

What could end the process runs in another one.
"""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from equilibra.core.errors import InputError
from equilibra.core.load import Schedule, SequenceLoad, StepLoad
from equilibra.core.model import model_named
from equilibra.core.placement import Cluster, Placement, contiguous
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates, rates_for
from equilibra.plan.entry import plan_step
from equilibra.plan.one_layer import OneLayer, balance
from equilibra.plan.planner import StepProblem
from equilibra.plan.step import Equilibra

FOUR = Cluster(ranks_per_node=4)


def in_another_process(code: str, timeout_s: float = 60.0, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode} after {done.stdout[-300:]!r}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.parametrize(
    "tokens",
    [
        np.full((8, 4), np.nan),
        np.full((8, 4), np.inf),
        np.full((8, 4), 1.5),
        np.full((8, 4), -1),
        np.full((8, 4), 2**31),
        np.full((8, 4), 2**40),
        np.full((8, 4), 2**63, np.uint64),
        np.full((8, 4), "1"),
        np.full((8, 4), None),
        np.full((8, 4), 1 + 0j),
        np.ones(8, int),
        np.ones((8, 3), int),
        np.ones((8, 4, 1), int),
        np.ones((0, 4), int),
        np.ones((7, 4), int),
        np.ones((2, 4), int),
        np.int64(3),
    ],
    ids=lambda t: f"{t.dtype}{t.shape}",
)
def test_balance_refuses_what_is_not_a_load(tokens):
    with pytest.raises(InputError):
        balance(tokens, cluster=FOUR)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spare_slots", -1),
        ("spare_slots", 1.5),
        ("spare_slots", None),
        ("tolerance", -0.1),
        ("tolerance", float("nan")),
        ("tolerance", float("inf")),
        ("min_tokens_per_copy", -1),
        ("min_tokens_per_copy", 1.5),
        ("min_tokens_per_copy", float("nan")),
        ("min_tokens_per_copy", 2**63),
        ("min_tokens_per_copy", 2**62),
    ],
)
def test_balance_refuses_wrong_settings_and_names_them(name, value):
    with pytest.raises(InputError, match=name):
        balance(np.ones((8, 4), int), cluster=FOUR, **{name: value})


def test_a_copy_that_no_load_is_worth_is_never_made():
    plan = balance(np.array([[90, 90], [5, 5]]), cluster=Cluster(ranks_per_node=2), min_tokens_per_copy=2**62 - 1)
    assert plan.expert_of_copy.size == 0


def test_balance_refuses_homes_that_would_be_written_out_of_bounds():
    """A wrong home used to be an address: it must be an error that names it."""
    output = in_another_process("""
import json, numpy as np
from equilibra.core.placement import Cluster
from equilibra.core.errors import InputError
from equilibra.plan.one_layer import balance
tokens = np.arange(32).reshape(8, 4)
homes = {
    "too large": [0, 0, 1, 1, 2, 2, 3, 4], "far too large": [0, 0, 1, 1, 2, 2, 3, 2**30],
    "negative": [0, 0, 1, 1, 2, 2, 3, -1], "too few": [0, 1, 2, 3], "too many": [0] * 5000,
    "floats": [0.0, 0, 1, 1, 2, 2, 3, 3], "a table": [[0, 0, 1, 1, 2, 2, 3, 3]],
}
for name, home in homes.items():
    print(name, flush=True)
    try:
        balance(tokens, cluster=Cluster(ranks_per_node=4), home_of_expert=np.array(home))
    except InputError as error:
        print("refused", error)
    else:
        raise SystemExit(f"accepted: {name}")
""")
    assert output.count("refused") == 7
    assert "1073741824" in output


def test_balance_takes_lists_whole_floats_and_any_layout():
    expected = balance(np.arange(32).reshape(8, 4), cluster=FOUR).rank_load.tolist()
    for tokens in (
        np.arange(32.0).reshape(8, 4),
        np.asfortranarray(np.arange(32).reshape(8, 4)),
        np.arange(32, dtype=np.uint8).reshape(8, 4),
        np.arange(64, dtype=np.int16).reshape(8, 8)[:, ::2] // 2,
    ):
        assert balance(tokens, cluster=FOUR).rank_load.sum() == tokens.sum()
        assert (tokens.sum() != 496) or balance(tokens, cluster=FOUR).rank_load.tolist() == expected


@pytest.mark.parametrize("slots", [0, 1, 7, 100, 10**6, 10**12])
def test_any_number_of_slots_is_safe(slots):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1000, (8, 4)) * (np.arange(8)[:, None] == 2)
    done = balance(tokens, cluster=FOUR, spare_slots=slots)
    assert done.rank_load.sum() == tokens.sum()
    if slots:
        assert done.imbalance < 1.01
    else:
        assert done.imbalance == 4.0


def test_one_rank_and_ranks_alone_in_their_node_copy_nothing():
    for cluster in (Cluster(ranks_per_node=1), Cluster(num_nodes=4, ranks_per_node=1)):
        tokens = np.arange(4 * cluster.num_ranks).reshape(4, cluster.num_ranks)
        done = balance(tokens, cluster=cluster, tolerance=0.0)
        assert done.expert_of_copy.size == 0
        assert done.rank_load.sum() == tokens.sum()


def test_ranks_without_any_expert_can_receive_copies():
    tokens = np.array([[40, 0, 0, 0], [0, 0, 0, 0]])
    done = balance(tokens, cluster=FOUR, home_of_expert=np.array([1, 1], np.int32), tolerance=0.0)
    assert done.rank_load.tolist() == [10, 10, 10, 10]


@pytest.mark.parametrize("largest", [2**31 - 1, (2**31 - 1) // 4])
def test_the_largest_loads_do_not_overflow(largest):
    tokens = np.zeros((8, 4), np.int64)
    tokens[3] = largest
    done = balance(tokens, cluster=FOUR, spare_slots=2, tolerance=0.0)
    assert done.rank_load.sum() == 4 * largest
    assert done.imbalance < 1.001
    assert balance(np.full((8, 4), largest), cluster=FOUR).rank_load.tolist() == [8 * largest] * 4


def problem(**changes):
    cluster = changes.pop("cluster", Cluster(num_nodes=2, ranks_per_node=2))
    tokens = np.random.default_rng(0).integers(0, 50, (2, 2, 8, cluster.num_ranks)).astype(np.int32)
    fields = {"cluster": cluster, "given_load": StepLoad(tokens_MLER=tokens), "rates": Rates.free()}
    return StepProblem(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"given_load": None}, "needs either given_load, or sequences with a schedule"),
        ({"spare_slots": -1}, "spare_slots"),
        ({"standing_slots": -1}, "standing_slots"),
        ({"spare_slots": 1.5}, "spare_slots"),
        ({"standing_slots": None}, "standing_slots"),
        ({"seed": 2**70}, "seed"),
        ({"given_load": StepLoad(tokens_MLER=np.ones((1, 1, 8, 3), np.int32))}, "3 source ranks .* 4 ranks"),
        ({"given_load": StepLoad(tokens_MLER=np.ones((1, 1, 6, 4), np.int32))}, "6 experts"),
        ({"given_load": StepLoad(tokens_MLER=np.ones((1, 1, 2, 4), np.int32))}, "2 experts"),
        ({"previous": contiguous(FOUR, num_layers=2, num_experts=8)}, "another model or cluster"),
        (
            {"previous": contiguous(Cluster(num_nodes=2, ranks_per_node=2), num_layers=1, num_experts=8)},
            r"\(1, 8\) belongs to another model",
        ),
    ],
)
def test_step_problems_check_themselves(changes, message):
    with pytest.raises(InputError, match=message):
        problem(**changes)


def test_a_problem_with_both_a_load_and_sequences_is_ambiguous():
    sequences = SequenceLoad(tokens_SLE=np.ones((3, 2, 8), np.int32), length_of_sequence=np.array([3, 3, 3]))
    schedule = Schedule(
        micro_batch_of_sequence=np.zeros(3, np.int32), rank_of_sequence=np.zeros(3, np.int32), num_micro_batches=1
    )
    with pytest.raises(InputError, match="either"):
        problem(sequences=sequences, schedule=schedule)


def test_an_uneven_previous_placement_is_refused_or_planned_in_bounds():
    """Swaps count on as many experts in every bin: others would be written out of bounds."""
    output = in_another_process("""
import numpy as np
from equilibra.core.placement import Cluster
from equilibra.core.errors import InputError
from equilibra.core.load import StepLoad
from equilibra.core.placement import Placement
from equilibra.cost.rates import Rates
from equilibra.plan.planner import StepProblem
from equilibra.plan.step import Equilibra
cluster = Cluster(num_nodes=2, ranks_per_node=4)
load = StepLoad(tokens_MLER=np.random.default_rng(0).integers(0, 1000, (4, 1, 64, 8)).astype(np.int32))
for slots in (0, 2):
    for first_on_other_node in (1, 32, 60):
        home = np.zeros((1, 64), np.int32)
        home[0, first_on_other_node:] = 5
        previous = Placement(home_of_expert=home, cluster=cluster)
        try:
            problem = StepProblem(
                cluster=cluster, given_load=load, previous=previous, rates=Rates.free(), spare_slots=slots
            )
            for _ in range(5):
                Equilibra(threads=1).plan(problem).check(load, spare_slots=slots)
        except InputError as error:
            print("refused", error)
        else:
            print("planned")
""")
    assert output.count("refused") + output.count("planned") == 6


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("cluster", [FOUR, Cluster(num_nodes=2, ranks_per_node=2)], ids=["1x4", "2x2"])
def test_a_layer_without_tokens_is_planned_whatever_moves_cost(tokens, cluster):
    load = np.zeros((2, 1, 8, 4), np.int32)
    load[0, 0, 0, 0] = tokens
    step = problem(
        cluster=cluster, given_load=StepLoad(tokens_MLER=load), rates=rates_for(model_named("qwen3-30b-a3b"))
    )
    plan = Equilibra(threads=1).plan(step)
    plan.check(step.load, spare_slots=2)
    assert plan.migration.num_moves == 0
    assert plan.stages[Stage.UPDATE].num_copies == 0
    assert plan.standing.num_copies == 0


@pytest.mark.parametrize("seed", [0, 7, 2**31 - 1])
def test_any_seed_plans(seed):
    step = problem(seed=seed)
    Equilibra(threads=1).plan(step).check(step.load, spare_slots=2)


def test_one_rank_plans():
    step = problem(cluster=Cluster(num_nodes=1, ranks_per_node=1))
    plan = Equilibra(threads=1).plan(step)
    plan.check(step.load, spare_slots=0)
    assert plan.gap(step.load) == 0.0


def test_giant_slots_plan():
    step = problem(spare_slots=10_000, standing_slots=10_000)
    plan = Equilibra(threads=1).plan(step)
    plan.check(step.load, spare_slots=10_000)


GOOD = {
    "row_us": dict.fromkeys(Stage, 1.0),
    "cross_row_us": 0.0,
    "flash_copy_us": dict.fromkeys(Stage, 0.0),
    "standing_copy_us": 0.0,
    "move_us": 0.0,
    "move_inside_us": 0.0,
}


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", [*GOOD, "exposed_share"])
def test_rates_are_finite_and_not_negative(name, value):
    wrong = dict.fromkeys(Stage, value) if name in {"row_us", "flash_copy_us"} else value
    with pytest.raises(InputError):
        Rates(**{**GOOD, name: wrong})


@pytest.mark.parametrize("name", ["row_us", "flash_copy_us"])
@pytest.mark.parametrize("stages", [{}, {Stage.UPDATE: 1.0}])
def test_rates_need_both_stages(name, stages):
    with pytest.raises(InputError, match=name):
        Rates(**{**GOOD, name: stages})


def test_a_copy_that_must_pay_pays():
    """The least tokens of a copy are worth at least what it costs."""
    rates = Rates(**{**GOOD, "flash_copy_us": dict.fromkeys(Stage, 19.0), "exposed_share": 0.1})
    for stage in Stage:
        assert rates.min_tokens_per_copy(stage) * rates.row_us[stage] >= 1.9


RANDOM_PROBLEMS = """
import json, numpy as np
from equilibra.core.placement import Cluster
from equilibra.core.load import SequenceLoad, StepLoad
from equilibra.core.model import model_named
from equilibra.core.placement import Placement
from equilibra.cost.rates import Rates, rates_for
from equilibra.plan.one_layer import balance
from equilibra.plan.pack import in_order
from equilibra.plan.planner import StepProblem
from equilibra.plan.step import Equilibra
digests = []
for seed in range(COUNT):
    rng = np.random.default_rng(seed)
    cluster = Cluster(num_nodes=int(rng.integers(1, 5)), ranks_per_node=int(rng.integers(1, 9)))
    ranks = cluster.num_ranks
    experts = ranks * int(rng.integers(1, 4))
    weights = rng.dirichlet(np.full(experts, 10.0 ** rng.uniform(-2, 1)))
    total = int(10 ** rng.uniform(0, 6))
    tokens = rng.multinomial(total, weights, size=(3, 2, ranks)).transpose(0, 1, 3, 2)
    slots = int(rng.integers(0, 4))
    one = balance(tokens[0, 0], cluster=cluster, spare_slots=slots, tolerance=float(rng.choice([0, 0.005, 0.3])),
                  min_tokens_per_copy=int(rng.choice([0, 3, 1000])))
    assert one.rank_load.sum() == tokens[0, 0].sum()
    rates = Rates.free() if seed % 2 else rates_for(model_named("olmoe"))
    lengths = rng.integers(1, 500, 24)
    per_sequence = rng.multinomial(lengths, weights, size=(2, 24)).transpose(1, 0, 2)
    sequences = SequenceLoad(tokens_SLE=per_sequence.astype(np.int32), length_of_sequence=lengths)
    even = np.repeat(np.arange(ranks), experts // ranks)
    homes = np.stack([rng.permutation(even) for _ in range(2)]).astype(np.int32)
    schedule = in_order(lengths, cluster, tokens_per_rank=600)
    common = {"cluster": cluster, "rates": rates, "spare_slots": slots, "standing_slots": int(rng.integers(0, 4)),
              "previous": Placement(home_of_expert=homes, cluster=cluster), "seed": seed}
    for problem in (
        StepProblem(given_load=StepLoad(tokens_MLER=np.ascontiguousarray(tokens, np.int32)), **common),
        StepProblem(sequences=sequences, schedule=schedule, tokens_per_rank=600, **common),
    ):
        plan = Equilibra(threads=1, flash=seed % 5 != 0, standing=seed % 7 != 0, reorder=seed % 3 != 0).plan(problem)
        plan.check(problem.load_under(plan.schedule), spare_slots=slots)
        digests.append(plan.digest)
print(json.dumps(digests))
"""


@pytest.mark.slow
def test_kernels_stay_in_bounds(tmp_path_factory):
    """Compiled with bounds checks, into a cache of their own; takes a minute or two, nearly all of it compilation."""
    cache = tmp_path_factory.mktemp("numba")
    checked = in_another_process(
        RANDOM_PROBLEMS.replace("COUNT", "80"), 900, NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=str(cache)
    )
    plain = in_another_process(RANDOM_PROBLEMS.replace("COUNT", "80"), 900)
    assert json.loads(checked) == json.loads(plain), "bounds checks change no plan"


def test_plans_do_not_depend_on_the_hash_seed():
    code = RANDOM_PROBLEMS.replace("COUNT", "12")
    first, second = (json.loads(in_another_process(code, 300, PYTHONHASHSEED=seed)) for seed in ("1", "2"))
    assert len(first) == 24
    assert first == second


def test_many_small_problems_end():
    """A search for the smallest cap that works must end, also where no cap below it does."""
    output = in_another_process(
        """
import numpy as np
from equilibra.core.placement import Cluster
from equilibra.plan.one_layer import balance
rng = np.random.default_rng(0)
for _ in range(1500):
    ranks = int(rng.integers(2, 5))
    weights = rng.dirichlet(np.full(ranks * int(rng.integers(1, 4)), 0.5))
    tokens = rng.multinomial(int(rng.integers(1, 300)), weights, size=ranks).T
    balance(tokens, cluster=Cluster(ranks_per_node=ranks), spare_slots=1, tolerance=0.0)
print("done")
""",
        timeout_s=120,
    )
    assert output.strip() == "done"


@pytest.mark.parametrize(
    ("expert", "rank", "said"),
    [
        ([1, 2], [0], "need an expert and a rank each"),
        ([[1]], [[0]], "need an expert and a rank each"),
        ([0.5], [2.0], "must be whole numbers"),
        ([8], [2], "experts of standing copies must be 0 to 7, not 8 to 8"),
        ([-1], [2], "experts of standing copies must be 0 to 7"),
        ([0], [4], "ranks of standing copies must be 0 to 3"),
        ([0], [0], "on a node that has its expert already"),
        ([0], [1], "on a node that has its expert already"),
        ([0, 0], [2, 3], "on a node that has its expert already"),
        ([0, 0], [2, 2], "on a node that has its expert already"),
    ],
)
def test_standing_copies_that_cannot_be(expert, rank, said):
    with pytest.raises(InputError, match=said):
        balance(
            np.ones((8, 4), int), cluster=Cluster(num_nodes=2, ranks_per_node=2), standing_expert=np.array(expert),
            standing_rank=np.array(rank),
        )  # fmt: skip


@pytest.mark.parametrize("budget", [0, -1, True, 15.5, math.inf, 10**20, "64"])
def test_token_budgets_that_cannot_be(budget):
    sequences = SequenceLoad(tokens_SLE=np.ones((4, 1, 8), np.int32), length_of_sequence=np.full(4, 8))
    with pytest.raises(InputError, match="tokens_per_rank must be a whole number from 1"):
        plan_step(sequences, cluster=Cluster(ranks_per_node=4), tokens_per_rank=budget)
    assert plan_step(sequences, cluster=Cluster(ranks_per_node=4), tokens_per_rank=np.int64(64)).num_layers == 1


def test_a_layer_takes_tokens_of_its_experts_only():
    layer = OneLayer(8, cluster=FOUR)
    with pytest.raises(InputError, match="tokens must be of 8 experts, not of 4"):
        layer.balance(np.ones((4, 4), int))
    for wrong in (0, -4, 8.0, "8"):
        with pytest.raises(InputError, match="num_experts must be a whole number from 1"):
            OneLayer(wrong, cluster=FOUR)


def test_hardware_is_looked_up_without_a_model_too():
    load = StepLoad(tokens_MLER=np.ones((1, 1, 8, 4), np.int32))
    with pytest.raises(InputError, match="typo"):
        plan_step(load, cluster=Cluster(ranks_per_node=4), hardware="typo")


def test_standing_copies_on_one_node():
    one = Cluster(num_nodes=1, ranks_per_node=4)
    with pytest.raises(InputError, match="level nodes, and there is one"):
        balance(np.ones((8, 4), int), cluster=one, standing_expert=np.array([0]), standing_rank=np.array([2]))
    assert balance(np.ones((8, 4), int), cluster=one, standing_expert=[], standing_rank=[]).imbalance == 1


def test_placements_out_of_range_never_reach_a_plan():
    with pytest.raises(InputError):
        problem(
            previous=Placement(
                home_of_expert=np.full((2, 8), 4, np.int32), cluster=Cluster(num_nodes=2, ranks_per_node=2)
            )
        )
