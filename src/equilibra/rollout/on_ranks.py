"""The disaggregated engine of a training run: one pool for all ranks, started by world rank 0.

Its calls are collective. Weights come as a stream that every rank reads and only rank 0 hands on; requests travel to
rank 0 and answers back, each rank its own. What fails on rank 0 is an error on every rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.execute.group import Channel, ExpertGroup
from equilibra.rl.engine import Generation, Request
from equilibra.rollout.pool import Pool

__all__ = ["PoolOfRanks"]


class PoolOfRanks:
    """An `Engine` whose pool is on world rank 0."""

    def __init__(self, group: ExpertGroup, start: Callable[[], Pool], *, roundoff: float) -> None:
        """Collective. group: with a timeout long enough for rollouts. start: starts the pool; called on rank 0."""
        self.group, self.roundoff = group, roundoff
        self.pool = group.all_succeed(
            lambda: start() if group.world_rank == 0 else None, what="starting the rollout engine"
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        def load() -> None:
            stream = iter(weights)
            try:
                if self.pool is not None:
                    self.pool.load_weights(stream, version=version)
            finally:
                for _ in stream:  # collective: other ranks must not wait for this one
                    pass

        self.group.all_succeed(load, what="loading weights into the rollout engine")

    def generate(self, requests: Sequence[Request], *, temperature: float) -> list[Generation]:
        """Collective: answer this rank's requests."""
        every: list[list[Request]] = [pickle.loads(raw) for raw in self._to_first(pickle.dumps(requests))]  # noqa: S301

        def answers() -> list[bytes]:
            if self.pool is None:
                return []
            said = self.pool.generate([one for some in every for one in some], temperature=temperature)
            ends = list(accumulate(map(len, every), initial=0))
            return [pickle.dumps(said[first:last]) for first, last in pairwise(ends)]

        mine = self._from_first(self.group.all_succeed(answers, what="generating answers"))
        return list[Generation](pickle.loads(mine))  # noqa: S301 - of this run's rank 0

    def close(self) -> None:
        """End the processes; not collective."""
        if self.pool is not None:
            self.pool.close()

    # --- transport ---

    def _to_first(self, mine: bytes) -> list[bytes]:
        """On rank 0 what every rank gave; nothing elsewhere."""
        lengths = self._lengths(np.array([len(mine)]))[:, 0].tolist()
        world, first = self.group.world_size, self.group.world_rank == 0
        said = self._exchange(mine, [len(mine), *[0] * (world - 1)], lengths if first else [0] * world)
        return said if first else []

    def _from_first(self, parts: list[bytes]) -> bytes:
        """What rank 0 has for this rank."""
        world, first = self.group.world_size, self.group.world_rank == 0
        sizes = [len(part) for part in parts] if first else [0] * world
        length = int(self._lengths(np.array(sizes))[0, self.group.world_rank])
        received = [length, *[0] * (world - 1)]
        return self._exchange(b"".join(parts), sizes, received)[0]

    def _lengths(self, mine: NDArray[np.int64]) -> NDArray[np.int64]:
        said = self.group.gather(mine[None], what="asking for sizes of requests and answers")
        return np.concatenate([np.asarray(one, np.int64) for one in said])

    def _exchange(self, mine: bytes, sent: list[int], received: list[int]) -> list[bytes]:
        outgoing = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else torch.empty(0, dtype=torch.uint8)
        incoming = torch.empty(sum(received), dtype=torch.uint8)
        what = "exchanging requests and answers"
        self.group.all_to_all(Channel.CONTROL, outgoing, sent, incoming, received, what=what).wait()
        raw, ends = incoming.numpy().tobytes(), list(accumulate(received, initial=0))
        return [raw[first:last] for first, last in pairwise(ends)]
