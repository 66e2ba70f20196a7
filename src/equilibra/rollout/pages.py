"""A paged KV cache: the pages of each sequence, and the tensors behind them.

Symbols: B sequences, T tokens a forward pass adds to each (padded), C longest cached sequence, H heads, D width.

A page holds the keys and values of a few consecutive tokens in all layers. Sequences with the same prompt share its
full pages. transformers' attention modules use `PagedView` as their cache: they add the keys and values of new tokens
and get those of all tokens. Shapes come from the modules, so compressed caches work too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Saved = dict[int, tuple[Tensor, Tensor]]
"""keys and values of one sequence by layer, outside the cache"""


class PagedCache:
    """The pages of one attention process."""

    def __init__(self, num_pages: int, page: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """page: tokens per page."""
        self.num_pages, self.page, self.dtype, self.device = num_pages, page, dtype, device
        self._free = list(range(num_pages))[::-1]
        self._users = [0] * num_pages
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        """[pages * page, H, D] keys and values, made when a layer first runs"""

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take free pages; there must be enough."""
        assert count <= len(self._free)
        taken = [self._free.pop() for _ in range(count)]
        for number in taken:
            self._users[number] = 1
        return taken

    def drop(self, pages: Sequence[int]) -> None:
        """Return pages; shared ones stay until their last user drops them."""
        for number in pages:
            self._users[number] -= 1
            if self._users[number] == 0:
                self._free.append(number)

    def fork(self, pages: Sequence[int], tokens: int) -> list[int]:
        """Pages of a second sequence with the same first tokens: full pages are shared, a partial one is copied."""
        full = tokens // self.page
        forked = list(pages[:full])
        for number in forked:
            self._users[number] += 1
        if tokens % self.page:
            forked += self.take(1)
            source, target = self._slots(pages[full : full + 1]), self._slots(forked[-1:])
            for layer in self._layers.values():
                for values in layer:
                    values[target] = values[source]
        return forked

    def _slots(self, pages: Sequence[int]) -> Tensor:
        first = torch.tensor(pages, dtype=torch.long, device=self.device)[:, None] * self.page
        return (first + torch.arange(self.page, device=self.device)).flatten()

    def save(self, pages: Sequence[int], tokens: int) -> Saved:
        """Copy a sequence's keys and values to host memory."""
        slots = self._slots(pages)[:tokens]
        return {layer: (k[slots].cpu(), v[slots].cpu()) for layer, (k, v) in self._layers.items()}

    def restore(self, pages: Sequence[int], saved: Saved) -> None:
        """Copy saved keys and values into new pages."""
        for layer, (keys, values) in saved.items():
            slots = self._slots(pages)[: len(keys)]
            for target, source in zip(self._layers[layer], (keys, values), strict=True):
                target[slots] = source.to(self.device)

    def layer(self, number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's tensors, initially zero: masked positions are read too."""
        if number not in self._layers:
            rows = self.num_pages * self.page
            self._layers[number] = tuple(  # type: ignore[assignment]
                torch.zeros(rows, one.shape[1], one.shape[3], dtype=one.dtype, device=one.device)
                for one in (key, value)
            )
        return self._layers[number]


class PagedView:
    """The cache of the sequences of one forward pass."""

    def __init__(
        self, cache: PagedCache, tables: Sequence[Sequence[int]], cached: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """tables: pages of each sequence, enough for its new tokens. cached: its tokens before. sizes: new ones."""
        self.cache, self.longest = cache, max(map(sum, zip(cached, sizes, strict=True)))
        tables_BP = np.zeros((len(tables), cache.pages_for(self.longest)), np.int64)
        for row, table in enumerate(tables):
            some = table[: tables_BP.shape[1]]
            tables_BP[row, : len(some)] = some
        at_T, sizes_B = np.arange(max(sizes)), np.array(sizes)
        new_BT = at_T < sizes_B[:, None]
        positions_BT = np.where(new_BT, np.array(cached)[:, None] + at_T, 0)
        slots_BT = np.take_along_axis(tables_BP, positions_BT // cache.page, 1) * cache.page + positions_BT % cache.page
        self.positions_BT = self._of(positions_BT)
        """[B, T] position of each new token; 0 for padding"""
        self.new_N = self._of(np.flatnonzero(new_BT))
        """indices of new tokens in [B * T], without padding"""
        self.row_BT = self._of(np.cumsum(new_BT) - 1)
        """[B * T] index into `new_N`; padding repeats the previous one"""
        self.last_B = self._of(np.arange(len(sizes)) * at_T.size + sizes_B - 1)
        """indices of last tokens in [B * T]"""
        self._slots_N, self._pages_N = self._of(slots_BT[new_BT]), self._of(tables_BP.ravel())

    def _of(self, numbers: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(numbers).to(self.cache.device)

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_more: object, **_others: object
    ) -> tuple[Tensor, Tensor]:
        """Add [B, H, T, D] keys and values of a layer; returns all [B, H, C, D], padded on the right."""
        found = self.cache.layer(layer, key, value)
        return self._updated(found[0], key), self._updated(found[1], value)

    def _updated(self, kept: Tensor, new: Tensor) -> Tensor:
        kept[self._slots_N] = new.transpose(1, 2).flatten(0, 1).index_select(0, self.new_N)
        by_page = kept.view(self.cache.num_pages, self.cache.page, *kept.shape[1:])
        every = by_page.index_select(0, self._pages_N).view(len(new), -1, *kept.shape[1:])
        return every[:, : self.longest].transpose(1, 2)
