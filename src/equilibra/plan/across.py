"""Across: split tokens over instances so that traffic between nodes is even over the ranks.

Symbols: R source ranks, E experts, G ranks per node, U copies of the layer: standing ones first, then flash copies.

Every rank waits for the one that receives most over the network between nodes. Quotas fix how many rows an instance
computes, not whose.

1. Share. A node keeps as many of its own tokens as its instances take; the rest comes from other nodes. Its instances
   share these rows so that the rank that has received least gets most (water filling up to each quota).
2. Exchange, where traffic has a price. The rank that receives most hands remote rows to the rank of its node that
   receives least and gets local rows back, so compute stays even; a flash copy is made if the taker has no instance
   and a free slot. Copies have prices as in `replicate`, but are free where traffic is so expensive that slack is
   allowed for it. Copies without rows are dropped.
3. Serve. Tokens go to an instance on their own rank first, then inside the node; where not all fit, the ranks that send
   most keep theirs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from equilibra.core.kernel import inlined, kernel

# Rows of the lists of instances by rank: where its homes begin, these homes, its first and last copy; the next copy.
_FIRST, _HOMES, _COPY, _LAST, _NEXT = 0, 1, 2, 3, 4


@kernel
def fill_levels(level, cap, count, total, out):  # type: ignore[no-untyped-def]
    """Whole numbers out[:count] from 0 to cap with sum `total` that keep the highest level + out lowest."""
    low, high, room = level[0], level[0], np.int64(0)
    for i in range(count):
        low = min(low, level[i])
        high = max(high, level[i] + cap[i])
        room += cap[i]
    if total == 0 or total == room:  # most often: no choice
        for i in range(count):
            out[i] = cap[i] if total == room else 0
        return
    while low < high:  # the lowest water line that holds the total
        middle = (low + high) >> 1
        held = np.int64(0)
        for i in range(count):
            held += min(max(middle - level[i], 0), cap[i])
        if held >= total:
            high = middle
        else:
            low = middle + 1
    left = total
    for i in range(count):
        out[i] = min(max(high - 1 - level[i], 0), cap[i])
        left -= out[i]
    for i in range(count):
        if left > 0 and out[i] < cap[i] and level[i] + out[i] < high:
            out[i] += 1
            left -= 1


@kernel
def _lists(expert, count, head, after):  # type: ignore[no-untyped-def]
    """Lists of copies by expert: head [E] is the first, after [U] the next, -1 none."""
    for e in range(head.size):
        head[e] = -1
    for c in range(count - 1, -1, -1):
        after[c] = head[expert[c]]
        head[expert[c]] = c


@kernel
def _nodes(e, home, head, after, rank, group, seen, nodes):  # type: ignore[no-untyped-def]
    """Nodes with an instance of an expert into nodes[:n]; returns n. seen [N]: never e before."""
    n = 0
    c = head[e]
    while True:
        node = (rank[c] if c >= 0 else home[e]) // group
        if seen[node] != e:
            seen[node] = e
            nodes[n] = node
            n += 1
        if c < 0:
            return n
        c = after[c]


@kernel
def _instances(e, home, at_home, head, after, rank, quota, group, node, here):  # type: ignore[no-untyped-def]
    """Instances of an expert on a node into here[:n]; the home is -1. Returns (n, their quotas together)."""
    n = 0
    room = np.int64(0)
    first, end = node * group, (node + 1) * group
    c = head[e]
    while c >= 0:
        if first <= rank[c] < end:
            here[n] = c
            room += quota[c]
            n += 1
        c = after[c]
    if first <= home[e] < end:
        here[n] = -1
        room += at_home[e]
        n += 1
    return n, room


@kernel
def _share(tokens_ER, load, home, at_home, group, head, after, rank, quota, remote, remote_home, got):  # type: ignore[no-untyped-def]
    """Rows from other nodes that each instance serves, and what each rank receives."""
    num_experts, num_ranks = tokens_ER.shape
    with_copies = np.empty(num_experts, np.int64)
    n_with = 0
    for e in range(num_experts):
        if head[e] >= 0:
            with_copies[n_with] = e
            n_with += 1
            continue
        first = home[e] // group * group
        own = np.int64(0)
        for r in range(first, first + group):
            own += tokens_ER[e, r]
        remote_home[e] = load[e] - own
        got[home[e]] += remote_home[e]
    level, cap, filled, here, nodes = np.empty((5, rank.size + 1), np.int64)
    seen = np.full(num_ranks // group, -1, np.int64)
    for i in range(1, n_with):  # by falling load
        e, k = with_copies[i], i
        while k > 0 and load[with_copies[k - 1]] < load[e]:
            with_copies[k] = with_copies[k - 1]
            k -= 1
        with_copies[k] = e
    for at in range(n_with):
        e = with_copies[at]
        for i_node in range(_nodes(e, home, head, after, rank, group, seen, nodes)):
            node = nodes[i_node]
            n, room = _instances(e, home, at_home, head, after, rank, quota, group, node, here)
            own = np.int64(0)
            for r in range(node * group, (node + 1) * group):
                own += tokens_ER[e, r]
            for i in range(n):
                c = here[i]
                level[i] = got[rank[c] if c >= 0 else home[e]]
                cap[i] = quota[c] if c >= 0 else at_home[e]
            fill_levels(level, cap, n, room - min(own, room), filled)
            for i in range(n):
                c = here[i]
                got[rank[c] if c >= 0 else home[e]] += filled[i]
                if c >= 0:
                    remote[c] = filled[i]
                else:
                    remote_home[e] = filled[i]


@kernel
def _by_rank(home, num_ranks, count, rank):  # type: ignore[no-untyped-def]
    """Instances by rank, copies in the order in which they were made: see the rows of this array."""
    on = np.empty((5, max(home.size, num_ranks + 1, rank.size)), np.int64)
    on[_FIRST, : num_ranks + 1] = 0
    on[_COPY, :num_ranks] = -1
    for e in range(home.size):
        on[_FIRST, home[e] + 1] += 1
    for r in range(num_ranks):
        on[_FIRST, r + 1] += on[_FIRST, r]
        on[_LAST, r] = on[_FIRST, r]  # for now: where the next home goes
    for e in range(home.size):
        on[_HOMES, on[_LAST, home[e]]] = e
        on[_LAST, home[e]] += 1
    for c in range(count):
        _append(c, rank[c], on)
    return on


@kernel
def _append(c, r, on):  # type: ignore[no-untyped-def]
    """Copy c is the last one of rank r."""
    if on[_COPY, r] < 0:
        on[_COPY, r] = c
    else:
        on[_NEXT, on[_LAST, r]] = c
    on[_LAST, r] = c
    on[_NEXT, c] = -1


@kernel
def _instance_on(e, r, home, expert, on):  # type: ignore[no-untyped-def]
    """The instance of an expert on a rank: a copy, -1 for the home, -2 for none."""
    if home[e] == r:
        return np.int64(-1)
    c = on[_COPY, r]
    while c >= 0:
        if expert[c] == e:
            return c
        c = on[_NEXT, c]
    return np.int64(-2)


@kernel
def _best(source, target, local, can_copy, home, at_home, expert, quota, remote, remote_home, on):  # type: ignore[no-untyped-def]
    """(expert, from, to, rows): the most rows that `source` can hand to `target`; to: -2 where a copy must be made."""
    best_e, best_from, best_to, most = np.int64(-1), np.int64(-2), np.int64(-2), np.int64(0)
    for i in range(on[_FIRST, source], on[_FIRST, source + 1]):
        e = on[_HOMES, i]
        rows = at_home[e] - remote_home[e] if local else remote_home[e]
        if rows > most:
            to = _instance_on(e, target, home, expert, on)
            if to > -2 or can_copy:
                best_e, best_from, best_to, most = e, np.int64(-1), to, rows
    c = on[_COPY, source]
    while c >= 0:
        rows = quota[c] - remote[c] if local else remote[c]
        if rows > most:
            to = _instance_on(expert[c], target, home, expert, on)
            if to > -2 or can_copy:
                best_e, best_from, best_to, most = expert[c], c, to, rows
        c = on[_NEXT, c]
    return best_e, best_from, best_to, most


@kernel
def _origin(e, r, home, group, num_standing, expert, rank):  # type: ignore[no-untyped-def]
    """The rank of r's node from which an expert is copied: its home, or a standing copy."""
    if home[e] // group == r // group:
        return home[e]
    for c in range(num_standing):
        if expert[c] == e and rank[c] // group == r // group:
            return rank[c]
    return home[e]


