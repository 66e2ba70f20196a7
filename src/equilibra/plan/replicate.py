"""Flash copies: which experts of a node are copied to which of its ranks, for one layer and micro-batch.

Symbols: G ranks of the node, I instances (home experts and standing copies) with their loads, S spare slots per
rank, cap the load that no rank should exceed, hold and serve the prices of a copy in rows.

Ranks wait for each other's time, so a rank's load is its rows plus `hold` for every copy it holds and `serve` for every
copy that others hold of its instances.

Method. A rank above the cap exports its excess; a rank below it has room. A copy joins an exporter to a receiver and
finishes at least one of them, so few copies are needed when excesses fit rooms: take the smallest room that holds the
whole excess, else the two rooms that hold it with the least waste, else the largest room, and go on with the rest. A
few orders of exporters are tried; the fewest copies, then the smallest fan-out, win. Where slots run out, excess may
pass through another exporter (a chain); where that fails too, the smallest cap that works is searched for.

n copies raise the level of all ranks to at least mean + n * (hold + serve) / G, so the cap rises with the fewest copies
that may do. Where rooms do not fit there it rises further; if that leaves more than a 500th, copies are also chosen as
if they were free, and the better plan is kept.

Promises: at most S copies per rank; no rank above max(cap + min_tokens - 1, its load before) if the cap was reached;
the same copies on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibra.core.kernel import inlined, kernel
from equilibra.plan.level import level_nodes
from equilibra.plan.stand import choose_standing_copies

Ints = NDArray[np.int64]

# Rows of the int64 workspace, each at least max(I, G * (S + 1)) + 2 long: one array keeps the calls cheap.
ITEM, RANK, TOKENS = 0, 1, 2  # the result
_ITEM2, _RANK2, _TOKENS2 = 3, 4, 5  # the order being tried
_LOAD, _TOP = 6, 7  # load of each rank, its largest instance
_ORDER, _EXCESS0, _EXCESS = 8, 9, 10  # exporters
_ROOM0, _ROOM = 11, 12  # receivers, in falling order of room
_USED, _LEFT = 13, 14  # slots taken, what is left of each instance of the present exporter
BASE = 15  # each rank's work besides its rows, before any flash copy, in rows
_KEPT_ITEM = 16  # to 18: a result put aside
NUM_ROWS = 19
SCARCE = -1  # instead of a number of copies: slots do not suffice for the cap
_SEARCHED = 32  # ranks up to which a search takes about a millisecond
_RANK_BITS = 16
_RANKS = 1 << _RANK_BITS
_SEED = 0x2545F4914F6CDD1D
_FINE = 500  # a cap that prices raise is found to this fraction of it
_NEVER = 1 << 40  # copies where no number is enough
# Typed numbers: numba compiles a function once more for every literal that it is called with.
_NOTHING, _NO_CHAIN = np.int64(0), np.int64(0)


@inlined
def _random_below(state, n):  # type: ignore[no-untyped-def]
    """A whole number below n from a xorshift generator whose state is state[0]."""
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return np.int64(((x >> np.uint64(33)) * np.uint64(n)) >> np.uint64(31))


@inlined
def _put(w, row, n, entry):  # type: ignore[no-untyped-def]
    """Insert into the rooms, kept in falling order; an entry is the room times RANKS plus the rank."""
    k = n
    while k > 0 and w[row, k - 1] < entry:
        w[row, k] = w[row, k - 1]
        k -= 1
    w[row, k] = entry
    return n + 1


@inlined
def _copy_copies(w, n, source, to):  # type: ignore[no-untyped-def]
    """Copy n copies from the three rows that begin with `source` to those that begin with `to`."""
    for row in range(3):
        for c in range(n):
            w[to + row, c] = w[source + row, c]


@inlined
def _take(w, n, k):  # type: ignore[no-untyped-def]
    for t in range(k, n - 1):
        w[_ROOM, t] = w[_ROOM, t + 1]
    return n - 1


@inlined
def _pair(w, n, piece, fine):  # type: ignore[no-untyped-def]
    """Two rooms whose sum holds the piece with the least waste, or at most `fine` (the largest two do hold it)."""
    needed = piece * _RANKS
    a, b, high = 0, 1, n - 1
    while b < high:  # rooms after b are too small even for the largest one
        middle = (b + high + 1) >> 1
        if w[_ROOM, 0] + w[_ROOM, middle] - _RANKS >= needed:
            b = middle
        else:
            high = middle - 1
    least = w[_ROOM, 0] + w[_ROOM, b]
    enough = needed + _RANKS * (fine + 1)
    best_a, best_b = 0, b
    while a < b and least > enough:
        total = w[_ROOM, a] + w[_ROOM, b]
        if total - _RANKS >= needed:  # ranks may add up to a whole room: be safe by one token
            if total < least:
                least, best_a, best_b = total, a, b
            a += 1
        else:
            b -= 1
    return best_a, best_b


@kernel
def _cover(  # type: ignore[no-untyped-def]
    load, first, w, num_exporters, num_rooms, slots, hold, serve, min_tokens, most, chain, state
):
    """Serve the exporters in their present order; returns (copies, largest fan-out), or -1 copies if it fails.

    Rooms are what a copy there may take, without hold. chain: how often, in percent, an exporter's excess goes through
    a later exporter instead of to a room.
    """
    for r in range(first.size - 1):
        w[_USED, r] = 0
        w[_EXCESS, r] = w[_EXCESS0, r]
    for k in range(num_rooms):
        w[_ROOM, k] = w[_ROOM0, k]
    n, widest = 0, 0
    fine = (w[_ROOM, 0] >> _RANK_BITS) >> 9
    least = min_tokens + serve  # fewer rows would not bring the exporter down by min_tokens
    for k in range(num_exporters):
        exporter = w[_ORDER, k]
        x = w[_EXCESS, exporter]
        begin = n
        best = w[_TOP, exporter]
        left = load[best]
        whole = left >= x + serve * (first.size - 1)  # one instance is enough: the usual case
        if not whole:
            for i in range(first[exporter], first[exporter + 1]):
                w[_LEFT, i] = load[i]
        while x >= min_tokens:
            if not whole:
                best = first[exporter]
                for i in range(best + 1, first[exporter + 1]):
                    if w[_LEFT, i] > w[_LEFT, best]:
                        best = i
                left = w[_LEFT, best]
            piece = min(x + serve, left)
            if piece < least or n >= most:
                return -1, 0
            w[_ITEM2, n] = best
            via = np.int64(-1)
            if chain > 0 and k + 1 < num_exporters and _random_below(state, 100) < chain:
                via = w[_ORDER, k + 1 + _random_below(state, num_exporters - k - 1)]
                if w[_USED, via] >= slots:
                    via = np.int64(-1)
            if via >= 0:
                w[_RANK2, n] = via
                w[_TOKENS2, n] = piece
                w[_USED, via] += 1
                w[_EXCESS, via] += piece + hold
                served = piece
            else:
                if num_rooms == 0:
                    return -1, 0
                rest = np.int64(0)
                served = np.int64(0)
                at = 0
                largest = w[_ROOM, 0] >> _RANK_BITS
                if largest >= piece:
                    needed = piece * _RANKS
                    size = num_rooms
                    while size > 1:  # without a branch on the data: the last room that is large enough
                        half = size >> 1
                        at += half * (w[_ROOM, at + half] >= needed)
                        size -= half
                    rest = (w[_ROOM, at] >> _RANK_BITS) - piece
                elif (
                    piece + serve <= left  # two copies are served: serve comes twice
                    and piece == x + serve  # else another instance of it must find a room too: fill this one first
                    and num_rooms > 1
                    and largest + (w[_ROOM, 1] >> _RANK_BITS) > piece + serve
                    and n + 1 < most
                    and (chain == 0 or _random_below(state, 2) == 0)  # else the rest may go through an exporter
                ):
                    at, second = _pair(w, num_rooms, piece + serve, fine)
                    room = w[_ROOM, at] >> _RANK_BITS
                    if piece + serve - room >= least:
                        receiver = w[_ROOM, at] & (_RANKS - 1)
                        w[_RANK2, n] = receiver
                        w[_TOKENS2, n] = room
                        w[_USED, receiver] += 1
                        served = room
                        x += serve
                        piece += serve
                        n += 1
                        w[_ITEM2, n] = best
                        num_rooms = _take(w, num_rooms, at)
                        at = second - 1
                        rest = (w[_ROOM, at] >> _RANK_BITS) - (piece - served)
                receiver = w[_ROOM, at] & (_RANKS - 1)
                w[_RANK2, n] = receiver
                w[_TOKENS2, n] = (w[_ROOM, at] >> _RANK_BITS) - rest
                served += w[_TOKENS2, n]
                w[_USED, receiver] += 1
                num_rooms = _take(w, num_rooms, at)
                rest -= hold  # of the next copy there
                if rest >= least and w[_USED, receiver] < slots:
                    num_rooms = _put(w, _ROOM, num_rooms, rest * _RANKS + receiver)
            n += 1
            x += serve - served
            left -= served
            if not whole:
                w[_LEFT, best] = left
        widest = max(widest, n - begin)
    return n, widest


@kernel
def _sides(w, num_ranks, cap, hold, serve, min_tokens):  # type: ignore[no-untyped-def]
    """Exporters by falling excess, and rooms; returns how many there are and how few copies may do at this cap."""
    num_exporters, num_rooms, demand = 0, 0, np.int64(0)
    for r in range(num_ranks):
        gap = w[_LOAD, r] - cap
        if gap >= min_tokens:
            w[_EXCESS0, r] = gap
            demand += gap
            k = num_exporters
            while k > 0 and w[_EXCESS0, w[_ORDER, k - 1]] < gap:
                w[_ORDER, k] = w[_ORDER, k - 1]
                k -= 1
            w[_ORDER, k] = r
            num_exporters += 1
        elif -gap - hold >= min_tokens + serve:
            num_rooms = _put(w, _ROOM0, num_rooms, (-gap - hold) * _RANKS + r)
    # No plan has fewer copies than exporters, nor than the largest rooms that together hold all excess.
    fewest = 0
    while fewest < num_rooms and demand > 0:
        demand -= (w[_ROOM0, fewest] >> _RANK_BITS) - serve
        fewest += 1
    fewest = max(fewest, num_exporters)
    if hold + serve > 0 and demand > num_exporters * (min_tokens - 1):
        fewest = _NEVER  # not even all rooms hold it, though exporters may keep a rest that is too small for a copy
    return num_exporters, num_rooms, fewest


@kernel
def _attempt(load, first, w, slots, cap, hold, serve, min_tokens, tries, most, chain, state):  # type: ignore[no-untyped-def]
    """Best of `tries` orders at this cap with at most `most` copies; returns their number or -1."""
    num_exporters, num_rooms, fewest = _sides(w, first.size - 1, cap, hold, serve, min_tokens)
    if fewest > most:
        return -1
    best, best_fan_out = -1, 0
    for attempt in range(tries):
        if attempt > 0:
            for k in range(num_exporters - 1, 0, -1):
                other = _random_below(state, k + 1)
                w[_ORDER, k], w[_ORDER, other] = w[_ORDER, other], w[_ORDER, k]
        n, widest = _cover(load, first, w, num_exporters, num_rooms, slots, hold, serve, min_tokens, most, chain, state)
        if n >= 0 and (best < 0 or n < best or widest < best_fan_out):
            best, most, best_fan_out = n, n, widest
            _copy_copies(w, n, _ITEM2, ITEM)
            if n == fewest or chain > 0:
                break
    return best


@kernel
def _risen_cap(w, num_ranks, slots, cap, level, hold, serve, min_tokens):  # type: ignore[no-untyped-def]
    """The cap as raised by the prices of the fewest copies that may be enough at it, found by bisection."""
    low, high, price = np.int64(0), np.int64(num_ranks * slots), hold + serve
    while low < high:
        n = (low + high) >> 1
        risen = max(cap, level + (n * price + num_ranks - 1) // num_ranks)
        _, _, fewest = _sides(w, num_ranks, risen, hold, serve, min_tokens)
        if fewest <= n:
            high = n
        else:
            low = n + 1
    return max(cap, level + (high * price + num_ranks - 1) // num_ranks)


@inlined
def _fine(cap, price, num_ranks):  # type: ignore[no-untyped-def]
    """How close to the smallest cap that works the search comes where copies cost something."""
    return max(price // num_ranks + 1, cap // _FINE)


@kernel
def _slowest(first, w, n, hold, serve):  # type: ignore[no-untyped-def]
    """The fullest rank with the n copies of the result: rows and prices."""
    num_ranks = first.size - 1
    for r in range(num_ranks):
        w[_EXCESS, r] = w[_LOAD, r]
    for c in range(n):
        origin = 0
        while first[origin + 1] <= w[ITEM, c]:
            origin += 1
        w[_EXCESS, origin] += serve - w[TOKENS, c]
        w[_EXCESS, w[RANK, c]] += hold + w[TOKENS, c]
    slowest = np.int64(0)
    for r in range(num_ranks):
        slowest = max(slowest, w[_EXCESS, r])
    return slowest


@kernel
def _attempt_or_rise(load, first, w, slots, cap, hold, serve, min_tokens, tries, state):  # type: ignore[no-untyped-def]
    """Copies at the cap, or at a small one above it that works, or -1; it rises by one copy's price, two, four, ..."""
    num_ranks, price = first.size - 1, hold + serve
    most_copies = num_ranks * slots
    found = _attempt(load, first, w, slots, cap, hold, serve, min_tokens, tries, most_copies, _NO_CHAIN, state)
    if found >= 0:
        return found
    best, low, high, most = -1, cap, cap, cap + ((price + 1) >> 1)
    fine = _fine(cap, price, num_ranks)
    probe = min(cap + price // num_ranks + 1, most)
    while True:
        found = _attempt(load, first, w, slots, probe, hold, serve, min_tokens, tries, most_copies, _NO_CHAIN, state)
        if found >= 0:
            best, high = found, probe
        else:
            low = probe
        if (best < 0 and probe >= most) or (best >= 0 and high - low <= fine):
            return best
        probe = (low + high) >> 1 if best >= 0 else min(cap + 2 * (probe - cap), most)


@kernel
def _begin(load, first, w):  # type: ignore[no-untyped-def]
    """Load and largest instance of every rank; returns (mean load, highest load)."""
    num_ranks = first.size - 1
    total, highest = np.int64(0), np.int64(0)
    for r in range(num_ranks):
        rank_load = w[BASE, r]
        top = first[r]
        for i in range(first[r], first[r + 1]):
            rank_load += load[i]
            if load[i] > load[top]:
                top = i
        w[_LOAD, r] = rank_load
        w[_TOP, r] = top
        total += rank_load
        highest = max(highest, rank_load)
    return (total + num_ranks - 1) // num_ranks, highest


@inlined
def _new_state():  # type: ignore[no-untyped-def]
    """The random generator's state: the same for every node, layer and micro-batch."""
    state = np.empty(1, np.uint64)
    state[0] = np.uint64(_SEED)
    return state


@kernel
def level_node(load, first, slots, cap, slack, hold, serve, min_tokens, tries, w):  # type: ignore[no-untyped-def]
    """Copies that bring every rank of one node to the cap; returns their number, or SCARCE if slots do not suffice.

    load [I] of the instances in the order of their ranks: rank r has instances first[r] to first[r + 1] - 1.
    hold, serve: what a copy costs the rank that holds it and the one it comes from, in rows. slack: how far above the
    level that copies of this price leave the cap may be. min_tokens: rows by which a copy must lower its exporter.
    Row BASE of the workspace w is read. The copies are in its rows ITEM, RANK and TOKENS.
    """
    num_ranks = first.size - 1
    mean, highest = _begin(load, first, w)
    cap = max(cap, mean)
    min_tokens = max(min_tokens, 1)
    if highest < cap + min_tokens or slots == 0 or num_ranks == 1:
        return np.int64(0)
    state = _new_state()
    most = num_ranks * slots
    if hold + serve == 0:
        return _attempt(load, first, w, slots, cap, hold, serve, min_tokens, tries, most, _NO_CHAIN, state)
    risen = _risen_cap(w, num_ranks, slots, cap, mean + slack, hold, serve, min_tokens)
    n = _attempt_or_rise(load, first, w, slots, risen, hold, serve, min_tokens, tries, state)
    if n < 0:
        return n
    reached = _slowest(first, w, n, hold, serve)
    if reached < risen + min_tokens + _fine(risen, hold + serve, num_ranks):
        return n
    _copy_copies(w, n, ITEM, _KEPT_ITEM)
    free = _attempt(load, first, w, slots, cap, _NOTHING, _NOTHING, min_tokens, tries, most, _NO_CHAIN, state)
    if free < 0 or _slowest(first, w, free, hold, serve) < reached:
        return free
    _copy_copies(w, n, _KEPT_ITEM, ITEM)
    return n


# --- where slots do not suffice: Python over the kernels, since this takes a millisecond and would compile slowly ---


def level_scarce_node(
    load: Ints, first: Ints, slots: int, cap: int, slack: int, hold: int, serve: int, min_tokens: int, tries: int,
    w: Ints,
) -> int:  # fmt: skip
    """`level_node` where slots do not suffice: the slowest rank comes down as far as a plan is found."""
    num_ranks, min_tokens = first.size - 1, max(min_tokens, 1)
    mean, highest = _begin(load, first, w)
    cap = max(cap, mean)
    if highest < cap + min_tokens or slots == 0 or num_ranks == 1:
        return 0
    node = _ScarceNode(
        load=load, first=first, slots=slots, highest=highest, min_tokens=min_tokens, tries=tries, w=w,
        state=np.array([_SEED], np.uint64),
    )  # fmt: skip
    if hold + serve == 0:
        return node.free(cap)
    risen = _risen_cap(w, num_ranks, slots, cap, mean + slack, hold, serve, min_tokens)
    n: int = _attempt_or_rise(load, first, w, slots, risen, hold, serve, min_tokens, tries, node.state)
    if n < 0:
        n = node.best_effort(risen, hold, serve)
    reached = _slowest(first, w, n, hold, serve)
    if reached >= risen + min_tokens + max((hold + serve) // num_ranks + 1, risen // _FINE):
        kept = w[: TOKENS + 1, :n].copy()
        free = node.free(cap)
        if _slowest(first, w, free, hold, serve) < reached:
            return free
        w[: TOKENS + 1, :n] = kept
    return n


@dataclass(frozen=True, kw_only=True, eq=False)
class _ScarceNode:
    """One node; its methods leave copies in rows ITEM, RANK and TOKENS of w and return their number."""

    load: Ints
    first: Ints
    slots: int
    highest: int
    """load of the fullest rank without copies"""
    min_tokens: int
    tries: int
    w: Ints
    state: NDArray[np.uint64]

    def free(self, cap: int) -> int:
        n = self._attempt(cap, 0, 0, self.tries, 0)
        return n if n >= 0 else self.best_effort(cap, 0, 0)

    def best_effort(self, cap: int, hold: int, serve: int) -> int:
        """Chains at the cap, then the smallest cap that works, to a two-thousandth of the load."""
        best, low, high, price = 0, cap, self.highest, hold + serve
        probe = min(cap + (price + 1) // 2, high)
        while True:
            tried = (self._attempt(probe, hold, serve, 24, chain) for chain in (0, 20, 50, 85))
            found = next((n for n in tried if n >= 0), -1)
            if found >= 0:
                best, high = found, probe
            else:
                low = probe
            if high - low <= 1 or (high - low) * (_FINE if price > 0 else 2000) <= cap:
                break
            probe = (low + high) // 2
        if high > cap + price and self.first.size - 1 <= _SEARCHED:
            best = self._search(cap, high, hold, serve, best)
        return best

    def _attempt(self, cap: int, hold: int, serve: int, tries: int, chain: int) -> int:
        most = (self.first.size - 1) * self.slots
        n: int = _attempt(
            self.load, self.first, self.w, self.slots, cap, hold, serve, self.min_tokens, tries, most, chain, self.state
        )
        return n

    def _search(self, cap: int, reached: int, hold: int, serve: int, best: int) -> int:
        """The search that chooses standing copies, over ranks instead of nodes; kept if it gets below `reached`."""
        num_ranks, price, load = self.first.size - 1, hold + serve, self.load
        rank_of_item = np.repeat(np.arange(num_ranks), np.diff(self.first))
        rank_load = self.w[_LOAD, :num_ranks].copy()
        item, rank, share = (np.zeros(num_ranks * self.slots + 1, np.int64) for _ in range(3))
        enough = cap if price == 0 else int(rank_load.sum()) // num_ranks
        n, _ = choose_standing_copies(
            load.reshape(-1, 1), rank_of_item, num_ranks, self.slots, 1 + price // num_ranks, enough, 4, item, rank
        )
        np.add.at(rank_load, rank_of_item[item[:n]], serve)
        np.add.at(rank_load, rank[:n], hold)
        level_nodes(rank_load, share, load, item, rank, rank_of_item, n)
        for c in np.flatnonzero(share[:n] < self.min_tokens + serve):  # not worth a copy: back home
            rank_load[rank_of_item[item[c]]] += share[c] - serve
            rank_load[rank[c]] -= share[c] + hold
            share[c] = 0
        if rank_load.max() >= reached:
            return best
        used = np.flatnonzero(share[:n])
        for row, values in ((ITEM, item), (RANK, rank), (TOKENS, share)):
            self.w[row, : used.size] = values[used]
        return int(used.size)
