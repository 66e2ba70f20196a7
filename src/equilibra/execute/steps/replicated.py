"""Whether the ranks hold the same dense weights: a hash of their bits, computed where they lie.

Ranks that were seeded differently, or loaded different files, would train different models and average nothing: every
later figure is wrong, and no collective fails. So their hashes are compared before the first sum of gradients, after
weights were changed by hand, and now and then. A hash reads the weights once, a few megabytes at a time, and one read
from the device brings all of them to the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor, nn

from equilibra.core.errors import MismatchError
from equilibra.execute.experts.weights import ExpertWeights
from equilibra.execute.runtime import Runtime

__all__ = ["check_replicated"]

CHUNK = 4 << 20
"""values that are widened to int64 at a time"""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
STEP, FACTOR = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
"""odd: positions and values are spread over all bits"""


@torch.no_grad()
def check_replicated(module: nn.Module, runtime: Runtime) -> None:
    """Collective: an error on every rank unless all hold the same dense parameters and persistent buffers, to the bit.

    Experts and sharded tensors (DTensor) are left out: they differ.
    """
    group = runtime.group
    if group.world_size == 1:
        return
    named = dict(_replicated(module, runtime))
    hashes = _hashes(list(named.values()))
    about = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named.items()]
    digest = sha256("\n".join(about).encode() + hashes.tobytes()).digest()
    said = group.gather(np.frombuffer(digest, np.uint8), what="comparing dense weights")
    if all(part.tobytes() == said[0].tobytes() for part in said):
        return
    shapes = np.array([np.frombuffer(sha256(text.encode()).digest()[:8], np.int64)[0] for text in about], np.int64)
    every = group.gather(np.stack([shapes, hashes], axis=1), what="looking for the dense weight that differs")
    _raise_first(list(named), [np.asarray(part) for part in every])


def _raise_first(names: list[str], every: list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]) -> None:
    advice = "seed every rank alike or load the same checkpoint on all of them before training"
    if any(len(part) != len(names) or (part[:, 0] != every[0][:, 0]).any() for part in every):
        raise MismatchError(
            "ranks have different dense parameters or buffers (names, shapes or types; "
            f"{', '.join(str(len(part)) for part in every)} of them by rank): build the same model everywhere"
        )
    hashes_RN = np.stack([part[:, 1] for part in every])
    first = int((hashes_RN != hashes_RN[0]).any(axis=0).argmax())
    others = np.flatnonzero(hashes_RN[:, first] != hashes_RN[0, first]).tolist()
    count = int((hashes_RN != hashes_RN[0]).any(axis=0).sum())
    raise MismatchError(
        f"the dense weight {names[first]} is not the same on all ranks: {_ranks(others)} from rank 0 "
        f"({count} of {len(names)} tensors differ). Dense weights must be equal to the bit; {advice}"
    )


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"rank {shown} differs" if len(numbers) == 1 else f"ranks {shown}{more} differ"


def _replicated(module: nn.Module, runtime: Runtime) -> Iterator[tuple[str, Tensor]]:
    """Dense parameters, and buffers that are saved: others may be caches of what a rank has seen."""
    experts = {id(part) for weights in runtime.weights for part in weights.parts()}
    for prefix, part in module.named_modules():
        if isinstance(part, ExpertWeights):
            continue
        own: dict[str, Tensor | None] = dict(part.named_parameters(recurse=False))
        own |= {n: b for n, b in part.named_buffers(recurse=False) if n not in part._non_persistent_buffers_set}  # noqa: SLF001
        for name, tensor in own.items():
            if tensor is not None and id(tensor) not in experts and not hasattr(tensor, "full_tensor"):
                yield f"{prefix}.{name}" if prefix else name, tensor


def _hashes(tensors: list[Tensor]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """[N] a hash of the bits of each tensor."""
    if not tensors:
        return np.zeros(0, np.int64)
    found = [_hash(tensor.detach()) for tensor in tensors]
    return torch.stack([one.to(found[0].device) for one in found]).cpu().numpy()


def _hash(tensor: Tensor) -> Tensor:
    """A sum modulo 2^64 of mixed words, each mixed with its position: a single changed bit changes it."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    words = real.contiguous().view(WORDS[real.dtype.itemsize]).view(-1)
    for first in range(0, words.numel(), CHUNK):
        mixed = words[first : first + CHUNK].to(torch.int64)
        mixed = (mixed + torch.arange(first, first + mixed.numel(), device=tensor.device) * STEP) * FACTOR
        total += ((mixed ^ (mixed >> 31)) * STEP).sum()
    return total
