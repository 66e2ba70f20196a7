"""M2N in shared memory: every row arrives where it belongs, from any sender to any receiver and back."""

import threading
import time

import numpy as np
import pytest
import torch

from equilibra.rollout.m2n import MeshShape, Pairs, SharedMesh, SharedReceiver, SharedSender
from equilibra.rollout.memory import Memory, Word

SHAPE = MeshShape(senders=2, receivers=3, slots=2, tokens=5, top_k=2, width=4, dtype=torch.float64)


@pytest.fixture
def mesh():
    memory = Memory.create(SharedMesh.num_bytes(SHAPE))
    other = Memory.open(memory.where)
    return SharedMesh(memory, SHAPE), SharedMesh(other, SHAPE)


def serve(receiver, number, stop):
    """An expert process whose experts multiply by the process's and the expert's number."""
    while not stop.is_set():
        mark = receiver.mark()
        messages = receiver.ready()
        for message in messages:
            rows = message.rows_ND[torch.from_numpy(message.pairs.row_P.astype(np.int64))]
            factor = torch.from_numpy(message.pairs.expert_P + 100 * number + 1000 * message.pairs.layer).double()
            receiver.reply(message, rows * factor[:, None])
        if not messages:
            receiver.wait(mark, 0.05)


def exchange(sender, slot, layer, experts_TK, hidden):
    """Send every token to process (expert % 3); what its tray should hold."""
    expert_P = experts_TK.ravel()
    for process in range(3):
        place = np.flatnonzero(expert_P % 3 == process)
        if place.size:
            tokens, row = np.unique(place // 2, return_inverse=True)
            pairs = Pairs(
                layer=layer, row_P=row.astype(np.int32), expert_P=expert_P[place], place_P=place.astype(np.int32)
            )
            sender.send(process, slot, hidden, tokens, pairs)
    factor = torch.from_numpy(expert_P + 100 * (expert_P % 3) + 1000 * layer).double()
    return hidden.repeat_interleave(2, dim=0) * factor[:, None]


def wait_for(sender, slot, seconds=10.0):
    end = time.monotonic() + seconds
    while not sender.arrived(slot):
        assert time.monotonic() < end, "results never came"
        sender.wait(sender.mark(), 0.01)


def test_rows_come_back_from_every_process(mesh):
    here, there = mesh
    stop = threading.Event()
    threads = [
        threading.Thread(target=serve, args=(SharedReceiver(there, number), number, stop)) for number in range(3)
    ]
    for thread in threads:
        thread.start()
    random = np.random.default_rng(0)
    senders = [SharedSender(here, 0), SharedSender(here, 1)]
    try:
        for layer in range(30):
            wanted = {}
            for number, sender in enumerate(senders):
                for slot in range(2):
                    size = int(random.integers(1, 6))
                    experts = random.integers(0, 9, (size, 2)).astype(np.int32)
                    hidden = torch.from_numpy(random.normal(size=(size, 4)))
                    wanted[number, slot] = exchange(sender, slot, layer, experts, hidden)
            for (number, slot), rows in wanted.items():
                wait_for(senders[number], slot)
                assert torch.equal(senders[number].tray(slot)[: len(rows)], rows)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_messages_are_seen_once_and_oldest_first(mesh):
    here, there = mesh
    receiver, senders = SharedReceiver(there, 0), [SharedSender(here, 0), SharedSender(here, 1)]
    assert receiver.ready() == []
    pairs = Pairs(layer=2, row_P=np.zeros(1, np.int32), expert_P=np.zeros(1, np.int32), place_P=np.zeros(1, np.int32))
    for number, slot in ((1, 1), (0, 0)):
        senders[number].send(0, slot, torch.ones(1, 4).double(), np.zeros(1, np.int64), pairs)
        receiver.ready()
    assert [(one.sender, one.slot) for one in receiver.ready()] == [(1, 1), (0, 0)]
    assert not senders[1].arrived(1)
    receiver.reply(receiver.ready()[0], torch.full((1, 4), 7.0).double())
    assert senders[1].arrived(1)
    assert not senders[0].arrived(0)
    assert [(one.sender, one.slot) for one in receiver.ready()] == [(0, 0)]


def test_results_without_their_signal_have_not_arrived(mesh):
    """Control: rows alone are not a message."""
    here, there = mesh
    receiver, sender = SharedReceiver(there, 0), SharedSender(here, 0)
    sender._signal = lambda *_: None
    pairs = Pairs(layer=0, row_P=np.zeros(1, np.int32), expert_P=np.zeros(1, np.int32), place_P=np.zeros(1, np.int32))
    sender.send(0, 0, torch.ones(1, 4).double(), np.zeros(1, np.int64), pairs)
    assert receiver.ready() == []
    assert not sender.arrived(0)


def test_a_word_wakes_whoever_waits_and_nobody_misses_it():
    values = np.zeros(2, np.int32)
    word, other = (Word(values, 1, writer=number, processes=2) for number in (0, 1))
    start = time.monotonic()
    word.wait(word.value(), 0.05)
    assert time.monotonic() - start > 0.04, "nobody woke it"
    seen = word.value()
    other.wake()
    start = time.monotonic()
    word.wait(seen, 5.0)
    threading.Timer(0.05, other.wake).start()
    word.wait(word.value(), 5.0)
    assert time.monotonic() - start < 4
