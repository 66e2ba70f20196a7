"""The other process of the CUDA IPC check: opens the tensor whose handle comes on stdin, sums it, adds 1 to it.

Writes the sum and the device it was computed on to stdout.
"""

from __future__ import annotations

import os
import pickle
import sys

__all__ = ["main"]


def main() -> None:
    """Read, answer, end."""
    import torch

    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print is no part of the answer
    rebuild, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started this one
    tensor = rebuild(*arguments)
    device = torch.cuda.device_count() - 1
    total = int(tensor.to(f"cuda:{device}").sum())
    tensor.add_(1)
    torch.cuda.synchronize(tensor.device)
    answer.write(pickle.dumps((total, device)))
    answer.close()


if __name__ == "__main__":
    main()
