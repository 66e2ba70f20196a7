"""Rows with a number each: the number travels at the end of its row, so that one exchange takes both.

Symbols: N rows, D width, T tokens, K experts per token.

In the backward pass a row's weight goes to the instance that computed the row, and comes back as its gradient. What is
sent beside rows of 16 bits is not a number in their type: whoever looks for NaN in what travels will find some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from equilibra.execute.kernels import on_gpu, plain_sum, spread

__all__ = ["Laden"]

ALIGNED = 16
"""bytes: rows begin there, and so do their numbers"""


class Laden(NamedTuple):
    """Rows and their numbers; a rank that is alone sends nothing and keeps them apart."""

    rows_ND: Tensor
    """maybe a part of `every`"""
    numbers_N: Tensor
    """float32, float64 where rows are; maybe a part of `every`"""
    every: Tensor | None = None
    """what travels"""

    @classmethod
    def empty(cls, num_rows: int, width: int, like: Tensor, *, travels: bool) -> Laden:
        """Room for rows of a type."""
        if not travels:
            return cls(like.new_empty(num_rows, width), like.new_empty(num_rows, dtype=_kind(like)))
        step = ALIGNED // like.itemsize
        return cls._of(like.new_empty(num_rows, (-(-width // step) + 1) * step), width)

    @classmethod
    def _of(cls, every: Tensor, width: int) -> Laden:
        room = every[:, every.shape[1] - ALIGNED // every.itemsize :]
        return cls(every[:, :width], room.view(_kind(every))[:, 0], every)

    def sent(self, exchange: Callable[[Tensor], Tensor]) -> Laden:
        """What came for it."""
        return self if self.every is None else self._of(exchange(self.every), self.rows_ND.shape[1])

    def fill(
        self, tokens_TD: Tensor, token_of_row: Callable[[], Tensor], row_of_pair_TK: Tensor, pairs_TK: Tensor
    ) -> None:
        """Every token once for each of its choices, with the number of the pair."""
        if on_gpu(tokens_TD):
            spread(tokens_TD, row_of_pair_TK, self.rows_ND, pairs_TK.contiguous(), self.numbers_N)
            return
        torch.index_select(tokens_TD, 0, token_of_row(), out=self.rows_ND)
        self.numbers_N[row_of_pair_TK.flatten().long()] = pairs_TK.flatten().to(self.numbers_N.dtype)

    def sum_of_choices(self, row_of_pair_TK: Tensor, pairs_TK: Tensor) -> Tensor:
        """[T, D] each token's rows, summed in the order of its choices, each row read once; numbers go to pairs."""
        if on_gpu(self.rows_ND):
            return plain_sum(self.rows_ND, row_of_pair_TK, self.numbers_N, pairs_TK)
        pairs_TK.copy_(self.numbers_N.index_select(0, row_of_pair_TK.flatten()).view_as(pairs_TK))
        whole = self.rows_ND if self.every is None else self.every  # rows that are part of others are summed slowly
        return embedding_bag(row_of_pair_TK, whole, mode="sum")[:, : self.rows_ND.shape[1]]


def _kind(like: Tensor) -> torch.dtype:
    return torch.float64 if like.dtype is torch.float64 else torch.float32
