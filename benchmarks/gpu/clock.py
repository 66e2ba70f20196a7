"""Stamps in a device's queue, and the time between them: CUDA events, or the host's clock where the host computes."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

__all__ = ["Clock", "Stamp"]

Stamp = Any
"""a CUDA event or seconds"""
CYCLES_PER_US = 1_900
"""of a GPU, about: what it waits for is not timed"""


class Clock:
    """Everything that is timed goes through one queue; `settle` before times are read."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def stamp(self) -> Stamp:
        """Now, in the current queue."""
        if not self.cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def settle(self) -> None:
        """Wait until everything is done."""
        if self.cuda:
            torch.cuda.synchronize()

    def us(self, start: Stamp, end: Stamp) -> float:
        """From one stamp to another that is later."""
        return float(start.elapsed_time(end)) * 1e3 if self.cuda else (end - start) * 1e6

    def let_host_ahead(self, us: float) -> None:
        """Keep the device busy for so long, so that the host can queue what comes: its time must not be measured."""
        if self.cuda and us > 0:
            torch.cuda._sleep(int(us * CYCLES_PER_US))  # type: ignore[no-untyped-call]  # noqa: SLF001
