"""Training with random delays in every stream: whatever is not ordered by a wait comes in another order.

A delay is a kernel that spins, queued where work is queued: before products, exchanges, copies, sums and signals, on
the stream that is current there. Ranks draw different ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.distributed.training import Gaps, train_case

from equilibra.core.placement import Cluster
from equilibra.execute.copies import device, device_paths, standing
from equilibra.execute.copies.segment import Signals
from equilibra.execute.copies.transfer import Path
from equilibra.execute.experts import expert_math
from equilibra.execute.experts.weights import ExpertWeights
from equilibra.execute.group import ExpertGroup, join_expert_group

MOST_CYCLES = 3_000_000
"""under two milliseconds"""
QUEUED: list[tuple[Any, str]] = [
    (expert_math, "forward"), (expert_math, "backward"), (ExpertGroup, "all_to_all"), (ExpertGroup, "sum"),
    (device_paths.IpcPath, "pull_weights"), (device_paths.IpcPath, "gradients"),
    (device_paths.PinnedPath, "pull_weights"), (device_paths.PinnedPath, "push_gradients"),
    (device_paths.PinnedPath, "gradients"), (standing.StandingStore, "add_gradient"),
    (standing.StandingStore, "start"), (ExpertWeights, "write_flat"),
]  # fmt: skip


class Delays:
    """How many there were."""

    def __init__(self, seed: int) -> None:
        self._rng, self.count = np.random.default_rng(seed), 0

    def sleep(self) -> None:
        """On the stream that is current, sometimes."""
        if self._rng.random() < 0.3:
            self.count += 1
            torch.cuda._sleep(int(self._rng.integers(1, MOST_CYCLES)))

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, with a delay before it."""

        def delayed(*args: Any, **kwargs: Any) -> Any:
            self.sleep()
            return call(*args, **kwargs)

        return delayed

    def install(self) -> None:
        """In this process, for good."""
        for owner, name in QUEUED:
            setattr(owner, name, self.before(getattr(owner, name)))
        for name in ("give", "wait"):
            setattr(Signals, name, self._on_stream(getattr(Signals, name)))

    def _on_stream(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def delayed(signals: Signals, number: int, value: int, stream: torch.cuda.Stream) -> None:
            with torch.cuda.stream(stream):
                self.sleep()
            call(signals, number, value, stream)

        return delayed


def leave_out(what: str) -> None:
    """Negative controls: an order that the streams need is not kept."""
    if what == "waiting for copies":
        device._Arriving.wait = lambda _self: None
        pull = device_paths.IpcPath.pull_weights

        def late(*args: Any, **kwargs: Any) -> None:  # copies start a layer ahead: a short delay ends in time
            torch.cuda._sleep(50 * MOST_CYCLES)
            pull(*args, **kwargs)

        device_paths.IpcPath.pull_weights = late
    elif what == "waiting for signals":
        Signals.wait = lambda *_: None
    elif what:
        raise AssertionError(what)


def delayed_cases(
    cases: list[tuple[Path, bool]], seeds: list[int], cluster: Cluster, unrecorded: float = 0.0, without: str = ""
) -> tuple[dict[tuple[Path, bool], list[Gaps]], int]:
    """Train every seed on every path (and with gradients pulled as between GPUs, or added in place); gaps, delays."""
    torch.cuda.set_device(0)
    group = join_expert_group(cluster, timeout_s=60)
    delays = Delays(group.world_rank)
    delays.install()
    leave_out(without)
    share_a_gpu, found = device_paths.share_a_gpu, {}
    for path, pulled in cases:
        device_paths.share_a_gpu = (lambda *_: False) if pulled else share_a_gpu
        found[path, pulled] = [train_case(seed, group, unrecorded, "", "cuda", (path,)) for seed in seeds]
    group.watch.close()
    return found, delays.count
