from dataclasses import replace

import numpy as np
import pytest

from equilibra.core.errors import InputError
from equilibra.core.placement import Cluster
from equilibra.trace import routing
from equilibra.trace.count import require_distinct_experts, sequence_loads, summarize
from equilibra.trace.open import load_trace
from equilibra.trace.synth import SynthKnobs, SynthShape, fit_knobs, synthesize, synthesize_loads, synthetic_recording

SIZE = SynthShape(num_prompts=24, answers_per_prompt=8, num_layers=8, num_experts=64, top_k=6)
KNOBS = SynthKnobs(median_length=300, max_length=2000)


def popularity(trace):
    return sequence_loads(trace).tokens_SLE.sum(axis=0).ravel().astype(float)


def correlation(a, b):
    return float(np.corrcoef(a, b)[0, 1])


def test_the_same_arguments_give_the_same_trace_however_it_is_read(monkeypatch, same):
    trace = synthesize(SIZE, KNOBS, seed=5, step=2)
    monkeypatch.setattr(routing, "PIECE_BYTES", 48 * 1000)
    pieces = list(synthetic_recording(SIZE, KNOBS, seed=5, step=2).pieces())
    assert len(pieces) > 10
    assert np.array_equal(np.concatenate([piece.ids for piece in pieces]), trace.ids)
    assert not np.array_equal(synthesize(SIZE, KNOBS, seed=6, step=2).ids[:1000], trace.ids[:1000])


def test_tokens_go_to_different_experts_even_when_one_has_all_the_weight():
    size = SynthShape(num_prompts=2, answers_per_prompt=2, num_layers=3, num_experts=8, top_k=7)
    for skew in (0.0, 1.0, 20.0):
        require_distinct_experts(synthesize(size, replace(KNOBS, popularity_skew=skew, sequence_noise=skew)))


def test_draws_follow_the_weights_without_replacement():
    """Three experts of weights 1, 2, 3 and top 2: chances known by hand."""
    from equilibra.trace.sampling import draw_ids

    ids = np.empty((200_000, 1, 2), dtype=np.uint8)
    draw_ids(ids, np.array([0, len(ids)]), 0, 1, np.array([0]), np.log([[1.0, 2.0, 3.0]]), 0.0, 0.0, 3)
    pairs = np.bincount(ids[:, 0, 0] * 3 + ids[:, 0, 1], minlength=9) / len(ids)
    expected = [
        0,
        1 / 6 * 2 / 5,
        1 / 6 * 3 / 5,
        2 / 6 * 1 / 4,
        0,
        2 / 6 * 3 / 4,
        3 / 6 * 1 / 3,
        3 / 6 * 2 / 3,
        0,
    ]
    assert np.allclose(pairs, expected, atol=0.005)


def test_popularity_skew_and_noise_make_imbalance():
    flat = replace(KNOBS, popularity_skew=0.0, sequence_noise=0.0)
    cluster = Cluster(ranks_per_node=8)
    values = [
        summarize(synthesize(SIZE, replace(flat, popularity_skew=skew)), cluster, 4000).imbalance_batch
        for skew in (0.0, 0.5, 1.0)
    ]
    assert values[0] < 1.02
    assert values[0] + 0.1 < values[1] < values[2] - 0.1
    noisy = summarize(synthesize(SIZE, replace(flat, sequence_noise=1.0)), cluster, 4000)
    assert noisy.imbalance_microbatch_mean > noisy.imbalance_batch + 0.1


def test_drift_fades_popularity_slowly():
    knobs = replace(KNOBS, sequence_noise=0.0, drift=0.3)
    start = popularity(synthesize(SIZE, knobs, seed=1, step=0))
    near = correlation(start, popularity(synthesize(SIZE, knobs, seed=1, step=1)))
    far = correlation(start, popularity(synthesize(SIZE, knobs, seed=1, step=10)))
    assert 0.85 < near < 0.99
    assert 0.3 < far < near - 0.1
    frozen = replace(knobs, drift=0.0)
    assert correlation(start, popularity(synthesize(SIZE, frozen, seed=1, step=10))) > 0.99
    forgotten = replace(knobs, drift=1.0)
    assert abs(correlation(start, popularity(synthesize(SIZE, forgotten, seed=1, step=1)))) < 0.2


def test_lengths_have_the_median_the_tail_and_the_cut():
    size = replace(SIZE, num_prompts=400, num_layers=1)
    lengths = synthesize_loads(size, SynthKnobs(median_length=500, length_tail=0.7, max_length=3000)).length_of_sequence
    assert np.median(lengths) == pytest.approx(500, rel=0.05)
    assert np.log(lengths).std() == pytest.approx(0.7, rel=0.06)
    assert lengths.max() == 3000


def test_last_tokens_may_be_unrecorded():
    trace = synthesize(SIZE, KNOBS, record_last_token=False)
    assert trace.tokens_without_routing == trace.num_sequences
    assert not trace.recorded[trace.offsets[1:] - 1].any()


@pytest.mark.parametrize("top_k", [1, 2, 6, 64])
def test_loads_without_tokens_have_the_distribution_of_loads_with_tokens(top_k):
    size = replace(SIZE, num_prompts=250 if top_k < 64 else 10, num_layers=2, top_k=top_k)
    knobs = SynthKnobs(median_length=900, length_tail=0.0, sequence_noise=0.0, popularity_skew=0.8)
    fast = synthesize_loads(size, knobs, seed=4).tokens_SLE.astype(float)
    exact = sequence_loads(synthesize(size, knobs, seed=4)).tokens_SLE.astype(float)
    assert (fast.sum(axis=-1) == 900 * top_k).all()
    assert fast.max() <= 900
    assert np.abs(fast.mean(axis=0) - exact.mean(axis=0)).sum() < 0.03 * exact.mean(axis=0).sum()
    by_rank = [loads.reshape(len(loads), 2, 8, 8).sum(axis=-1) for loads in (fast, exact)]
    assert by_rank[0].var(axis=0).sum() == pytest.approx(by_rank[1].var(axis=0).sum(), rel=0.12)


