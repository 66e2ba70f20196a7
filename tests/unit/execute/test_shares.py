"""Shares of programs: every tile once, in order, and all programs end together, as a plain greedy rule has it."""

from heapq import heapify, heapreplace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from equilibra.execute.kernels import grouped  # noqa: E402
from equilibra.execute.kernels.shares import Part, shares_of  # noqa: E402

PROGRAMS = 132


def random_groups(rng, programs):
    """Groups of weights with one of dx at last, and rounds of it that go before."""
    groups = [
        (part, int(rng.integers(0, 400)), 1000 * i, int(rng.integers(1, 50)), int(rng.integers(1, 9)))
        for part in (Part.DOWN, Part.GATE_UP)
        for i in range(rng.integers(1, 5))
    ]
    num_dx = int(rng.integers(0, 5 * programs))
    return np.array([*groups, (Part.ROWS_AFTER, num_dx, 7, 5, 1)]), int(rng.integers(0, num_dx // programs + 1))


def greedy(groups, rounds, programs):
    """[P] ends: every tile to the program that comes to its end first, the one with the lowest number among them."""
    heap = [(rounds * int(groups[-1, 3]), program) for program in range(programs)]
    heapify(heap)
    for at, (_, count, _, cost, _) in enumerate(groups.tolist()):
        for _ in range(count - (rounds * programs if at == len(groups) - 1 else 0)):
            end, program = heap[0]
            heapreplace(heap, (end + cost, program))
    return [end for end, _ in sorted(heap, key=lambda entry: entry[1])]


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


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_those_of_the_greedy_rule(seed):
    rng = np.random.default_rng(seed)
    programs = int(rng.choice([1, 2, 7, PROGRAMS]))
    groups, rounds = random_groups(rng, programs)
    work, table = shares_of(groups, rounds, programs)
    ends, found = ends_and_tiles(work, table, groups)
    assert ends == greedy(groups, rounds, programs)
    for part in (Part.DOWN, Part.GATE_UP):
        wanted = [first + i for of, count, first, _, _ in groups.tolist() if of == part for i in range(count)]
        assert sorted(found[part]) == sorted(wanted)
    assert sorted(found[Part.ROWS_BEFORE] + found[Part.ROWS_AFTER]) == list(range(7, 7 + groups[-1, 1]))
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
    found, idle = {part: [] for part in Part}, 0.0
    for work, table in (tables[:2], tables[2:]):
        ends, tiles = ends_and_tiles(work, table, np.array(groups))
        found = {part: found[part] + tiles[part] for part in Part}
        idle += max(ends) - float(np.mean(ends))
    assert sorted(found[Part.ROWS_BEFORE] + found[Part.ROWS_AFTER]) == list(range(num_dx))
    for part in (Part.DOWN, Part.GATE_UP):
        assert sorted(found[part]) == list(range(len(sizes) * each[part - 1] * learned[part - 1]))
    assert len(tables[0]) > 0 or max(each) < PROGRAMS
    assert idle < 2 * inner + grouped.STORE_COST  # less than one tile of dx


def test_a_share_left_out_is_noticed():
    rng = np.random.default_rng(0)
    groups, rounds = random_groups(rng, 7)
    work, table = shares_of(groups, rounds, 7)
    table[3, 1:] = 0
    ends, _ = ends_and_tiles(work, table, groups)
    assert ends != greedy(groups, rounds, 7)
