"""What is fetched ahead is what comes next, and what was fetched is dropped with the weights it was made of."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from equilibra.core.errors import BudgetError
from equilibra.core.plan import Stage
from equilibra.core.visit import VisitKey
from equilibra.events.schema import Direction
from equilibra.execute.copies.copies import Copies
from equilibra.execute.copies.transfer import SpareSlots

LAYERS, MICRO_BATCHES = 4, 3


def visits(stage):
    """All of a step in their order: (visit, direction)."""
    every = []
    for m in range(MICRO_BATCHES):
        every += [(VisitKey(stage, m, layer), Direction.FORWARD) for layer in range(LAYERS)]
        if stage is Stage.UPDATE:
            every += [(VisitKey(stage, m, layer), Direction.BACKWARD) for layer in reversed(range(LAYERS))]
    return every


@pytest.mark.parametrize("stage", list(Stage))
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 9])
def test_the_next_visits_are_fetched_ahead(stage, depth):
    following = SimpleNamespace(after=lambda _, m: m + 1 if m + 1 < MICRO_BATCHES else None)
    copies = SimpleNamespace(armed=following, weights=[None] * LAYERS, setting=SimpleNamespace(prefetch_depth=depth))
    order = visits(stage)
    for at, (key, direction) in enumerate(order):
        ahead = [there for there, _ in order[at + 1 : at + 1 + depth]]
        turning = stage is Stage.UPDATE and key.layer == LAYERS - 1 and direction is Direction.FORWARD
        wanted = ahead[1:] if turning else ahead  # the last layer comes again at once: its copies are here
        found = list(Copies._layer_after_layer(copies, key, direction))
        if stage is Stage.UPDATE:  # seen from a forward visit, and from a backward one
            wanted = [there for place, there in enumerate(wanted) if there not in wanted[:place]]
            found = [there for place, there in enumerate(found) if there not in found[:place]]
        assert found == wanted


class Moving:
    def __init__(self):
        self.waited = False

    def wait(self):
        self.waited = True


class Engine:
    """Fills slots with the version that is asked for."""

    def __init__(self):
        self.fetched = []

    def fetch(self, copies, version, slots_nP):
        slots_nP.fill_(version)
        self.fetched.append(Moving())
        return self.fetched[-1]


def list_of(count):
    return SimpleNamespace(num_in_node=count, held_expert=np.arange(count))


def slots_of(num_slots=2, depth=1):
    return SpareSlots(num_slots=num_slots, depth=depth, row=torch.zeros(3), now=lambda: 0.0)


def test_copies_are_dropped_with_the_weights_they_were_made_of():
    slots, engine, key = slots_of(), Engine(), VisitKey(Stage.UPDATE, 0, 1)
    slots.start(key, list_of(2), engine, 1)
    assert slots.has(key)
    assert sum(bank.arriving is not None for bank in slots._banks) == 1
    slots.forget()
    assert engine.fetched[0].waited, "the buffer is written to no more"
    assert not slots.has(key)
    assert all(bank.arriving is None for bank in slots._banks)
    assert slots.take(key, list_of(2), engine, 2)[0].tolist() == [[2.0] * 3] * 2
    assert len(engine.fetched) == 2
    again, _ = slots.take(key, list_of(2), engine, 2)
    assert len(engine.fetched) == 2, "what is here is not fetched again"
    assert again.tolist() == [[2.0] * 3] * 2


def test_as_many_copies_as_slots_fit_and_no_more():
    slots, engine = slots_of(), Engine()
    for count in (1, 2):
        assert len(slots.take(VisitKey(Stage.UPDATE, count, 0), list_of(count), engine, 1)[0]) == count
    with pytest.raises(BudgetError, match="puts 3 flash copies on a rank with 2 spare slots"):
        slots.start(VisitKey(Stage.UPDATE, 3, 0), list_of(3), engine, 1)
