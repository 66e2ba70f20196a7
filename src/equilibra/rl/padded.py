"""Sequences of a micro-batch as a rectangle of tokens, and where in it the answers are predicted.

Symbols: B sequences, T tokens of the longest, N answer tokens.

The last token of a sequence is no input: only a target. So all inputs have recorded routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Padded", "padded"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Padded:
    """Inputs and targets; padding is behind the tokens. Without sequences it is one padding token."""

    tokens_BT: Tensor
    """inputs"""
    mask_BT: Tensor
    """1 for tokens, 0 for padding"""
    rows: Tensor
    """places of all inputs in the flattened rectangle, sequence by sequence"""
    predicting: Tensor
    """[N] places whose next token is one of an answer"""
    targets: Tensor
    """[N] those next tokens"""
    sequence: Tensor
    """[N] which sequence they belong to"""


def padded(sequences: Sequence[tuple[Tensor, int]], pad: int, device: torch.device) -> Padded:
    """Of (tokens, how many of them are the prompt) of each sequence."""
    longest = max((len(tokens) - 1 for tokens, _ in sequences), default=1)
    tokens_BT = torch.full((max(len(sequences), 1), longest), pad)
    mask_BT = torch.zeros_like(tokens_BT)
    if not sequences:
        mask_BT[:] = 1  # attention needs something to look at; no row of it goes to experts or into the loss
    rows, predicting, targets, sequence = [], [], [], []
    for number, (tokens, prompt) in enumerate(sequences):
        first, size = number * longest, len(tokens) - 1
        tokens_BT[number, :size] = tokens[:-1]
        mask_BT[number, :size] = 1
        rows.append(torch.arange(first, first + size))
        predicting.append(torch.arange(first + prompt - 1, first + size))
        targets.append(tokens[prompt:])
        sequence.append(torch.full((size - prompt + 1,), number))

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat([torch.zeros(0, dtype=torch.long), *parts]).to(device)

    return Padded(
        tokens_BT=tokens_BT.to(device), mask_BT=mask_BT.to(device), rows=joined(rows), predicting=joined(predicting),
        targets=joined(targets), sequence=joined(sequence),
    )  # fmt: skip
