"""All algorithms by name: options, one contract for all, the direction they learn in, and independence of ranks."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, replace
from functools import partial
from threading import Barrier

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equilibra.core.errors import InputError
from equilibra.rl.algorithms import ALGORITHMS, algorithm_named
from equilibra.rl.engine import Sample
from equilibra.rl.loss import Average, Ratio, policy_loss, token_weights, value_loss

NAMES = ["grpo", "gspo", "ppo", "tppo"]


def answer(*windows, reward=0.0, group=0, number=0, finished=True):
    """An answer of these tokens, generated in as many windows."""
    grown = Sample(problem=0, group=group, number=number, prompt=np.array([1, 2]))
    for version, tokens in enumerate(windows):
        grown = grown.grown(
            answer=np.array(tokens, np.int64), logprobs=np.full(len(tokens), -1.0), version=version,
            experts=np.zeros((grown.answer.size + len(tokens) + 1, 1, 1), np.int32),
            finished=finished and version == len(windows) - 1,
        )  # fmt: skip
    return replace(grown, reward=reward)


def alone(array):
    return array


def test_names():
    assert list(ALGORITHMS) == NAMES
    assert [algorithm_named(name).name for name in NAMES] == NAMES
    with pytest.raises(InputError, match="no algorithm is named 'reinforce'; use one of grpo, gspo, ppo, tppo"):
        algorithm_named("reinforce")


def test_options_and_loss_can_be_changed():
    made = algorithm_named(
        "grpo", normalise=False, loss={"average": "sequence-sum-over-max", "clip_high": 0.2, "dual_clip": 3.0}
    )
    assert made.normalise is False
    assert made.loss.average is Average.SEQUENCE_SUM_OVER_MAX
    assert (made.loss.clip_high, made.loss.dual_clip, made.loss.clip_low) == (0.2, 3.0, 0.2)
    kept = algorithm_named("gspo", loss={"clip_low": 0.01}).loss
    assert (kept.clip_low, kept.clip_high, kept.ratio) == (0.01, 4e-4, Ratio.SEQUENCE)  # its own defaults otherwise
    assert algorithm_named("tppo", decay=0.99).decay == 0.99


def test_unknown_options_are_errors():
    with pytest.raises(InputError, match=r"no option of grpo is named 'decay'; use one of normalise, leave_one_out$"):
        algorithm_named("grpo", decay=0.9)
    with pytest.raises(
        InputError, match="no option of the loss of ppo is named 'clip'; use one of clip_low, clip_high"
    ):
        algorithm_named("ppo", loss={"clip": 0.9})
    with pytest.raises(InputError, match="clip_low must be a number more than 0 to 1, not 7"):
        algorithm_named("ppo", loss={"clip_low": 7})


@pytest.mark.parametrize("name", NAMES)
def test_contract(name):
    algorithm = algorithm_named(name)
    samples = [answer([3] * length, reward=float(length % 2), number=length) for length in (1, 4, 2)]
    values = [np.linspace(0, 1, sample.answer.size) for sample in samples] if algorithm.needs_values else None
    targets = algorithm.targets(samples, values, alone)
    assert len(targets) == 3
    for sample, target in zip(samples, targets, strict=True):
        assert algorithm.policy_mask(sample).dtype == algorithm.value_mask(sample).dtype == np.bool_
        assert algorithm.policy_mask(sample).shape == algorithm.value_mask(sample).shape == sample.answer.shape
        assert target.advantages.shape == sample.answer.shape
        assert target.advantages.dtype == np.float64
        assert (target.returns is not None) == algorithm.needs_values == algorithm.value_mask(sample).any()
    assert algorithm.value_clip >= 0
    with pytest.raises(FrozenInstanceError):
        algorithm.loss = None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_good_answers_become_more_likely_by_hand(name, sign):
    """Four answers of one token; the third is rewarded, or punished."""
    algorithm = algorithm_named(name)
    samples = [answer([token], reward=sign * (token == 2), number=token) for token in range(4)]
    values = [np.array([sign / 4])] * 4 if algorithm.needs_values else None
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    new = logits.log_softmax(0)
    advantages = np.concatenate([target.advantages for target in algorithm.targets(samples, values, alone)])
    weights = np.concatenate(token_weights([algorithm.policy_mask(s) for s in samples], algorithm.loss, alone, 1))
    policy_loss(
        new, new.detach(), torch.from_numpy(advantages), torch.from_numpy(weights), torch.arange(4), algorithm.loss
    ).loss.backward()
    # rewards minus their mean are ¾ and -¼; divided by √(¾ / 3) in a group, by √(¾ / 4) over all tokens. Advantages
    # add up to 0, so the gradient of -¼ Σ A_t log softmax_t by logit k is -A_k / 4
    std = (0.75 / (4 if algorithm.needs_values else 3)) ** 0.5
    wanted = [sign * ((token == 2) - 0.25) / (std + 1e-6) for token in range(4)]
    assert advantages.tolist() == pytest.approx(wanted)
    assert (-4 * logits.grad).tolist() == pytest.approx(wanted)


def on_ranks(works):
    """What each work returns when all run at once; each gets a `total` that sums over them."""
    barrier, parts = Barrier(len(works), timeout=20), [np.zeros(0)] * len(works)

    def total(rank, array):
        parts[rank] = array
        barrier.wait()
        whole = np.sum(parts, axis=0)
        barrier.wait()
        return whole

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(lambda rank: works[rank](partial(total, rank)), range(len(works))))


def trained(algorithm, samples, numbers, total):
    """Sums of losses and statistics of a rank, and the gradient of each of its answers."""
    values = [numbers[s.number]["values"] for s in samples] if algorithm.needs_values else None
    targets = algorithm.targets(samples, values, total)
    weights = token_weights([algorithm.policy_mask(s) for s in samples], algorithm.loss, total, 7)
    value_weights = token_weights([algorithm.value_mask(s) for s in samples], algorithm.loss, total, 7)
    sums, gradients = np.zeros(5), {}
    for micro_batch in (range(0, len(samples), 2), range(1, len(samples), 2)):  # also an empty one

        def flat(arrays, micro_batch=micro_batch):
            return torch.from_numpy(np.concatenate([np.zeros(0), *(arrays[i] for i in micro_batch)]))

        new = flat([numbers[s.number]["new"] for s in samples]).requires_grad_()
        sequence = torch.tensor([n for n, i in enumerate(micro_batch) for _ in samples[i].answer], dtype=torch.int64)
        found = policy_loss(
            new, flat([s.logprobs for s in samples]), flat([t.advantages for t in targets]), flat(weights), sequence,
            algorithm.loss,
        )  # fmt: skip
        loss = found.loss
        if algorithm.needs_values:
            old, returns = flat(values), flat([t.returns for t in targets])
            loss = loss + value_loss(new + 1, old, returns, flat(value_weights), algorithm.value_clip)
        loss.backward()
        sums += [loss.item(), *(getattr(found, name).item() for name in ("policy", "kl", "clipped", "weight"))]
        lengths = [samples[i].answer.size for i in micro_batch]
        split = new.grad.split(lengths) if lengths else ()
        gradients |= {samples[i].number: part.tolist() for i, part in zip(micro_batch, split, strict=True)}
    return sums, gradients


def world_of(name, seed):
    """Six groups of three answers, some unfinished where that is allowed, and numbers for their tokens."""
    random = np.random.default_rng(seed)
    windowed = algorithm_named(name).windowed
    samples = [
        answer(
            *([3] * int(random.integers(0, 5)) for _ in range(1 + windowed)),
            reward=float(random.integers(0, 3)), group=number // 3, number=number,
            finished=not windowed or bool(random.integers(0, 2)),
        )
        for number in range(18)
    ]  # fmt: skip
    numbers = [
        {"new": -1 + 0.4 * random.standard_normal(s.answer.size), "values": random.standard_normal(s.answer.size)}
        for s in samples
    ]
    return samples, numbers


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(NAMES), st.sampled_from(Average), st.integers(0, 99), st.integers(1, 4),
    st.lists(st.integers(0, 3), min_size=6, max_size=6),
)  # fmt: skip
def test_nothing_depends_on_how_samples_are_spread(name, average, seed, num_ranks, rank_of_group):
    algorithm = algorithm_named(name, loss={"average": average})
    samples, numbers = world_of(name, seed)
    wanted, gradients = trained(algorithm, samples, numbers, alone)
    own = [[s for s in samples if rank_of_group[s.group] % num_ranks == rank] for rank in range(num_ranks)]
    results = on_ranks([partial(trained, algorithm, part, numbers) for part in own])
    assert sum(sums for sums, _ in results) == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    together = {number: gradient for _, part in results for number, gradient in part.items()}
    assert together.keys() == gradients.keys()
    assert all(together[number] == pytest.approx(gradients[number], rel=1e-9, abs=1e-12) for number in gradients)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_do_not_sum_get_another_loss(name):
    """What the property above would catch: averages of each rank by itself."""
    algorithm = algorithm_named(name)
    samples, numbers = world_of(name, 0)
    wanted, _ = trained(algorithm, samples, numbers, alone)
    parts = [trained(algorithm, part, numbers, alone)[0] for part in (samples[:3], samples[3:])]
    assert abs(sum(parts)[0] - wanted[0]) > 1e-3
