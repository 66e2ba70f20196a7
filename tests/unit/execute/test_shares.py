"""Shares of programs: every tile once, in order, and all programs end together, as a plain greedy rule has it."""

from heapq import heapify, heapreplace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from equilibra.execute.kernels import grouped  # noqa: E402
from equilibra.execute.kernels.shares import Part, shares_of  # noqa: E402

PROGRAMS, SEEDS = 132, range(60)


def random_groups(rng, programs):
    """Groups of weights with those of dx and of halves at last, and rounds of dx that go before."""
    groups = [
        (part, int(rng.integers(0, 400)), 1000 * i, int(rng.integers(1, 50)), int(rng.integers(1, 9)))
        for part in (Part.DOWN, Part.GATE_UP)
        for i in range(rng.integers(1, 5))
    ]
    num_dx, halved = int(rng.integers(0, 5 * programs)), int(rng.integers(0, programs + 1))
    every = [*groups, (Part.ROWS_AFTER, num_dx, 7, 5, 1), (Part.HALVES, 2 * halved, 2 * (7 + num_dx), 3, 1)]
    return np.array(every), int(rng.integers(0, num_dx // programs + 1))


def whole(groups):
    """The same, halves put together."""
    found = groups.copy()
    found[-2, 1] += found[-1, 1] // 2
    found[-1, 1] = 0
    return found


def greedy(groups, rounds, programs):
    """[P] ends: every tile to the program that comes to its end first, the one with the lowest number among them."""
    heap = [(rounds * int(groups[-2, 3]), program) for program in range(programs)]
    heapify(heap)
    for at, (_, count, _, cost, _) in enumerate(groups.tolist()):
        for _ in range(count - (rounds * programs if at == len(groups) - 2 else 0)):
            end, program = heap[0]
            heapreplace(heap, (end + cost, program))
    return [end for end, _ in sorted(heap, key=lambda entry: entry[1])]


def sooner(groups, rounds, programs):
    """The groups with or without halves, whichever ends sooner."""
    return min((whole(groups), groups), key=lambda some: max(greedy(some, rounds, programs)))


def ends_and_tiles(work, table, groups):
    """[P] ends, and of each part all tiles, from what a program would do with its share."""
    found = {part: [] for part in Part}
    of_tile = {
        (part, first + i): (cost, steps) for part, count, first, cost, steps in groups.tolist() for i in range(count)
    }
    ends = []
    for share in table.reshape(-1, 2 * len(Part)).tolist():
        end = 0
        for part in Part:
            at, left = share[2 * part : 2 * part + 2]
            while left > 0:
                tile = int(work[at])
                known = Part.ROWS_AFTER if part is Part.ROWS_BEFORE else part
                cost, steps = of_tile[known, tile]
                found[part].append(tile)
                at, left, end = at + 1, left - steps, end + cost
            assert left == 0
        ends.append(end)
    return ends, found


def drawn(seed):
    """Programs, groups and rounds."""
    rng = np.random.default_rng(seed)
    programs = int(rng.choice([1, 2, 7, PROGRAMS]))
    return programs, *random_groups(rng, programs)


@pytest.mark.parametrize("seed", SEEDS)
def test_shares_are_those_of_the_greedy_rule(seed):
    programs, groups, rounds = drawn(seed)
    work, table = shares_of(groups, rounds, programs)
    groups = sooner(groups, rounds, programs)
    ends, found = ends_and_tiles(work, table, groups)
    assert ends == greedy(groups, rounds, programs)
    for part in (Part.DOWN, Part.GATE_UP, Part.HALVES):
        wanted = [first + i for of, count, first, _, _ in groups.tolist() if of == part for i in range(count)]
        assert sorted(found[part]) == sorted(wanted)
    assert sorted(found[Part.ROWS_BEFORE] + found[Part.ROWS_AFTER]) == list(range(7, 7 + groups[-2, 1]))
    first_half = -(-programs // 2)
    assert len(found[Part.ROWS_BEFORE]) == rounds * first_half


def test_halves_are_chosen_and_not_chosen_with_rounds_and_without():
    chosen = set()
    for seed in SEEDS:
        programs, groups, rounds = drawn(seed)
        _, table = shares_of(groups, rounds, programs)
        chosen.add((bool(table[:, 2 * Part.HALVES + 1].any()), rounds > 0))
    assert len(chosen) == 4


class Layer:
    """Tiles of a layer's gradients on a GPU, and what each costs."""

    def __init__(self, sizes, width, inner, learned=(True, True)):
        weight, dx = grouped.WEIGHT, grouped.DX
        self.task = grouped.ShareTask(sizes, width, inner, learned, (weight, dx), PROGRAMS)
        self.each = grouped._num_tiles(width, inner, weight), grouped._num_tiles(2 * inner, width, weight)
        self.num_dx = sum(grouped._num_tiles(size, width, dx) for size in sizes)
        self.whole = 2 * inner + grouped.STORE_COST
        self.half = int(2 * inner * grouped.HALF_COST) + grouped.STORE_COST
        self.steps = [max(-(-size // weight.bk), 1) for size in sizes]
        self.costs = [steps * weight.bk + grouped.SUM_COST for steps in self.steps]

    def groups(self):
        """Of all tiles that there may be."""
        weights = [
            (part, self.each[part - 1], i * self.each[part - 1], cost, steps)
            for part in (Part.DOWN, Part.GATE_UP)
            for i, (cost, steps) in enumerate(zip(self.costs, self.steps, strict=True))
        ]
        of_rows = (Part.ROWS_AFTER, self.num_dx, 0, self.whole, 1), (Part.HALVES, 2 * self.num_dx, 0, self.half, 1)
        return np.array([*weights, *of_rows])

    def launches(self):
        """Ends and tiles of both."""
        tables = self.task.share_out()
        return [ends_and_tiles(work, table, self.groups()) for work, table in (tables[:2], tables[2:])]


@pytest.mark.parametrize("learned", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize(
    ("sizes", "width", "inner"),
    [((5000, 4000, 6000, 0, 500), 2048, 768), ((2500,) * 8 + (700, 300), 7168, 2048), ((16000, 200), 2880, 2880)],
)
def test_all_tiles_of_a_layer_once_and_programs_end_together(sizes, width, inner, learned):
    layer = Layer(sizes, width, inner, learned)
    found, idle = {part: [] for part in Part}, 0.0
    for ends, tiles in layer.launches():
        found = {part: found[part] + tiles[part] for part in Part}
        idle += max(ends) - float(np.mean(ends))
    halved = sorted(found[Part.HALVES])
    assert halved == list(range(2 * layer.num_dx - len(halved), 2 * layer.num_dx))
    assert sorted(found[Part.ROWS_BEFORE] + found[Part.ROWS_AFTER]) == list(range(layer.num_dx - len(halved) // 2))
    for part in (Part.DOWN, Part.GATE_UP):
        assert sorted(found[part]) == list(range(len(sizes) * layer.each[part - 1] * learned[part - 1]))
    assert len(layer.task.share_out()[0]) > 0 or max(layer.each) < PROGRAMS
    assert idle < layer.whole  # less than one tile of dx


@pytest.mark.parametrize("sizes", [(9728, 6784), (9642, 6832), (12288, 4006)])
def test_programs_end_sooner_with_halves(sizes):
    """Gpt-oss: a tile of dx is a thirtieth of what a program does."""
    layer = Layer(sizes, 2880, 2880)
    heap = [0] * PROGRAMS  # what is left of the weights' tiles in their order, then dx: as it is without halves
    whole_rounds = sum(count // PROGRAMS * cost for count in layer.each for cost in layer.costs)
    left = [(count % PROGRAMS, cost) for count in layer.each for cost in layer.costs]
    for count, cost in [*left, (layer.num_dx, layer.whole)]:
        for _ in range(count):
            heapreplace(heap, heap[0] + cost)
    assert sum(max(ends) for ends, _ in layer.launches()) < whole_rounds + max(heap)


def test_a_share_left_out_is_noticed():
    rng = np.random.default_rng(0)
    groups, rounds = random_groups(rng, 7)
    work, table = shares_of(groups, rounds, 7)
    table[3, 1:] = 0
    groups = sooner(groups, rounds, 7)
    ends, _ = ends_and_tiles(work, table, groups)
    assert ends != greedy(groups, rounds, 7)
