"""Rows on their way: buffers that are made once and used again when what they carried has arrived."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from equilibra.execute.group import Pending

__all__ = ["Staging"]


class Staging:
    """As many buffers as lists of rows were ever on their way at once."""

    def __init__(self, like_P: Tensor) -> None:
        self._like_P = like_P
        """a row of the right width, dtype and device"""
        self._most = 0
        self._free: list[Tensor] = []
        self.num_bytes = 0
        """of all buffers"""

    def expect(self, most: int) -> None:
        """Lists have so many rows at most; buffers that are too small are given up."""
        self._most = max(self._most, most)
        free, self._free = self._free, []
        for rows_nP in free:
            self.give_back(rows_nP)

    def take(self) -> Tensor:
        """[most, P], nobody else's until they are given back."""
        if self._free:
            return self._free.pop()
        made = self._like_P.new_empty(self._most, self._like_P.numel())
        self.num_bytes += made.nbytes
        return made

    def give_back(self, rows_nP: Tensor) -> None:
        """A buffer as it was taken."""
        if len(rows_nP) < self._most:
            self.num_bytes -= rows_nP.nbytes
        else:
            self._free.append(rows_nP)

    def until(self, moving: Pending, rows_nP: Tensor) -> Pending:
        """What is under way, which gives a buffer back when it is there."""
        return _Carried(moving=moving, staging=self, rows_nP=rows_nP)


@dataclass(kw_only=True, eq=False)
class _Carried:
    moving: Pending
    staging: Staging
    rows_nP: Tensor | None

    def wait(self) -> None:
        self.moving.wait()
        if self.rows_nP is not None:  # not twice
            self.staging.give_back(self.rows_nP)
            self.rows_nP = None
