"""Which sequences an attention process works on next: continuous batching over m micro-batches and a paged KV cache.

    waiting    not started, in order of arrival
    running    has pages and a place in one micro-batch
    set aside  preempted: its keys and values are in host memory until pages are free again

A micro-batch is either prefill (sequences with several tokens to process, at most `prefill_tokens` together; longer
prompts take several passes) or decode (one token of each of its sequences). A finished sequence's place is taken at
once. Requests with the same prompt share its prefill and its full pages.

Older sequences have priority: one that finds no free page takes those of the youngest that is not in flight. The oldest
always finds enough, because a request that does not fit alone is refused. A preempted sequence continues with its own
keys and values, so its tokens and its recorded routing do not change.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.rl.engine import Generation, Request
from equilibra.rollout.pages import PagedCache, PagedView, Saved


@dataclass(eq=False)
class Growing:
    """A request and its answer so far."""

    number: int
    """of the request; lower is older"""
    request: Request
    tokens: list[int]
    """prompt and answer"""
    prompt: bytes
    """the prompt as a key"""
    logprobs: list[float] = field(default_factory=list)
    experts: list[NDArray[np.int32]] = field(default_factory=list)
    """[T, L, K] of all cached tokens, one array per pass"""
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    """tokens whose keys and values are known"""
    aside: Saved | None = None
    ended: bool = False

    @classmethod
    def of(cls, number: int, request: Request) -> Growing:
        return cls(number=number, request=request, tokens=request.tokens.tolist(), prompt=request.tokens.tobytes())

    @property
    def remaining(self) -> int:
        """Tokens to process before the next one can be drawn."""
        return len(self.tokens) - self.cached

    @property
    def num_new(self) -> int:
        return len(self.logprobs)

    @property
    def through(self) -> bool:
        return self.ended or self.num_new == self.request.max_new

    def generation(self, version: int) -> Generation:
        prompt = self.request.tokens.size
        return Generation(
            tokens=np.array(self.tokens[prompt:], np.int64), logprobs=np.array(self.logprobs, np.float64),
            experts=np.concatenate(self.experts), ended=self.ended, version=version,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One forward pass."""

    sequences: list[Growing]
    sizes: list[int]
    """tokens of each"""
    tokens_BT: Tensor
    """padded on the right"""
    cache: PagedView


@dataclass(frozen=True, kw_only=True, eq=False)
class _Prefilled:
    """A prompt whose pages are kept for waiting requests with the same prompt."""

    pages: list[int]
    logits_V: Tensor
    experts: NDArray[np.int32]