@kernel
def _hand_over(e, c, rows, others, at_home, quota, remote, remote_home):  # type: ignore[no-untyped-def]
    """Give instance c of an expert (-1: its home) more rows, some of them from other nodes."""
    if c < 0:
        at_home[e] += rows
        remote_home[e] += others
    else:
        quota[c] += rows
        remote[c] += others


@kernel
def _exchange(  # type: ignore[no-untyped-def]
    node, home, at_home, group, slots, tolerance, hold, serve, min_tokens, num_standing, count,
    expert, rank, quota, origin, remote, remote_home, got, used, rows_of_rank, most_rows, goal, on,
):  # fmt: skip
    """Copies that bring what each rank of a node receives down to the goal; returns the number of all copies."""
    first = node * group
    cap = goal + np.int64(tolerance * goal)
    tried = np.zeros(group, np.bool_)
    none, own, others = np.int64(0), tried.size > 0, tried.size == 0  # typed: numba compiles once more for literals
    for _ in range(4 * group * (slots + 1)):
        a = first
        b: Any = np.int64(-1)
        for r in range(first, first + group):
            if got[r] > got[a]:
                a = r
        for r in range(first, first + group):
            if r != a and not tried[r - first] and got[r] < goal and (b < 0 or got[r] < got[b]):
                b = r
        if got[a] <= cap or b < 0 or count + 2 > expert.size:
            break
        e, e_from, e_to, rows = _best(
            a, b, others, used[b] < slots, home, at_home, expert, quota, remote, remote_home, on
        )
        f, f_from, f_to, back = _best(b, a, own, used[a] < slots, home, at_home, expert, quota, remote, remote_home, on)
        room, room_a = max(most_rows - rows_of_rank[b], 0), max(most_rows - rows_of_rank[a], 0)
        a_pays, b_pays, b_back, a_back = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
        fits = True
        if hold + serve > 0:  # for new copies, first those of e, then those of f
            if e_to == -2:
                a_pays, b_pays, fits = _prices(
                    e, a, b, hold, serve, home, group, num_standing, expert, rank, rows_of_rank, most_rows
                )
            if f_to == -2:
                other = serve if e_to == -2 and a_pays == 0 else 0  # the same rank may be the origin of both
                b_back, a_back, back_fits = _prices(
                    f, b, a, hold, serve, home, group, num_standing, expert, rank, rows_of_rank, most_rows - other
                )
                if not back_fits or max(a_pays + a_back - room_a, 0) + b_pays + b_back > room:
                    back, a_back, b_back = np.int64(0), np.int64(0), np.int64(0)
        if not fits or max(a_pays - room_a, 0) + b_pays > room:
            tried[b - first] = True
            continue
        moved = min(rows, back + room - b_pays - b_back, got[a] - goal, goal - got[b])
        short = max(a_pays + a_back - room_a, 0)  # a must hand over so much more than it gets back
        if f_to == -2 and min(back, moved - short) < max(min_tokens, 1):
            back, a_back, b_back = np.int64(0), np.int64(0), np.int64(0)  # too few for a copy: nothing comes back
            moved = min(moved, room - b_pays)
            short = max(a_pays - room_a, 0)
        least = max(min_tokens if e_to == -2 else 1, 1) + short
        if moved < least:
            tried[b - first] = True  # nothing to gain with this one
            continue
        for r in range(group):
            tried[r] = False
        if e_to == -2:
            e_to = _new_copy(e, b, home, group, num_standing, count, expert, rank, quota, origin, remote, used, on)
            rows_of_rank[b] += hold
            rows_of_rank[origin[count]] += serve
            count += 1
        _hand_over(e, e_from, -moved, -moved, at_home, quota, remote, remote_home)
        _hand_over(e, e_to, moved, moved, at_home, quota, remote, remote_home)
        got[a] -= moved
        got[b] += moved
        back = min(back, moved - short)
        if back > 0:
            if f_to == -2:
                f_to = _new_copy(f, a, home, group, num_standing, count, expert, rank, quota, origin, remote, used, on)
                rows_of_rank[a] += hold
                rows_of_rank[origin[count]] += serve
                count += 1
            _hand_over(f, f_from, -back, none, at_home, quota, remote, remote_home)
            _hand_over(f, f_to, back, none, at_home, quota, remote, remote_home)
        rows_of_rank[a] += back - moved
        rows_of_rank[b] += moved - back
    return count