def test_short_sequences_are_drawn_exactly():
    knobs = SynthKnobs(median_length=40, length_tail=0.5)
    fast, exact = synthesize_loads(SIZE, knobs, seed=2), sequence_loads(synthesize(SIZE, knobs, seed=2))
    assert np.array_equal(fast.tokens_SLE, exact.tokens_SLE)


def test_loads_of_very_skewed_weights_end():
    size = SynthShape(num_prompts=4, answers_per_prompt=4, num_layers=4, num_experts=32, top_k=8)
    loads = synthesize_loads(size, SynthKnobs(popularity_skew=20.0, sequence_noise=5.0))
    assert (loads.tokens_SLE.sum(axis=-1) == 8 * loads.length_of_sequence[:, None]).all()


@pytest.mark.parametrize(
    "changes",
    [{"popularity_skew": -1.0}, {"drift": 1.1}, {"group_correlation": float("nan")}, {"max_length": 0}],
)
def test_knobs_out_of_range_are_refused(changes):
    with pytest.raises(InputError, match=next(iter(changes))):
        replace(KNOBS, **changes)


@pytest.mark.parametrize("changes", [{"top_k": 65}, {"num_prompts": 0}, {"num_experts": 10**6}, {"num_prompts": 10**7}])
def test_sizes_out_of_range_are_refused(changes):
    with pytest.raises(InputError):
        replace(SIZE, **changes)


def test_a_negative_seed_is_refused():
    with pytest.raises(InputError, match="negative"):
        synthesize(SIZE, KNOBS, seed=-1)


@pytest.mark.parametrize("experts_and_k", [(32, 4), (128, 8)])
@pytest.mark.parametrize(
    "knobs",
    [
        SynthKnobs(popularity_skew=0.7, sequence_noise=0.8, group_correlation=0.4),
        SynthKnobs(popularity_skew=1.2, sequence_noise=0.3, group_correlation=0.8),
        SynthKnobs(popularity_skew=0.3, sequence_noise=1.0, group_correlation=0.1),
        SynthKnobs(popularity_skew=0.5, sequence_noise=0.0, group_correlation=0.0),
    ],
)
def test_the_fit_finds_the_knobs(knobs, experts_and_k):
    knobs = replace(knobs, median_length=300, length_tail=0.5, max_length=1500)
    size = replace(SIZE, num_prompts=32, num_layers=16, num_experts=experts_and_k[0], top_k=experts_and_k[1])
    fit = fit_knobs(synthesize(size, knobs, seed=3, record_last_token=False), drift=knobs.drift)
    assert fit.popularity_skew == pytest.approx(knobs.popularity_skew, rel=0.08)
    assert fit.sequence_noise == pytest.approx(knobs.sequence_noise, rel=0.05, abs=0.05)
    if knobs.sequence_noise > 0:
        assert fit.group_correlation == pytest.approx(knobs.group_correlation, abs=0.03)
    assert fit.median_length == pytest.approx(300, rel=0.15)
    assert fit.length_tail == pytest.approx(0.5, rel=0.15)


def test_the_fit_does_without_groups_and_with_one_sequence():
    trace = synthesize(SIZE, KNOBS, seed=3)
    bare = routing.RoutingTrace(ids=trace.ids, offsets=trace.offsets, num_experts=64)
    assert fit_knobs(bare, answers_per_prompt=8) == fit_knobs(trace)
    single = routing.RoutingTrace(ids=trace.ids, offsets=np.array([0, trace.num_tokens]), num_experts=64)
    assert fit_knobs(single).popularity_skew > 0.5
    with pytest.raises(InputError, match="at least 2"):
        fit_knobs(routing.RoutingTrace(ids=trace.ids[:1], offsets=np.array([0, 1]), num_experts=64))


def shuffled(trace, seed):
    """The same routing with the experts of each layer renumbered at random: the generator knows no order."""
    rng = np.random.default_rng(seed)
    ids = np.empty_like(trace.ids)
    for layer in range(trace.num_layers):
        ids[:, layer] = rng.permutation(trace.num_experts).astype(ids.dtype)[trace.ids[:, layer]]
    return routing.RoutingTrace(ids=ids, offsets=trace.offsets, num_experts=trace.num_experts)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "dsv2-lite-law", "dsv2-lite-intent"])
def test_fitted_synthetic_routing_is_as_unbalanced_as_the_real_one(real_traces, name):
    real = load_trace(real_traces / f"{name}.npz")
    knobs = fit_knobs(real, answers_per_prompt=4)
    size = SynthShape(
        num_prompts=max(1, real.num_sequences // 4),
        answers_per_prompt=4,
        num_layers=real.num_layers,
        num_experts=real.num_experts,
        top_k=real.top_k,
    )
    cluster = Cluster(ranks_per_node=8)

    def figures(trace):
        summary = summarize(trace, cluster, 2000)
        return summary.imbalance_batch, summary.imbalance_microbatch_mean

    made = np.mean([figures(synthesize(size, knobs, seed=seed)) for seed in range(4)], axis=0)
    renumbered = np.mean([figures(shuffled(real, seed)) for seed in range(4)], axis=0)
    assert made == pytest.approx(renumbered, rel=0.07)
    assert made == pytest.approx(np.array(figures(real)), rel=0.15)