def draw(logits_BV: Tensor, noise: Sequence[float], temperature: float) -> tuple[Tensor, Tensor]:
    """Sample a token per row, and its log-probability.

    The token is the first whose cumulative probability exceeds the request's noise, so answers do not depend on the
    batch.
    """
    logits = logits_BV.double()
    if temperature == 0:
        chosen = logits.argmax(dim=-1)
    else:
        logits = logits / temperature
        sums = logits.softmax(dim=-1).cumsum(dim=-1)
        level = torch.tensor(noise, dtype=torch.float64, device=logits.device)[:, None] * sums[:, -1:]
        chosen = torch.searchsorted(sums, level, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return chosen, logits.log_softmax(dim=-1).gather(1, chosen[:, None])[:, 0]


class Scheduler:
    """The sequences of one attention process."""

    def __init__(self, cache: PagedCache, *, micro_batches: int, places: int, prefill_tokens: int, end: int) -> None:
        """places: most running sequences. prefill_tokens: most tokens of a prefill pass. end: the end token."""
        self.cache, self.places, self.prefill_tokens, self.end = cache, places, prefill_tokens, end
        self.temperature = 1.0
        self.waiting: deque[Growing] = deque()
        self.aside: list[Growing] = []
        self.running: list[list[Growing]] = [[] for _ in range(micro_batches)]
        self.num_preempted = 0
        self._prefilled: dict[bytes, _Prefilled] = {}
        self._waiting_of_prompt: Counter[bytes] = Counter()
        self._done: list[Growing] = []

    def add(self, sequences: Sequence[Growing]) -> None:
        self.waiting.extend(sequences)
        self._waiting_of_prompt.update(one.prompt for one in sequences)

    @property
    def num_running(self) -> int:
        return sum(map(len, self.running))

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.aside or self.num_running)

    def take_done(self) -> list[Growing]:
        done, self._done = self._done, []
        return done

    # --- the next pass of a micro-batch ---

    def next_batch(self, micro_batch: int, in_flight: Collection[int]) -> Batch | None:
        """in_flight: micro-batches that wait for experts; their sequences cannot be preempted or moved."""
        self._admit(micro_batch)
        if not self.waiting and not self.aside:
            self._level(micro_batch, in_flight)
        chosen, sizes, budget = list[Growing](), list[int](), self.prefill_tokens
        own = sorted(self.running[micro_batch], key=lambda one: one.number)
        prefills = any(one.remaining > 1 for one in own)
        for one in own:
            size = min(one.remaining, budget) if prefills else 1
            if (prefills and one.remaining == 1) or size == 0 or one not in self.running[micro_batch]:
                continue
            if self._grow(one, one.cached + size, in_flight, chosen):
                chosen.append(one)
                sizes.append(size)
                budget -= size if prefills else 0
        return self._batch(chosen, sizes) if chosen else None

    def _batch(self, chosen: list[Growing], sizes: list[int]) -> Batch:
        tokens_BT = np.zeros((len(chosen), max(sizes)), np.int64)
        for row, (one, size) in enumerate(zip(chosen, sizes, strict=True)):
            tokens_BT[row, :size] = one.tokens[one.cached : one.cached + size]
        view = PagedView(self.cache, [one.pages for one in chosen], [one.cached for one in chosen], sizes)
        tokens = torch.from_numpy(tokens_BT).to(self.cache.device)
        return Batch(sequences=chosen, sizes=sizes, tokens_BT=tokens, cache=view)

    def _admit(self, micro_batch: int) -> None:
        """Fill this micro-batch up to its share of all sequences, as far as pages last."""
        mine, others = self.running[micro_batch], len(self.running)
        total = self.num_running + len(self.aside) + len(self.waiting)
        most = min(-(-total // others), -(-self.places // others))
        while len(mine) < most and self.num_running < self.places:
            one = self._next_aside() or (None if self.aside else self._next_waiting())
            if one is None:
                return
            if not one.through:
                mine.append(one)

    def _level(self, micro_batch: int, in_flight: Collection[int]) -> None:
        """Take sequences from fuller micro-batches, so that the last answers are not all in one."""
        mine = self.running[micro_batch]
        for number, other in enumerate(self.running):
            while number not in in_flight and len(other) > len(mine) + 1:
                mine.append(other.pop())

    def _next_aside(self) -> Growing | None:
        if not self.aside:
            return None
        one = self.aside[0]
        needed = self.cache.pages_for(len(one.tokens))
        self._forget_prompts(needed)
        if needed > self.cache.num_free:
            return None
        self.aside.pop(0)
        one.pages = self.cache.take(needed)
        if one.aside is not None:
            self.cache.restore(one.pages, one.aside)
            one.aside = None
        return one

    def _next_waiting(self) -> Growing | None:
        """The first whose prompt is not being prefilled by another; None if it finds no pages."""
        prefilling = {one.prompt for some in self.running for one in some if not one.num_new}
        one = next((one for one in self.waiting if one.prompt not in prefilling), None)
        if one is None:
            return None
        known = self._prefilled.get(one.prompt)
        needed = self.cache.pages_for(one.remaining) if known is None else one.remaining % self.cache.page > 0
        self._forget_prompts(needed, keep=one.prompt)
        if needed > self.cache.num_free:
            return None
        self.waiting.remove(one)
        self._waiting_of_prompt[one.prompt] -= 1
        if not self._waiting_of_prompt[one.prompt]:
            del self._waiting_of_prompt[one.prompt]
        if known is None:
            one.pages = self.cache.take(needed)
            return one
        one.pages, one.cached = self.cache.fork(known.pages, one.remaining), one.remaining
        one.experts = [known.experts]
        self._draw([one], known.logits_V[None])
        self._forget_prompts(0)
        return one

    def _grow(self, one: Growing, tokens: int, in_flight: Collection[int], chosen: Sequence[Growing]) -> bool:
        """Get pages for this many tokens, preempting younger sequences or this one if necessary."""
        missing = self.cache.pages_for(tokens) - len(one.pages)
        if missing <= 0:
            return True
        self._forget_prompts(missing)
        movable = [other for number, some in enumerate(self.running) if number not in in_flight for other in some]
        younger = [other for other in movable if other.number > one.number and other not in chosen]
        younger.sort(key=lambda other: other.number)
        while missing > self.cache.num_free and younger:
            self._set_aside(younger.pop())
            self._forget_prompts(missing)
        if missing > self.cache.num_free:
            if any(other.number < one.number for some in self.running for other in some):
                self._set_aside(one)
            return False
        one.pages += self.cache.take(missing)
        return True

    def _set_aside(self, one: Growing) -> None:
        next(some for some in self.running if one in some).remove(one)
        one.aside = self.cache.save(one.pages, one.cached) if one.cached else None
        self.cache.drop(one.pages)
        one.pages = []
        self.aside.append(one)
        self.aside.sort(key=lambda other: other.number)
        self.num_preempted += 1

    def _forget_prompts(self, needed: int, keep: bytes = b"") -> None:
        """Drop kept prompts that no request waits for, or all but `keep` if pages are short."""
        for prompt in list(self._prefilled):
            short = needed > self.cache.num_free and prompt != keep
            if short or self._waiting_of_prompt[prompt] <= 0:
                self.cache.drop(self._prefilled.pop(prompt).pages)

    # --- after a pass ---

    def finish(self, batch: Batch, logits_BV: Tensor, experts: Sequence[NDArray[np.int32]]) -> None:
        """Take a pass's results: logits of last tokens, and the experts [T, L, K] of every sequence's tokens."""
        drawing = []
        for row, (one, size) in enumerate(zip(batch.sequences, batch.sizes, strict=True)):
            one.cached += size
            one.experts.append(experts[row])
            if one.remaining == 0:
                drawing.append(row)
                if not one.num_new and self._waiting_of_prompt[one.prompt] > 0:
                    self._keep_prompt(one, logits_BV[row])
        if drawing:
            self._draw([batch.sequences[row] for row in drawing], logits_BV[drawing])
        for some in self.running:
            some[:] = [one for one in some if not one.through]

    def _keep_prompt(self, one: Growing, logits_V: Tensor) -> None:
        if one.prompt in self._prefilled or (one.cached % self.cache.page and not self.cache.num_free):
            return
        self._prefilled[one.prompt] = _Prefilled(
            pages=self.cache.fork(one.pages, one.cached), logits_V=logits_V.clone(), experts=np.concatenate(one.experts)
        )

    def _draw(self, sequences: list[Growing], logits_BV: Tensor) -> None:
        noise = [float(one.request.noise[one.num_new]) for one in sequences]
        tokens, logprobs = draw(logits_BV, noise, self.temperature)
        for one, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            one.tokens.append(token)
            one.logprobs.append(logprob)
            one.ended = token == self.end
            if one.through:
                self.cache.drop(one.pages)
                one.pages = []
                self._done.append(one)
