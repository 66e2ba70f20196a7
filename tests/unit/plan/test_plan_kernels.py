"""Inner kernels of the planner against definitions that are obvious and slow."""

from itertools import combinations

import numpy as np
import pytest

from equilibra.core.load import SequenceLoad
from equilibra.core.placement import Cluster, contiguous
from equilibra.plan import pack, replicate, stand

RANK_BITS = replicate._RANK_BITS


def work_area(rows):
    return np.zeros((replicate.NUM_ROWS, rows), np.int64)


@pytest.mark.parametrize("seed", range(30))
def test_a_pair_of_rooms_wastes_least(seed):
    """Of all pairs that hold the piece, the one with the smallest sum; at most `fine` above it."""
    rng = np.random.default_rng(seed)
    rooms = np.sort(rng.integers(1, 60, rng.integers(3, 9)))[::-1]
    piece = int(rng.integers(rooms[0] + 1, max(rooms[0] + 2, rooms[0] + rooms[1])))
    w = work_area(rooms.size)
    w[replicate._ROOM] = (rooms << RANK_BITS) + rng.permutation(rooms.size)
    for fine in (0, 7):
        a, b = replicate._pair(w, rooms.size, piece, fine)
        enough = [sum(pair) for pair in combinations(rooms.tolist(), 2) if sum(pair) > piece]
        if not enough:
            continue  # a piece that only the two largest rooms fill to the last token
        assert a < b
        assert rooms[a] + rooms[b] >= piece
        assert rooms[a] + rooms[b] <= min(enough) + fine


def test_the_slowest_rank_counts_rows_and_prices_of_copies():
    first = np.array([0, 2, 4, 6])  # two instances on each of three ranks
    w = work_area(6)
    w[replicate._LOAD, :3] = [100, 40, 10]
    for c, (item, rank, tokens) in enumerate([(0, 1, 30), (1, 2, 25), (3, 2, 5)]):
        w[replicate.ITEM, c], w[replicate.RANK, c], w[replicate.TOKENS, c] = item, rank, tokens
    assert replicate._slowest(first, w, 0, 7, 3) == 100
    assert replicate._slowest(first, w, 2, 7, 3) == max(100 - 55 + 6, 40 + 37, 10 + 32)
    assert replicate._slowest(first, w, 3, 7, 3) == max(51, 40 + 37 - 5 + 3, 10 + 32 + 12)


def test_skew_is_folded_into_one_width_without_changing_squares_much():
    """40 layers on two nodes are 80 sums: more than the width, so signs fold them."""
    cluster = Cluster(num_nodes=2, ranks_per_node=2)
    rng = np.random.default_rng(3)
    tokens = rng.multinomial(80, rng.dirichlet(np.full(8, 0.3), size=40), size=(24, 40)).astype(np.int32)
    load = SequenceLoad(tokens_SLE=tokens, length_of_sequence=np.full(24, 80))
    folded = pack._folded_skew(load, contiguous(cluster, num_layers=40, num_experts=8))
    exact = tokens.reshape(24, 40, 2, 4).sum(axis=3)
    exact = (2 * exact - exact.sum(axis=2, keepdims=True)).reshape(24, -1).astype(np.float64)
    assert folded.shape == (24, pack._FOLDED) == (24, 64)
    ours, theirs = np.square(folded).sum(axis=1), np.square(exact).sum(axis=1)
    assert np.corrcoef(ours, theirs)[0, 1] > 0.5


@pytest.mark.parametrize("seed", range(20))
def test_candidates_are_the_copies_that_gain_most(seed):
    """No expert at home, twice on a node or on a full one; the largest gains, of equal ones the first."""
    rng = np.random.default_rng(seed)
    num_nodes, num_experts, num_micro_batches, width = 4, 12, 3, int(rng.integers(2, 6))
    load_EM = rng.integers(0, 60, (num_experts, num_micro_batches))
    home = np.arange(num_experts) % num_nodes
    copy_expert, copy_node = np.array([2, 3, 4, 5, 5, 6, 7]), np.array([0, 0, 3, 0, 3, 0, 2])
    share_CM = load_EM[copy_expert] // 8
    x_NM = np.zeros((num_nodes, num_micro_batches), np.int64)
    np.add.at(x_NM, home, load_EM)
    np.add.at(x_NM, home[copy_expert], -share_CM)
    np.add.at(x_NM, copy_node, share_CM)
    free = np.array([1, 0, 2, 1])
    at_home = load_EM.copy()
    np.add.at(at_home, copy_expert, -share_CM)

    def gain(expert, node):
        slope = np.maximum(x_NM[home[expert]] - x_NM[node], 0)
        amount = np.minimum(slope // 2, at_home[expert])
        return int((amount * (slope - amount)).sum())

    taken = {*zip(copy_expert.tolist(), copy_node.tolist(), strict=True), *enumerate(home.tolist())}
    every = [(e, n) for e in range(num_experts) for n in range(num_nodes) if free[n] and (e, n) not in taken]
    wanted = sorted(((gain(e, n), e, n) for e, n in every if gain(e, n)), key=lambda one: -one[0])[:width]
    best = np.zeros((3, width), np.int64)
    found = stand._best_candidates(load_EM, home, x_NM, free, copy_expert, copy_node, share_CM, copy_node.size, best)
    assert list(zip(*best[:, :found].tolist(), strict=True)) == wanted
