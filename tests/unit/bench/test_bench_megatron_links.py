"""Tokens through the GPU's memory: the protocol, with threads as ranks, CPU memory and signals that block."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.megatron_gpu import links
from benchmarks.megatron_gpu.links import IpcTokens, _Exchange

RANKS, ROUNDS, WIDTH = 3, 12, 5


class Signals:
    """What streams do on a GPU, the calling thread does here."""

    def __init__(self):
        self.values, self.changed = [0] * (2 * RANKS), threading.Condition()

    def give(self, number, value, _stream):
        with self.changed:
            self.values[number] = value
            self.changed.notify_all()

    def wait(self, number, value, _stream):
        with self.changed:
            assert self.changed.wait_for(lambda: self.values[number] >= value, timeout=20)

    def release(self):
        with self.changed:
            self.values = [2**62] * len(self.values)
            self.changed.notify_all()


@pytest.fixture
def ranks(monkeypatch):
    signals, buffers, all_there = Signals(), {}, threading.Barrier(RANKS)

    def exchanged(group, tensors, _dtype, _device):
        buffers[group.rank] = tensors
        all_there.wait()
        return buffers

    monkeypatch.setattr(links, "exchanged", exchanged)
    monkeypatch.setattr(links, "signals_of_node", lambda _group, _device: (signals, SimpleNamespace(close=list)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)

    def run(function):
        found, errors = [None] * RANKS, []

        def main(rank):
            try:
                group = SimpleNamespace(rank=rank, num_ranks=RANKS)
                found[rank] = function(IpcTokens(group, torch.device("cpu"), 40 * WIDTH * 8), rank)
            except BaseException as error:  # noqa: BLE001 - raised in the test
                errors.append(error)

        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found

    return run


def sizes_of(number):
    """[R, R] rows from each rank to each, some of them none."""
    return np.random.default_rng(number).integers(0, 9, (RANKS, RANKS)) * (np.arange(RANKS) != number % 4)


def rows_of(number, source, target):
    count = int(sizes_of(number)[source, target])
    return torch.arange(count * WIDTH, dtype=torch.float64).view(count, WIDTH) + 1e3 * (
        9 * number + 3 * source + target
    )


def test_rows_arrive_in_the_order_of_ranks(ranks):
    def exchange(tokens, rank):
        found = []
        for number in range(ROUNDS):
            sizes = sizes_of(number)
            rows = torch.cat([rows_of(number, rank, target) for target in range(RANKS)])
            found.append(tokens.exchange(rows, sizes[rank].tolist(), sizes[:, rank].tolist()))
        return found

    for rank, found in enumerate(ranks(exchange)):
        for number, rows in enumerate(found):
            assert torch.equal(rows, torch.cat([rows_of(number, source, rank) for source in range(RANKS)]))


def test_gradients_take_the_way_back(ranks):
    sizes = sizes_of(1)

    def exchange(tokens, rank):
        rows = torch.cat([rows_of(1, rank, target) for target in range(RANKS)]).requires_grad_()
        there, back = sizes[rank].tolist(), sizes[:, rank].tolist()
        out = _Exchange.apply(rows, tokens, there, back)
        (gradient,) = torch.autograd.grad(out, rows, 2 * out.detach())
        return rows.detach(), gradient

    for rows, gradient in ranks(exchange):
        assert torch.equal(gradient, 2 * rows)


def test_single_numbers_travel_too(ranks):
    def exchange(tokens, rank):
        return tokens.exchange(torch.full((2 * RANKS,), float(rank)), [2] * RANKS, [2] * RANKS)

    for found in ranks(exchange):
        assert found.tolist() == [0, 0, 1, 1, 2, 2]


def test_too_many_rows_are_refused(ranks):
    with pytest.raises(ValueError, match="room for 1600"):
        ranks(lambda tokens, _rank: tokens.exchange(torch.zeros(300, WIDTH), [100] * RANKS, [100] * RANKS))


def test_nobody_waits_for_ever(ranks):
    def exchange(tokens, rank):
        tokens.expect_within(0.2)
        if rank:  # rank 0 never comes
            tokens.exchange(torch.zeros(RANKS, WIDTH), [1] * RANKS, [1] * RANKS)
        else:
            threading.Event().wait(0.6)
        return tokens.expired

    assert any(ranks(exchange))  # the first to lose patience releases all
