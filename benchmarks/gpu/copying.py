"""Copies inside one GPU that leave its multiprocessors to compute, in place of copy engines.

Between GPUs, and from the host, copy engines move memory. Inside one GPU the driver copies with a kernel, whose many
blocks occupy multiprocessors before the next product starts. Beside a backward pass that cost twice as much as the
kernel here, whose blocks are small and few enough to run beside a product (docs/decisions/0009-gpu.md). Where another
GPU would read this one's memory, a kernel reads as much.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from equilibra.execute.kernels import multiprocessors

BLOCK, WARPS = 2048, 4


def copy_beside(into: Tensor, source: Tensor) -> None:
    """Copy contiguous tensors of whole words, on the current stream."""
    words, from_words = (tensor.view(-1).view(torch.int32) for tensor in (into, source))
    _copy[(multiprocessors(into.device),)](from_words, words, words.numel(), BLOCK=BLOCK, num_warps=WARPS)


def read_beside(source: Tensor, into: Tensor) -> None:
    """Read a contiguous tensor of whole words; each program writes the sum of its words into `into` [P] int32."""
    words = source.view(-1).view(torch.int32)
    _read[(multiprocessors(source.device),)](words, into, words.numel(), BLOCK=BLOCK, num_warps=WARPS)


@triton.jit
def _copy(source, into, count, BLOCK: tl.constexpr):
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(into + at, tl.load(source + at, mask=at < count), mask=at < count)


@triton.jit
def _read(source, into, count, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int32)
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(source + at, mask=at < count, other=0)
    tl.store(into + tl.program_id(0), tl.sum(total, axis=0))
