"""Which program of a launch computes which tiles, so that all programs end together.

Symbols: P programs, n tiles, G groups.

Gradients of the weights and of the rows are three products that do not need each other, of tiles that take as long as
their sums are: the rows of an instance for weights, 2F for rows. One launch computes all three, in four parts:

    ROWS_BEFORE   some tiles of dx, by the first half of the programs
    DOWN          dW2
    GATE_UP       dW1
    ROWS_AFTER    as many tiles of dx, by the second half; then those left, by all

So half of the programs multiply while the other half waits for memory, which adding to float32 sums mostly is. Tiles
of weights go to programs one by one in the order of their computation, each to the program that comes to its end first:
tiles beside each other are computed at the same time, and caches serve what they share. The last tiles of dx, which are
short, fill what the others left: each product by itself would end with most programs waiting for a few.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from equilibra.core.kernel import inlined, kernel

__all__ = ["Part", "shares_of"]


class Part(IntEnum):
    """Of a launch, in the order of computation."""

    ROWS_BEFORE = 0
    DOWN = 1
    GATE_UP = 2
    ROWS_AFTER = 3


NUM_PARTS = len(Part)
ROWS_BEFORE, ROWS_AFTER = int(Part.ROWS_BEFORE), int(Part.ROWS_AFTER)


@inlined
def _sink(ends: NDArray[np.int64], programs: NDArray[np.int64], end: int, program: int) -> None:
    """Replace the top of a heap of programs by their end and number."""
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


@kernel
def shares_of(
    groups_G5: NDArray[np.int64], rounds: int, num_programs: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Work [n] (numbers of tiles) and shares [P, 2 * NUM_PARTS]: of each part, where a program's tiles begin in the
    work, and how many steps they take.

    A group is tiles that take as long: their part, how many they are, the number of the first, cost and steps of each.
    Groups are in the order of parts; the last is that of dx. Of that, every program has `rounds` tiles before others
    are given out.
    """
    num_tiles = 0
    for group in range(len(groups_G5)):
        num_tiles += groups_G5[group, 1]
    program_of_tile, part_of_tile = np.empty(num_tiles, np.int32), np.empty(num_tiles, np.int8)
    number_of_tile = np.empty(num_tiles, np.int32)
    counts, steps = np.zeros((num_programs, NUM_PARTS), np.int64), np.zeros((num_programs, NUM_PARTS), np.int64)
    last = groups_G5[-1]
    at = 0
    for program in range(num_programs):
        part = ROWS_BEFORE if 2 * program < num_programs else ROWS_AFTER
        for number in range(rounds):
            program_of_tile[at], part_of_tile[at] = program, part
            number_of_tile[at] = last[2] + number * num_programs + program
            at += 1
        counts[program, part], steps[program, part] = rounds, rounds * last[4]
    ends, programs = np.full(num_programs, rounds * last[3]), np.arange(num_programs)
    for group in range(len(groups_G5)):
        part, count, first, cost, steps_of_tile = groups_G5[group]
        begin = rounds * num_programs if group == len(groups_G5) - 1 else 0
        if count - begin >= num_programs and ends.min() == ends.max():  # whole rounds, without the heap
            whole = (count - begin) // num_programs
            for tile in range(begin, begin + whole * num_programs):
                program_of_tile[at], part_of_tile[at] = (tile - begin) % num_programs, part
                number_of_tile[at] = first + tile
                at += 1
            begin += whole * num_programs
            counts[:, part] += whole
            steps[:, part] += whole * steps_of_tile
            ends += whole * cost
            programs[:] = np.arange(num_programs)
        for tile in range(begin, count):
            program, end = programs[0], ends[0] + cost
            program_of_tile[at], part_of_tile[at], number_of_tile[at] = program, part, first + tile
            counts[program, part] += 1
            steps[program, part] += steps_of_tile
            at += 1
            _sink(ends, programs, end, program)
    shares = np.empty((num_programs, 2 * NUM_PARTS), np.int32)
    following = np.empty((num_programs, NUM_PARTS), np.int64)
    begin = 0
    for program in range(num_programs):
        for part in range(NUM_PARTS):
            shares[program, 2 * part], shares[program, 2 * part + 1] = begin, steps[program, part]
            following[program, part] = begin
            begin += counts[program, part]
    work = np.empty(num_tiles, np.int32)
    for tile in range(num_tiles):
        program, part = program_of_tile[tile], part_of_tile[tile]
        work[following[program, part]] = number_of_tile[tile]
        following[program, part] += 1
    return work, shares
