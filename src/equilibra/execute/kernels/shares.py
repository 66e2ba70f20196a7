"""Assign tiles to the programs of a launch so that all programs end together.

Symbols: P programs, n tiles, G groups, K parts.

The gradients of both matrices and of the rows are three independent products. A tile's cost is the length of its sums:
an instance's rows for weights, 2F for rows. One launch computes all three, in five parts:

    ROWS_BEFORE   some tiles of dx, by the first half of the programs
    DOWN          dW2
    GATE_UP       dW1
    ROWS_AFTER    as many tiles of dx, by the second half; then the rest, by all
    HALVES        the last tiles of dx as half tiles, where programs end sooner with them

So half of the programs multiply while the other half waits for memory, which dominates adding to float32 sums. Tiles of
weights go in order to the program that is free first: neighbouring tiles run at the same time and share caches. The
last tiles of dx are short and fill the gaps.

Where instances have more tiles than there are programs, whole rounds of them get a launch of their own, in which all
programs stay at the same rows of an instance: caches need that where instances have many rows.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from equilibra.core.kernel import inlined, kernel


class Part(IntEnum):
    """Parts of a launch, in the order of computation."""

    ROWS_BEFORE = 0
    DOWN = 1
    GATE_UP = 2
    ROWS_AFTER = 3
    HALVES = 4


NUM_PARTS = len(Part)
ROWS_BEFORE, DOWN, GATE_UP, ROWS_AFTER, HALVES = (int(part) for part in Part)


@inlined
def _sink(ends, programs, end, program):  # type: ignore[no-untyped-def]
    """Replace the top of a heap of programs, ordered by end and number."""
    place, size = 0, len(ends)
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and (
            ends[child + 1] < ends[child] or (ends[child + 1] == ends[child] and programs[child + 1] < programs[child])
        ):
            child += 1
        if ends[child] > end or (ends[child] == end and programs[child] > program):
            break
        ends[place], programs[place] = ends[child], programs[child]
        place = child
    ends[place], programs[place] = end, program


@inlined
def _latest(heap, of, count, cost, short_count, short_cost):  # type: ignore[no-untyped-def]
    """When the last program ends after `count` more tiles and then `short_count` short ones."""
    ends, programs = heap.copy(), of.copy()
    latest = int(heap.max())
    for tile in range(count + short_count):
        end = int(ends[0]) + (cost if tile < count else short_cost)
        latest = max(latest, end)
        _sink(ends, programs, end, programs[0])
    return latest


@inlined
def _settle_halves(groups_G5, counts_G, ends, programs, given):  # type: ignore[no-untyped-def]
    """Merge half tiles unless programs end sooner with them; `given` tiles of dx are assigned already."""
    cost, short_cost = groups_G5[-2:, 3]
    left, halves = counts_G[-2] - given, counts_G[-1]
    if halves > 0:
        whole = _latest(ends, programs, left + halves // 2, cost, 0, short_cost)
        if whole <= _latest(ends, programs, left, cost, halves, short_cost):
            counts_G[-2:] = counts_G[-2] + halves // 2, 0


@inlined
def _listed(program_of_tile, part_of_tile, number_of_tile, steps_PK):  # type: ignore[no-untyped-def]
    """Work and shares: tiles sorted by program and part."""
    following = np.zeros(steps_PK.size + 1, np.int64)
    for tile in range(len(program_of_tile)):
        following[program_of_tile[tile] * NUM_PARTS + part_of_tile[tile] + 1] += 1
    following = np.cumsum(following)
    shares = np.empty((len(steps_PK), 2 * NUM_PARTS), np.int32)
    for program in range(len(steps_PK)):
        for part in range(NUM_PARTS):
            shares[program, 2 * part] = following[program * NUM_PARTS + part]
            shares[program, 2 * part + 1] = steps_PK[program, part]
    work = np.empty(len(program_of_tile), np.int32)
    for tile in range(len(program_of_tile)):
        key = program_of_tile[tile] * NUM_PARTS + part_of_tile[tile]
        work[following[key]] = number_of_tile[tile]
        following[key] += 1
    return work, shares


@kernel
def shares_of(groups_G5, rounds, num_programs):  # type: ignore[no-untyped-def]
    """Work [n] (numbers of tiles) and shares [P, 2 * NUM_PARTS]: of each part, where a program's tiles begin in the
    work, and how many steps they take.

    A group is tiles that take as long: their part, how many they are, the number of the first, cost and steps of each.
    Groups are in the order of parts; the last two are those of dx and its halves, which are taken whole unless programs
    end sooner. Of dx, every program has `rounds` tiles before others are given out.
    """
    num_tiles = 0
    for group in range(len(groups_G5)):
        num_tiles += groups_G5[group, 1]
    program_of_tile, part_of_tile = np.empty(num_tiles, np.int32), np.empty(num_tiles, np.int8)
    number_of_tile = np.empty(num_tiles, np.int32)
    steps_PK = np.zeros((num_programs, NUM_PARTS), np.int64)
    dx, counts = len(groups_G5) - 2, groups_G5[:, 1].copy()
    of_dx = groups_G5[dx]
    at = 0
    for program in range(num_programs):
        part = ROWS_BEFORE if 2 * program < num_programs else ROWS_AFTER
        for number in range(rounds):
            program_of_tile[at], part_of_tile[at] = program, part
            number_of_tile[at] = of_dx[2] + number * num_programs + program
            at += 1
        steps_PK[program, part] = rounds * of_dx[4]
    ends, programs = np.full(num_programs, rounds * of_dx[3]), np.arange(num_programs)
    latest, in_order = rounds * of_dx[3], True  # of all ends; whether ends ascend
    for group in range(len(groups_G5)):
        tile = 0
        if group == dx:
            tile = rounds * num_programs
            _settle_halves(groups_G5, counts, ends, programs, tile)
        part, _, first, cost, steps = groups_G5[group]
        count = counts[group]
        while tile < count:
            if latest - ends[0] < cost and (in_order or count - tile > 3 * num_programs):
                # each program that gets a tile is the last one then: they take turns
                if not in_order:
                    order = np.argsort(ends * num_programs + programs)
                    ends, programs = ends[order], programs[order]
                turns = (count - tile) // num_programs
                some = count - tile - turns * num_programs
                for turn in range(turns + 1):
                    for place in range(num_programs if turn < turns else some):
                        program_of_tile[at], part_of_tile[at] = programs[place], part
                        number_of_tile[at] = first + tile
                        at, tile = at + 1, tile + 1
                for place in range(num_programs):
                    more = turns + 1 if place < some else turns
                    ends[place] += more * cost
                    steps_PK[programs[place], part] += more * steps
                ends, programs = np.roll(ends, -some), np.roll(programs, -some)
                in_order, latest = True, ends[-1]
            else:
                program, end = programs[0], ends[0] + cost
                program_of_tile[at], part_of_tile[at], number_of_tile[at] = program, part, first + tile
                steps_PK[program, part] += steps
                at, tile = at + 1, tile + 1
                in_order, latest = False, max(latest, end)
                _sink(ends, programs, end, program)
    work, shares = _listed(program_of_tile[:at], part_of_tile[:at], number_of_tile[:at], steps_PK)
    return work, shares


@kernel
def launches_of(rows_I, each_2, num_dx, step, sum_cost, cost_of_dx, cost_of_half, num_programs):  # type: ignore[no-untyped-def]
    """Work and shares of both launches; the first may be empty. each_2: tiles of an instance's dW2 and dW1, 0 if it is
    not learned; num_dx: tiles of dx; step: rows of a step; costs in rows, of a sum, of a tile of dx and of half of one.
    """
    order = np.argsort(-rows_I, kind="mergesort")
    together_2 = each_2 // num_programs * num_programs
    longest = max((rows_I[order[0]] + step - 1) // step, 1) * step + sum_cost
    rounds = max(num_dx // num_programs - longest // cost_of_dx - 2, 0)  # the rest fills what tiles of weights leave
    of_dx = rounds * num_programs if together_2.any() else 0
    groups_G5 = np.zeros((2 * rows_I.size + 2, 5), np.int64)
    for part in (DOWN, GATE_UP):
        for at, instance in enumerate(order):
            steps = max((rows_I[instance] + step - 1) // step, 1)
            group = groups_G5[(part - DOWN) * rows_I.size + at]
            group[0], group[1], group[2] = part, together_2[part - DOWN], instance * each_2[part - DOWN]
            group[3], group[4] = steps * step + sum_cost, steps
    groups_G5[-2] = ROWS_AFTER, of_dx, 0, cost_of_dx, 1
    first_work, first_shares = shares_of(groups_G5, rounds if of_dx else 0, num_programs)
    for part in (DOWN, GATE_UP):
        each, together = each_2[part - DOWN], together_2[part - DOWN]
        for at in range(rows_I.size):
            group = groups_G5[(part - DOWN) * rows_I.size + at]
            group[1], group[2] = each - together, group[2] + together
    if of_dx:
        rounds = 0
    in_halves = min(num_programs // 2, num_dx - of_dx - rounds * num_programs)
    groups_G5[-2] = ROWS_AFTER, num_dx - of_dx - in_halves, of_dx, cost_of_dx, 1
    groups_G5[-1] = HALVES, 2 * in_halves, 2 * (num_dx - in_halves), cost_of_half, 1
    work, shares = shares_of(groups_G5, rounds, num_programs)
    return first_work, first_shares, work, shares