@kernel
def _prices(e, giver, taker, hold, serve, home, group, num_standing, expert, rank, rows_of_rank, most_rows):  # type: ignore[no-untyped-def]
    """What a new copy costs the rank that gives rows and the one that holds it, and whether its origin can bear it."""
    origin = _origin(e, taker, home, group, num_standing, expert, rank)
    if origin == giver:
        return serve, hold, True
    return np.int64(0), hold, rows_of_rank[origin] + serve <= most_rows


@kernel
def _new_copy(e, r, home, group, num_standing, count, expert, rank, quota, origin, remote, used, on):  # type: ignore[no-untyped-def]
    """A flash copy of an expert on a rank, without rows yet."""
    expert[count] = e
    rank[count] = r
    quota[count] = 0
    remote[count] = 0
    origin[count] = _origin(e, r, home, group, num_standing, expert, rank)
    used[r] += 1
    _append(count, r, on)
    return np.int64(count)


@kernel
def _without_empty(num_standing, count, expert, rank, quota, origin, remote):  # type: ignore[no-untyped-def]
    """Leave out flash copies that handed over all their rows; returns the number of all copies."""
    kept = num_standing
    for c in range(num_standing, count):
        if quota[c] > 0:
            expert[kept], rank[kept], origin[kept] = expert[c], rank[c], origin[c]
            quota[kept], remote[kept] = quota[c], remote[c]
            kept += 1
    return kept


