"""Locked and shared memory, and what the host path needs of it."""

import resource
import types
from pathlib import Path

import pytest
import torch

from equilibra.core.model import model_named
from equilibra.doctor import memory
from equilibra.doctor.finding import Ask, Finding, State
from equilibra.doctor.node import answer
from equilibra.execute.copies.transfer import _Shape

GIB = 2**30


def check(name: str) -> list[Finding]:
    return [Finding(**{**one, "state": State(one["state"])}) for one in answer(name, Ask())["findings"]]


@pytest.mark.parametrize(
    ("limit", "infiniband", "state"),
    [(resource.RLIM_INFINITY, True, State.OK), (8 * 2**20, False, State.OK), (8 * 2**20, True, State.WARNING)],
)
def test_locked_memory(monkeypatch, tmp_path, limit, infiniband, state):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(memory, "INFINIBAND", tmp_path if infiniband else tmp_path / "none")
    assert check("locked memory")[0].state is state


def shared(monkeypatch, free: int, **ask: object) -> Finding:
    about = types.SimpleNamespace(f_blocks=100 * GIB // 4096, f_frsize=4096, f_bavail=free // 4096)
    monkeypatch.setattr(memory.os, "statvfs", lambda _: about)
    return memory.check_shared_memory(Ask(**ask))


def test_shared_memory_against_a_model(monkeypatch):
    model = model_named("qwen3-30b-a3b")
    fewest, one, most = memory.needed_bytes(model, num_ranks=8, spare_slots=2)
    assert fewest < one < most
    ask = {"model": model.name, "ranks_per_node": 8}
    assert shared(monkeypatch, most, **ask).state is State.OK
    assert shared(monkeypatch, most - 4096, **ask).state is State.WARNING
    assert shared(monkeypatch, fewest, **ask).state is State.WARNING
    assert shared(monkeypatch, fewest - 4096, **ask).state is State.MISSING
    assert "--shm-size" in shared(monkeypatch, 0, **ask).advice
    assert shared(monkeypatch, GIB).state is State.OK
    assert shared(monkeypatch, 2**20).state is State.WARNING


@pytest.mark.parametrize(("ranks", "slots", "instances"), [(2, 1, 0), (8, 2, 100), (3, 5, 7)])
def test_the_formula_is_that_of_the_runtime(ranks, slots, instances):
    model = model_named("olmoe")
    shape = _Shape(
        num_entries=instances, num_ranks=ranks, num_slots=slots, values=model.expert_parameters,
        dtype=torch.bfloat16, gradient_dtype=torch.float32,
    )  # fmt: skip
    assert memory.segment_bytes(model, num_ranks=ranks, spare_slots=slots, num_instances=instances) == shape.num_bytes


def test_shared_memory_that_cannot_be_written(monkeypatch):
    monkeypatch.setattr(memory, "SHARED_MEMORY", Path("/nonexistent"))
    (found,) = check("shared memory")
    assert found.state is State.MISSING
    assert "/nonexistent" in found.text


def test_nothing_stays_in_shared_memory():
    before = set(memory.SHARED_MEMORY.glob("equilibra-doctor-*"))
    check("shared memory")
    assert set(memory.SHARED_MEMORY.glob("equilibra-doctor-*")) == before
