"""Plans on disk come back as they were, with the ranks that share a sequence, and a changed one is refused."""

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from equilibra.core.errors import InputError
from equilibra.core.load import Schedule, SequenceLoad
from equilibra.core.model import model_named
from equilibra.core.placement import Cluster
from equilibra.core.plan import STAGE_ARRAYS, Stage, StepPlan
from equilibra.cost.rates import rates_for
from equilibra.plan.planner import StepProblem
from equilibra.plan.step import Equilibra
from equilibra.plan.store import load_plan, save_plan

CLUSTER = Cluster(num_nodes=2, ranks_per_node=4)


def planned(width: int) -> tuple[StepPlan, StepProblem]:
    rng = np.random.default_rng(width)
    lengths = rng.integers(100, 900, 40)
    liking = rng.dirichlet(np.full(16, 0.4), (40, 2))
    tokens = np.stack([rng.multinomial(4 * n, p) for n, p in zip(lengths, liking, strict=True)]).astype(np.int32)
    cell = np.arange(40) % (8 // width)
    problem = StepProblem(
        cluster=CLUSTER,
        sequences=SequenceLoad(tokens_SLE=tokens, length_of_sequence=lengths),
        schedule=Schedule(
            micro_batch_of_sequence=(np.arange(40) // 8).astype(np.int32),
            rank_of_sequence=(cell * width).astype(np.int32),
            num_micro_batches=5,
            ranks_per_sequence=width,
        ),
        tokens_per_rank=2000,
        rates=rates_for(model_named("gpt-oss-20b"), num_nodes=2),
    )
    return Equilibra(threads=1, work=50_000).plan(problem), problem


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_plan_comes_back_with_the_ranks_that_share_a_sequence(width, tmp_path):
    plan, problem = planned(width)
    assert plan.schedule is not None
    assert plan.schedule.ranks_per_sequence == width, "packing keeps what the framework shares"
    plan.check(problem.load_under(plan.schedule), spare_slots=2, standing_slots=2)
    save_plan(plan, tmp_path / "plan.npz")
    again = load_plan(tmp_path / "plan.npz")
    assert again.digest == plan.digest
    assert again.schedule is not None
    assert again.schedule.ranks_per_sequence == width
    assert again.schedule.num_micro_batches == plan.schedule.num_micro_batches
    for stage in Stage:
        for name in STAGE_ARRAYS:
            np.testing.assert_array_equal(getattr(again.stages[stage], name), getattr(plan.stages[stage], name))
    again.check(problem.load_under(again.schedule), spare_slots=2)


def rewritten(path, **changes) -> None:
    """Change the header of a plan on disk; None removes a key."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    about = {**json.loads(arrays.pop("about").tobytes()), **changes}
    text = json.dumps({key: value for key, value in about.items() if value is not None})
    np.savez(path, about=np.frombuffer(text.encode(), np.uint8), **arrays)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"digest": None}, "the file says None"),
        ({"ranks_per_sequence": 10**40}, "not a valid plan"),
        ({"ranks_per_sequence": math.inf}, "not a valid plan"),
    ],
)
def test_a_damaged_header_is_refused(changes, said, tmp_path):
    save_plan(planned(2)[0], tmp_path / "plan.npz")
    rewritten(tmp_path / "plan.npz", **changes)
    with pytest.raises(InputError, match=said):
        load_plan(tmp_path / "plan.npz")


def test_a_header_that_is_nested_too_deeply_is_refused(tmp_path):
    np.savez(tmp_path / "plan.npz", about=np.frombuffer(b"[" * 100_000, np.uint8))
    with pytest.raises(InputError, match="it is not an"):
        load_plan(tmp_path / "plan.npz")


@pytest.mark.parametrize("wrong", [1, 4, 3, 0])
def test_a_plan_whose_shared_ranks_were_changed_is_refused(wrong, tmp_path):
    """Other ranks would hold the tokens: the digest covers it."""
    plan, _ = planned(2)
    save_plan(plan, tmp_path / "plan.npz")
    rewritten(tmp_path / "plan.npz")
    load_plan(tmp_path / "plan.npz")  # written anew, but nothing changed
    rewritten(tmp_path / "plan.npz", ranks_per_sequence=wrong)
    with pytest.raises(InputError, match=r"its digest is|not a valid plan"):
        load_plan(tmp_path / "plan.npz")


def test_flipped_bytes_are_refused_or_harmless(tmp_path):
    """Whatever zip, zlib and numpy raise on damage becomes one kind of error."""
    path, plan, rng = tmp_path / "plan.npz", planned(1)[0], random.Random(0)
    save_plan(plan, path)
    whole, refused = path.read_bytes(), 0
    for _ in range(400):
        damaged = bytearray(whole)
        directory = whole.index(b"PK\x01\x02")  # flips in the archive's directory claim passwords and compression
        for first in (0, directory):
            damaged[rng.randrange(first, len(damaged))] = rng.randrange(256)
        path.write_bytes(bytes(damaged))
        try:
            assert load_plan(path).digest == plan.digest
        except InputError:
            refused += 1
    assert refused > 200


def test_plans_that_share_differently_have_different_digests():
    plan, _ = planned(4)
    assert plan.schedule is not None
    for width in (1, 2):
        assert replace(plan, schedule=replace(plan.schedule, ranks_per_sequence=width)).digest != plan.digest


def test_files_of_this_version_stay_readable(tmp_path):
    """Version 2 is what users have on disk: another number would refuse their plans."""
    plan, _ = planned(1)
    save_plan(plan, tmp_path / "plan.npz")
    with np.load(tmp_path / "plan.npz") as archive:
        arrays = dict(archive)
    about = json.loads(arrays["about"].tobytes())
    assert about["version"] == 2
    for version in (1, 3):
        arrays["about"] = np.frombuffer(json.dumps(about | {"version": version}).encode(), np.uint8)
        np.savez(tmp_path / f"{version}.npz", **arrays)
        with pytest.raises(InputError, match=f"has version {version} of the plan format, this program reads 2"):
            load_plan(tmp_path / f"{version}.npz")
