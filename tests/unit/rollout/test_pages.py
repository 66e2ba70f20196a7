"""The paged KV cache gives every sequence its own keys and values, whatever pages they are in."""

import torch

from equilibra.rollout.pages import PagedCache, PagedView

HEADS, WIDTH = 2, 3


def cache(num_pages=12, page=4):
    return PagedCache(num_pages, page, dtype=torch.float64, device=torch.device("cpu"))


class Plain:
    """A cache that concatenates, for one sequence."""

    def __init__(self):
        self.keys, self.values = torch.zeros(HEADS, 0, WIDTH).double(), torch.zeros(HEADS, 0, WIDTH).double()

    def add(self, key, value):
        self.keys, self.values = torch.cat([self.keys, key], 1), torch.cat([self.values, value], 1)


def add(paged, sequences, sizes, seed):
    """Add tokens to (pages, plain) sequences in one pass; returns whether every one got what the plain cache has."""
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.rand(len(sizes), HEADS, max(sizes), WIDTH, generator=generator).double() for _ in range(2))
    cached = [plain.keys.shape[1] for _, plain in sequences]
    for (pages, _), had, size in zip(sequences, cached, sizes, strict=True):
        pages.extend(paged.take(paged.pages_for(had + size) - len(pages)))
    view = PagedView(paged, [pages for pages, _ in sequences], cached, sizes)
    keys, values = view.update(key, value, 0)
    right = True
    for row, ((_, plain), size) in enumerate(zip(sequences, sizes, strict=True)):
        plain.add(key[row, :, :size], value[row, :, :size])
        count = plain.keys.shape[1]
        right &= torch.equal(keys[row, :, :count], plain.keys) and torch.equal(values[row, :, :count], plain.values)
    return right


def test_sequences_of_different_lengths_grow_in_one_pass():
    paged, sequences = cache(), [([], Plain()), ([], Plain()), ([], Plain())]
    for step, sizes in enumerate([[5, 1, 3], [1, 1, 1], [4, 2, 1], [1, 1, 1]]):
        assert add(paged, sequences, sizes, step)


def test_a_fork_shares_full_pages_and_grows_alone():
    paged, first = cache(), ([], Plain())
    assert add(paged, [first], [6], 0)
    other = (paged.fork(first[0], 6), Plain())
    other[1].keys, other[1].values = first[1].keys, first[1].values
    assert other[0][0] == first[0][0]
    assert other[0][1] != first[0][1]
    assert add(paged, [first, other], [3, 2], 1)
    paged.drop(first[0])
    assert add(paged, [other], [1], 2), "the shared page must survive its first owner"
    paged.drop(other[0])
    assert paged.num_free == paged.num_pages


def test_pages_that_are_not_shared_would_be_overwritten():
    """Control: a fork that does not copy its last page is noticed."""
    paged, first = cache(), ([], Plain())
    add(paged, [first], [6], 0)
    thief = (list(first[0]), Plain())
    thief[1].keys, thief[1].values = first[1].keys, first[1].values
    add(paged, [first], [1], 1)
    add(paged, [thief], [1], 2)
    assert not add(paged, [first], [1], 3)


def test_saved_sequences_come_back_bit_by_bit():
    paged, one = cache(), ([], Plain())
    add(paged, [one], [7], 0)
    saved = paged.save(one[0], 7)
    paged.drop(one[0])
    stranger = ([], Plain())
    add(paged, [stranger], [9], 1)
    pages = paged.take(2)
    paged.restore(pages, saved)
    assert add(paged, [(pages, one[1])], [1], 2)
