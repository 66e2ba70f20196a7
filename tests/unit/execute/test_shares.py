"""Shares of programs: every tile once, in order, and all programs end together, as a plain greedy rule has it."""

from heapq import heapify, heapreplace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from equilibra.execute.kernels import grouped  # noqa: E402
from equilibra.execute.kernels.shares import Part, shares_of  # noqa: E402

PROGRAMS = 132


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


@pytest.mark.parametrize("seed", range(30))
def test_shares_are_those_of_the_greedy_rule(seed):
    rng = np.random.default_rng(seed)
    programs = int(rng.choice([1, 2, 7, PROGRAMS]))
    groups, rounds = random_groups(rng, programs)
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


@pytest.mark.parametrize("learned", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize(
    ("sizes", "width", "inner"),
    [((5000, 4000, 6000, 0, 500), 2048, 768), ((2500,) * 8 + (700, 300), 7168, 2048), ((16000, 200), 2880, 2880)],
)
def test_all_tiles_of_a_layer_once_and_programs_end_together(sizes, width, inner, learned):
    weight, dx = grouped.WEIGHT, grouped.DX
    task = grouped.ShareTask(sizes, width, inner, learned, (weight, dx), PROGRAMS)
    tables = task.share_out()
    each = [-(-width // 128) * -(-inner // 256), -(-2 * inner // 128) * -(-width // 256)]
    num_dx = sum(-(-size // 128) for size in sizes) * -(-width // 256)
    steps = [max(-(-size // weight.bk), 1) for size in sizes]
    groups = [  # every tile by itself
        (part, 1, i * each[part - 1] + tile, steps[i] * weight.bk + grouped.SUM_COST, steps[i])
        for part in (Part.DOWN, Part.GATE_UP) for i in range(len(sizes)) for tile in range(each[part - 1])
    ]  # fmt: skip
    groups += [(Part.ROWS_AFTER, 1, tile, 2 * inner + grouped.STORE_COST, 1) for tile in range(num_dx)]
    half = int(2 * inner * grouped.HALF_COST) + grouped.STORE_COST
    groups += [(Part.HALVES, 1, number, half, 1) for number in range(2 * num_dx)]
    found, idle = {part: [] for part in Part}, 0.0
    for work, table in (tables[:2], tables[2:]):
        ends, tiles = ends_and_tiles(work, table, np.array(groups))
        found = {part: found[part] + tiles[part] for part in Part}
        idle += max(ends) - float(np.mean(ends))
    halved = sorted(found[Part.HALVES])
    assert halved == list(range(2 * num_dx - len(halved), 2 * num_dx))
    assert sorted(found[Part.ROWS_BEFORE] + found[Part.ROWS_AFTER]) == list(range(num_dx - len(halved) // 2))
    for part in (Part.DOWN, Part.GATE_UP):
        assert sorted(found[part]) == list(range(len(sizes) * each[part - 1] * learned[part - 1]))
    assert len(tables[0]) > 0 or max(each) < PROGRAMS
    assert idle < 2 * inner + grouped.STORE_COST  # less than one tile of dx


@pytest.mark.parametrize("sizes", [(9728, 6784), (9642, 6832), (12288, 4006)])
def test_programs_end_sooner_with_halves(sizes):
    """gpt-oss: a tile of dx is a thirtieth of what a program does."""
    width = inner = 2880
    task = grouped.ShareTask(sizes, width, inner, (True, True), (grouped.WEIGHT, grouped.DX), PROGRAMS)
    num_dx = sum(-(-size // 128) for size in sizes) * 12
    each = -(-width // 128) * -(-inner // 256), -(-2 * inner // 128) * -(-width // 256)
    costs = [-(-size // 32) * 32 + grouped.SUM_COST for size in sorted(sizes, reverse=True)]
    heap = [0] * PROGRAMS  # leftover tiles of weights in their order, then dx: as it was without halves
    whole_rounds = sum(count // PROGRAMS * cost for count in each for cost in costs)
    for count in each:
        for cost in costs:
            for _ in range(count % PROGRAMS):
                heapreplace(heap, heap[0] + cost)
    for _ in range(num_dx):
        heapreplace(heap, heap[0] + 2 * inner + grouped.STORE_COST)
    assert _last_end(task) < whole_rounds + max(heap)


def _last_end(task):
    """When the last program ends, of both launches."""
    groups, end = [], 0
    each = -(-task.width // 128) * -(-task.inner // 256), -(-2 * task.inner // 128) * -(-task.width // 256)
    for part in (Part.DOWN, Part.GATE_UP):
        for i, size in enumerate(task.sizes):
            steps = -(-size // 32)
            groups.append((part, each[part - 1], i * each[part - 1], steps * 32 + grouped.SUM_COST, steps))
    num_dx = sum(-(-size // 128) for size in task.sizes) * -(-task.width // 256)
    whole, half = 2 * task.inner + grouped.STORE_COST, int(2 * task.inner * grouped.HALF_COST) + grouped.STORE_COST
    groups += [(Part.ROWS_AFTER, num_dx, 0, whole, 1), (Part.HALVES, 2 * num_dx, 0, half, 1)]
    tables = task.share_out()
    for work, table in (tables[:2], tables[2:]):
        end += max(ends_and_tiles(work, table, np.array(groups))[0])
    return end


def test_both_whole_tiles_and_halves_are_chosen():
    chosen = set()
    for seed in range(30):
        rng = np.random.default_rng(seed)
        groups, rounds = random_groups(rng, 7)
        chosen.add(bool(sooner(groups, rounds, 7)[-1, 1]))
    assert chosen == {True, False}


def test_a_share_left_out_is_noticed():
    rng = np.random.default_rng(0)
    groups, rounds = random_groups(rng, 7)
    work, table = shares_of(groups, rounds, 7)
    table[3, 1:] = 0
    groups = sooner(groups, rounds, 7)
    ends, _ = ends_and_tiles(work, table, groups)
    assert ends != greedy(groups, rounds, 7)