@kernel
def serve_across(  # type: ignore[no-untyped-def]
    tokens_ER, load, home, group, slots, tolerance, hold, serve, min_tokens, row_slack, num_standing, count,
    expert, rank, quota, origin, standing_CR, out,
):  # fmt: skip
    """Write whom every copy serves; returns the number of all copies, which grows where they are exchanged.

    expert, rank, quota, origin: the copies, with room for more. standing_CR and out (flash copies): zero before.
    hold, serve: what a copy costs in rows, see `replicate`. row_slack: by how much of the mean the exchange may raise
    the fullest rank; below 0: no exchange.
    """
    num_experts, num_ranks = tokens_ER.shape
    head, at_home, remote_home = np.zeros((3, num_experts), np.int64)
    after, remote = np.zeros((2, expert.size), np.int64)
    sent, got, used, rows_of_rank = np.zeros((4, num_ranks), np.int64)
    for e in range(num_experts):
        at_home[e] = load[e]
        rows_of_rank[home[e]] += load[e]
    for c in range(count):
        at_home[expert[c]] -= quota[c]
        rows_of_rank[home[expert[c]]] -= quota[c]
        rows_of_rank[rank[c]] += quota[c] + (hold if quota[c] > 0 else 0)
        if c >= num_standing:
            used[rank[c]] += 1
            rows_of_rank[origin[c]] += serve
    fullest, all_rows = np.int64(0), np.int64(0)
    for r in range(num_ranks):
        fullest = max(fullest, rows_of_rank[r])
        all_rows += rows_of_rank[r]
    slack = np.int64(max(row_slack, 0.0) * (all_rows / num_ranks))
    _lists(expert, count, head, after)
    _share(tokens_ER, load, home, at_home, group, head, after, rank[:count], quota, remote, remote_home, got)
    if row_slack >= 0:
        on = _by_rank(home, num_ranks, count, rank)
        goal = np.int64(1)  # everybody waits for the node that receives most: its mean is good enough for all
        for first in range(0, num_ranks, group):
            received = np.int64(0)
            for r in range(first, first + group):
                received += got[r]
            goal = max(goal, received // group + 1)
        if row_slack > 0:  # traffic is expensive: copies that even it out pay for themselves
            hold, serve = np.int64(0), np.int64(0)
        for node_and_slack in range(2 * (num_ranks // group)):  # first without slack, then with it
            node, most_rows = node_and_slack // 2, fullest + max(hold + serve, node_and_slack % 2 * slack)
            count = _exchange(
                node, home, at_home, group, slots, tolerance, hold, serve, min_tokens, num_standing, count,
                expert, rank, quota, origin, remote, remote_home, got, used, rows_of_rank, most_rows, goal, on,
            )  # fmt: skip
        count = _without_empty(num_standing, count, expert, rank, quota, origin, remote)
        _lists(expert, count, head, after)
    for e in range(num_experts):
        for r in range(num_ranks):
            sent[r] += tokens_ER[e, r]  # of experts with copies: until it is kept
        if head[e] < 0:
            first = home[e] // group * group
            for r in range(first, first + group):
                sent[r] -= tokens_ER[e, r]
    seen = np.full(num_ranks // group, -1, np.int64)
    work = np.empty((7, max(num_ranks, count + 1)), np.int64)
    for e in range(num_experts):
        if head[e] >= 0:
            _serve(
                tokens_ER, e, home, at_home, group, num_standing, head, after, rank, quota, remote,
                remote_home, sent, standing_CR, out, seen, work,
            )  # fmt: skip
    return count


@kernel
def _serve(  # type: ignore[no-untyped-def]
    tokens_ER, e, home, at_home, group, num_standing, head, after, rank, quota, remote, remote_home, sent,
    standing_CR, out, seen, work,
):  # fmt: skip
    """Whom the instances of one expert serve: their own nodes first, then the others."""
    num_ranks = tokens_ER.shape[1]
    left, level, cap, filled, here, room, nodes = work
    for r in range(num_ranks):
        left[r] = tokens_ER[e, r]
    for i_node in range(_nodes(e, home, head, after, rank, group, seen, nodes)):
        node = nodes[i_node]
        n, quotas = _instances(e, home, at_home, head, after, rank, quota, group, node, here)
        first = node * group
        own = np.int64(0)
        for r in range(group):
            own += left[first + r]
            level[r] = -sent[first + r]
            cap[r] = left[first + r]
        fill_levels(level, cap, group, min(own, quotas), filled)
        for r in range(group):
            left[first + r] -= filled[r]
            sent[first + r] -= filled[r]
        for i in range(n):
            c = here[i]
            room[i] = quota[c] - remote[c] if c >= 0 else at_home[e] - remote_home[e]
            r = (rank[c] if c >= 0 else home[e]) - first
            some = min(filled[r], room[i])
            filled[r] -= some
            room[i] -= some
            _give(c, first + r, some, num_standing, standing_CR, out)
        r = 0
        for i in range(n):
            while room[i] > 0:
                some = min(filled[r], room[i])
                filled[r] -= some
                room[i] -= some
                _give(here[i], first + r, some, num_standing, standing_CR, out)
                if room[i] > 0:
                    r += 1
    c = head[e]
    r = 0
    while c >= 0:
        need = remote[c]
        while need > 0:
            some = min(left[r], need)
            left[r] -= some
            need -= some
            _give(c, r, some, num_standing, standing_CR, out)
            if need > 0:
                r += 1
        c = after[c]


@inlined
def _give(c, r, some, num_standing, standing_CR, out):  # type: ignore[no-untyped-def]
    """Copy c serves some tokens of source r; the home (-1) needs no entry."""
    if c >= num_standing:
        out[c - num_standing, r] += some
    elif c >= 0:
        standing_CR[c, r] += some
