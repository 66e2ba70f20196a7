"""Dense weights that differ between ranks are named before the first step."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from equilibra.core.errors import MismatchError
from equilibra.execute.steps.gradients import check_replicated


class Rank:
    """A rank of a group whose ranks are threads."""

    def __init__(self, rank, said, met):
        self.rank, self.said, self.met, self.world_size = rank, said, met, len(said)

    def gather(self, values, *, what):
        assert what
        self.said[self.rank] = values
        self.met.wait(10)
        every = [np.asarray(part) for part in self.said]
        self.met.wait(10)
        return every


def compared(*models):
    """The error that each rank raises; None without one."""
    said, met, errors = [None] * len(models), threading.Barrier(len(models)), [None] * len(models)

    def compare(rank, model):
        try:
            check_replicated(model, SimpleNamespace(group=Rank(rank, said, met), weights=[]))
        except MismatchError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=compare, args=(rank, model)) for rank, model in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(set(errors)) == 1, "all ranks hear the same"
    return errors[0]


def model_of(rank=0, dtype=torch.float32):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 4, dtype=dtype), nn.Sequential(nn.Linear(4, 3, dtype=dtype)))
    model[1].register_buffer("cache", torch.full((3,), float(rank)), persistent=False)
    model[1].register_buffer("mask", torch.arange(7))
    return model


def test_equal_models_pass_whatever_their_caches_hold():
    assert compared(model_of(0), model_of(1), model_of(2)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_a_single_bit_is_named(dtype):
    for place in ((0, 0), (2, 3)):
        other = model_of(1, dtype)
        weight = torch.view_as_real(other[1][0].weight.data) if dtype.is_complex else other[1][0].weight.data
        words = weight.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.dtype.itemsize])
        words[place] ^= 1
        said = compared(model_of(0, dtype), other)
        assert said is not None
        assert "the dense weight 1.0.weight is not the same on all ranks: rank 1 differs from rank 0" in said
        assert "(1 of 5 tensors differ)" in said


def test_values_in_other_places_are_other_weights():
    other = model_of(1)
    other[0].bias.data = other[0].bias.data.flip(0)
    other[1].mask += 1
    said = compared(model_of(), other)
    assert "the dense weight 0.bias is not the same" in said
    assert "(2 of 5 tensors differ)" in said


def test_the_first_eight_of_many_ranks_are_named():
    def with_one_changed(rank):
        model = model_of(rank)
        if rank:
            model[0].bias.data[0] += rank
        return model

    assert "ranks 1, 2, 3 differ from rank 0" in compared(*map(with_one_changed, range(4)))
    said = compared(*map(with_one_changed, range(11)))
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 2 more differ from rank 0" in said


def test_other_shapes_are_another_model():
    other = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    assert "counts by rank: 5, 4" in compared(model_of(), other)
