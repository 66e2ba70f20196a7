"""Continuous batching: every request is answered once and in full, with any number of pages and places."""

import numpy as np
import pytest
import torch

from equilibra.rl.engine import Request
from equilibra.rollout.pages import PagedCache
from equilibra.rollout.scheduler import Growing, Scheduler

VOCABULARY, LAYERS, TOP_K, END = 50, 2, 3, 7


def logits_of(tokens):
    """A model: the next token depends on all tokens so far."""
    return torch.from_numpy(np.random.default_rng(list(tokens)).normal(size=VOCABULARY))


def experts_of(tokens, at):
    return np.random.default_rng([*tokens[: at + 1], 1]).integers(0, 9, (LAYERS, TOP_K)).astype(np.int32)


def expected(request):
    """The answer, its experts, and whether it ended, of one request alone."""
    tokens, new = request.tokens.tolist(), []
    for noise in request.noise:
        sums = logits_of(tokens).softmax(0).cumsum(0)
        token = int(torch.searchsorted(sums, sums[-1:] * float(noise), right=True))
        tokens, new = [*tokens, token], [*new, token]
        if token == END:
            break
    return new, np.stack([experts_of(tokens, at) for at in range(len(tokens) - 1)])


def requests(count=12, seed=0):
    random = np.random.default_rng(seed)
    prompts = [random.integers(10, VOCABULARY, random.integers(1, 9)) for _ in range(4)]
    return [
        Request(tokens=prompts[random.integers(4)], noise=random.random(random.integers(1, 12))) for _ in range(count)
    ]


def run(asked, *, pages=100, page=4, micro_batches=2, places=6, prefill=5, sabotage=None, seed=0):
    """Run the scheduler with a made-up model: passes of micro-batches end in random order."""
    random = np.random.default_rng(seed)
    cache = PagedCache(pages, page, dtype=torch.float64, device=torch.device("cpu"))
    scheduler = Scheduler(cache, micro_batches=micro_batches, places=places, prefill_tokens=prefill, end=END)
    scheduler.add([Growing.of(number, request) for number, request in enumerate(asked)])
    flights, done = {}, {}
    for _ in range(5000):
        for number in range(micro_batches):
            if number not in flights and scheduler.busy:
                batch = scheduler.next_batch(number, flights)
                if batch is not None:
                    assert sum(batch.sizes) <= max(prefill, places)
                    view = batch.cache
                    key = torch.zeros(len(batch.sizes), 1, max(batch.sizes), 1).double()
                    for row, (one, size) in enumerate(zip(batch.sequences, batch.sizes, strict=True)):
                        key[row, 0, :size, 0] = torch.tensor(one.tokens[one.cached : one.cached + size])
                    flights[number] = batch, view.update(key, key, 0)[0]
        assert scheduler.num_running <= places
        assert flights or scheduler._done or not scheduler.busy, "nobody can go on"
        if flights:
            number = random.choice(list(flights))
            batch, keys = flights.pop(number)
            logits, experts = [], []
            for row, (one, size) in enumerate(zip(batch.sequences, batch.sizes, strict=True)):
                known = keys[row, 0, : one.cached + size, 0].long().tolist()
                assert known == one.tokens[: one.cached + size], "a sequence sees keys that are not its own"
                logits.append(logits_of(known))
                experts.append(np.stack([experts_of(known, at) for at in range(one.cached, one.cached + size)]))
            if sabotage:
                sabotage(scheduler)
            scheduler.finish(batch, torch.stack(logits), experts)
        for one in scheduler.take_done():
            assert one.number not in done
            done[one.number] = one.generation(3)
        if not scheduler.busy:
            break
    scheduler._forget_prompts(0)
    assert cache.num_free == pages, "pages are lost"
    assert not scheduler._waiting_of_prompt, "prompts that nobody waits for are kept"
    return done, scheduler


def check(asked, done):
    assert sorted(done) == list(range(len(asked)))
    for number, request in enumerate(asked):
        tokens, experts = expected(request)
        assert done[number].tokens.tolist() == tokens
        assert np.array_equal(done[number].experts, experts)
        assert done[number].ended == (tokens[-1] == END)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("pages", [100, 9, 5])
def test_every_request_gets_its_own_answer(micro_batches, pages):
    for seed in range(4):
        asked = requests(seed=seed)
        done, scheduler = run(asked, pages=pages, micro_batches=micro_batches, seed=seed)
        check(asked, done)
    assert pages != 5 or scheduler.num_preempted > 0


def test_long_prompts_are_processed_in_pieces():
    random = np.random.default_rng(3)
    asked = [Request(tokens=random.integers(10, 50, 23), noise=random.random(3)) for _ in range(3)]
    done, _ = run(asked, prefill=4)
    check(asked, done)


def test_the_prefill_of_a_prompt_is_shared():
    random = np.random.default_rng(4)
    prompt = random.integers(10, 50, 9)
    asked = [Request(tokens=prompt, noise=random.random(4)) for _ in range(8)]
    passes = []
    done, _ = run(asked, places=8, sabotage=lambda scheduler: passes.append(scheduler.num_running))
    check(asked, done)
    assert passes[0] == 1, "only one of them prefills"


def test_a_kept_prompt_that_fills_the_cache_needs_no_further_page():
    prompt = np.arange(10, 18)
    asked = [Request(tokens=prompt, noise=np.full(1, level)) for level in (0.2, 0.5, 0.8)]
    done, _ = run(asked, pages=2, page=4)
    check(asked, done)


def test_a_lost_page_is_noticed():
    """Control."""
    asked = requests()

    def steal(scheduler):
        scheduler.cache._free = scheduler.cache._free[1:]

    with pytest.raises(AssertionError):
        run(asked, sabotage=steal)


def test_a_sequence_set_aside_without_its_keys_is_noticed(monkeypatch):
    """Control."""
    monkeypatch.setattr(PagedCache, "restore", lambda *_: None)
    with pytest.raises(AssertionError, match="not its own"):
        run(requests(24), pages=5)
