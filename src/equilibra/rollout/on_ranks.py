"""The disaggregated engine of a training run: one pool for all ranks, started by world rank 0.

Its calls are collective. Weights come as a stream that every rank reads and only rank 0 hands on; requests travel to
rank 0 and answers back, each rank its own. What fails on rank 0 is an error on every rank.
"""

from __future__ import annotations

import io
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
        every = [_requests(raw) for raw in self._to_first(_packed_requests(requests))]

        def answers() -> list[bytes]:
            if self.pool is None:
                return []
            said = self.pool.generate([one for some in every for one in some], temperature=temperature)
            ends = list(accumulate(map(len, every), initial=0))
            return [_packed_answers(said[first:last]) for first, last in pairwise(ends)]

        return _answers(self._from_first(self.group.all_succeed(answers, what="generating answers")))

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


def _packed(**arrays: NDArray[np.generic]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def _joined(parts: Sequence[NDArray[np.generic]], like: NDArray[np.generic]) -> NDArray[np.generic]:
    return np.concatenate([like, *parts])


def _packed_requests(requests: Sequence[Request]) -> bytes:
    return _packed(
        sizes=np.array([(one.tokens.size, one.max_new) for one in requests], np.int64).reshape(-1, 2),
        tokens=_joined([one.tokens for one in requests], np.empty(0, np.int64)),
        noise=_joined([one.noise for one in requests], np.empty(0)),
    )


def _requests(raw: bytes) -> list[Request]:
    with np.load(io.BytesIO(raw), allow_pickle=False) as said:
        ends = np.cumsum(said["sizes"], axis=0)[:-1]
        if not len(said["sizes"]):
            return []
        tokens, noise = np.split(said["tokens"], ends[:, 0]), np.split(said["noise"], ends[:, 1])
    return [Request(tokens=one, noise=its) for one, its in zip(tokens, noise, strict=True)]


def _packed_answers(answers: Sequence[Generation]) -> bytes:
    shape = answers[0].experts.shape[1:] if answers else (0, 0)
    about = [(one.tokens.size, len(one.experts), one.ended, one.version or 0) for one in answers]
    return _packed(
        about=np.array(about, np.int64).reshape(-1, 4),
        tokens=_joined([one.tokens for one in answers], np.empty(0, np.int64)),
        logprobs=_joined([one.logprobs for one in answers], np.empty(0)),
        experts=_joined([one.experts for one in answers], np.empty((0, *shape), np.int32)),
    )


def _answers(raw: bytes) -> list[Generation]:
    with np.load(io.BytesIO(raw), allow_pickle=False) as said:
        about = said["about"]
        if not len(about):
            return []
        tokens_at, rows_at = np.cumsum(about[:, :2], axis=0)[:-1].T
        tokens, logprobs = np.split(said["tokens"], tokens_at), np.split(said["logprobs"], tokens_at)
        experts = np.split(said["experts"], rows_at)
    return [
        Generation(tokens=t, logprobs=p, experts=e, ended=bool(ended), version=int(version))
        for t, p, e, (_, _, ended, version) in zip(tokens, logprobs, experts, about.tolist(), strict=True)
    ]
