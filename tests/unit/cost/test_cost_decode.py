"""Decode laws by hand, their shape, and which models they refuse."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equilibra.core.errors import InputError
from equilibra.core.model import MODELS, MoEModel, model_named
from equilibra.cost import decode
from equilibra.cost.decode import Context, DecodeLaw, decode_law, load_law
from equilibra.cost.presets import prices_named
from equilibra.cost.prices import ExpertLaw

LAW = DecodeLaw(
    source="round numbers", attention_fixed_us=10.0, weight_gb_per_s=1000.0, dense_tflops=100.0, cache_gb_per_s=1000.0,
    score_tflops=100.0, sequence_us=0.5, reduce_us=7.0, transfer_us=5.0,
    experts=ExpertLaw(fixed_us=3.0, weight_gb_per_s=1000.0, row_gb_per_s=0.0, tflops=100.0),
)  # fmt: skip
MODEL = MoEModel(
    name="round", num_layers=2, hidden=1000, expert_ffn=1000, num_experts=10, top_k=2, dense_parameters=5_000_000,
    num_heads=8, cache_heads=2, cache_values=500, score_width=1000, outer_parameters=2_000_000,
)  # fmt: skip
PRICES = prices_named("h200")


def attention(model=MODEL, *, batch=1.0, context=100.0, tensor=1, nodes=1, deviation=0.0, law=LAW):
    about = Context(mean=context, deviation=deviation)
    return float(decode.attention_us(model, law, PRICES, about, batch=batch, tensor=tensor, nodes=nodes))


def experts(*, tokens, nodes=1, tensor=1, imbalance=1.0):
    return float(decode.experts_us(MODEL, LAW, PRICES, tokens=tokens, nodes=nodes, tensor=tensor, imbalance=imbalance))


def test_attention_by_hand():
    # weights 10 MB at 1 GB/ms: 10 us; cache 100 tokens x 1000 B: 0.1 us; 0.5 us for the sequence; 10 us fixed
    assert attention() == pytest.approx(10 + 10 + 0.1 + 0.5)
    # 1000 sequences: products 2 x 1000 x 5e6 = 1e10 FLOP: 100 us; cache 100 us; scores 4 x 1e5 x 1000: 4 us
    assert attention(batch=1000.0) == pytest.approx(10 + 100 + 100 + 500)


def test_scores_of_a_latent_wait_for_products():
    latent = replace(MODEL, cache_heads=1, score_width=100_000)
    # scores 4 x 1e5 tokens x 1e5 = 4e10 FLOP: 400 us, more than the 100 us of its cache
    assert attention(latent, batch=1000.0) - attention(batch=1000.0) == pytest.approx(300)


def test_tensor_parallelism_divides_heads_and_adds_a_reduction():
    ring = 2 * 3 / 4 * 1000 * 2000 * 1e-3 / PRICES.nvlink_gb_per_s
    # of 2 key-value heads, four ranks hold two copies
    assert attention(batch=1000.0, tensor=4) == pytest.approx(10 + 25 + 50 + 500 + 7 + ring)
    latent = replace(MODEL, cache_heads=1)
    assert attention(latent, batch=1000.0, tensor=4) == pytest.approx(10 + 25 + 100 + 500 + 7 + ring)


def test_the_fullest_node_sets_the_pace():
    assert attention(batch=100.0, deviation=50.0) == attention(batch=100.0)  # one node has the mean, over time
    more = attention(batch=100.0, deviation=50.0, nodes=8) - attention(batch=100.0, nodes=8)
    assert more == pytest.approx(50 * np.sqrt(2 * np.log(8) * 100) * 1e-3)


def test_the_fullest_node_is_about_what_random_ones_show():
    rng = np.random.default_rng(0)
    tokens = rng.normal(100, 50, (4000, 8, 64)).sum(axis=2).max(axis=1).mean()
    said = decode.slowest_tokens(Context(mean=100, deviation=50), 64.0, 8.0)
    assert tokens == pytest.approx(said, rel=0.05)
    assert said >= tokens


def test_experts_by_hand():
    # one token: 2 of 10 experts, 12 MB of 6 MB each: 12 us; 2 rows x 6 MFLOP: 0.12 us
    assert experts(tokens=1.0) == pytest.approx(3 + 12)
    # many tokens: all 10 experts, 60 us; 2e5 rows x 6 MFLOP = 1.2e12: 12000 us
    assert experts(tokens=1e5) == pytest.approx(3 + 12_000)
    assert experts(tokens=1e5, nodes=5) == pytest.approx(3 + 2400)
    assert experts(tokens=1e5, nodes=5, imbalance=1.5) == pytest.approx(3 + 3600)


def test_active_experts_and_nodes_are_those_of_random_tokens():
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((20_000, 10)), axis=1)[:, :2]
    for nodes in (1, 2, 5, 10):
        node = chosen * nodes // 10
        reached = 1 + (node[:, 0] != node[:, 1]).mean()
        assert float(decode.nodes_of_token(MODEL, nodes)) == pytest.approx(reached, rel=0.02)
    batches = chosen.reshape(5000, 4, 2)
    active = np.mean([len(set(batch.ravel().tolist())) for batch in batches])
    assert (experts(tokens=4.0) - 3) / 6 == pytest.approx(active, rel=0.02)


def test_where_two_waits_are_close_both_count():
    bent = replace(LAW, attention_bend=2.0, expert_bend=2.0)
    assert decode.larger(3.0, 4.0, 2.0) == pytest.approx(5)
    assert decode.larger(3.0, 4.0, decode.SHARP) == 4
    assert decode.larger(0.0, 0.0, 2.0) == 0
    # weights 10 us and products 100 us; cache 100 us and scores 4 us
    assert attention(batch=1000.0, law=bent) == pytest.approx(510 + np.hypot(10, 100) + np.hypot(100, 4))


def test_factors_of_shapes():
    cache = replace(LAW, factor_of_cache={"2x500": 1.5})
    assert attention(batch=1000.0, law=cache) - attention(batch=1000.0) == pytest.approx(50)
    slow = replace(LAW, factor_of_experts={"1000x1000": 2.0})
    twice = decode.experts_us(MODEL, slow, PRICES, tokens=1e5, nodes=1, tensor=1, imbalance=1.0)
    assert float(twice) == pytest.approx(3 + 24_000)


def test_transfers_wait_for_the_slower_link():
    assert decode.transfer_us(5.0, (1e6, 10.0), (1e6, 50.0)) == pytest.approx(5 + 100)
    assert decode.transfer_us(5.0, (1e6, 10.0), (1e7, 50.0)) == pytest.approx(5 + 200)


def test_windowed_layers_keep_their_window():
    half = replace(MODEL, quadratic_share=0.5, window=128)
    assert decode.cached_tokens(half, 1000.0, 1.0) == 500 + 64
    assert decode.cached_tokens(half, 50.0, 1.0) == 50
    assert decode.cached_tokens(MODEL, 1000.0, 1.0) == 1000


@given(
    name=st.sampled_from([name for name in MODELS if name != "qwen3-next"]), tensor=st.sampled_from([1, 2, 8]),
    nodes=st.integers(1, 32), mean=st.floats(1, 1e5), spread=st.floats(0, 3), batch=st.integers(1, 5000),
    bend=st.floats(1, 64),
)  # fmt: skip
def test_times_per_sequence_fall_with_the_batch(name, tensor, nodes, mean, spread, batch, bend):
    """What the search relies on."""
    model, law = model_named(name), replace(decode_law(PRICES), attention_bend=bend, expert_bend=bend)
    about = Context(mean=mean, deviation=spread * mean)
    sides = {"tensor": tensor, "nodes": nodes}
    b = np.array([batch, batch + 1, batch * 2], np.float64)
    times = (
        decode.attention_us(model, law, PRICES, about, batch=b, **sides),
        decode.outer_us(model, law, about, batch=b, **sides),
        decode.experts_us(model, law, PRICES, tokens=b * 3, nodes=min(nodes, model.num_experts), tensor=tensor,
                          imbalance=1.3),
    )  # fmt: skip
    for us in times:
        assert (np.diff(us) >= -1e-9 * us[0]).all()
        assert (np.diff(us / b) <= 1e-9 * us[0]).all()


def test_models_without_a_law_are_refused():
    for name in MODELS:
        if name != "qwen3-next":
            decode.check_decodes(model_named(name))
    with pytest.raises(InputError, match="qwen3-next: 75% of its layers are linear"):
        decode.check_decodes(model_named("qwen3-next"))
    with pytest.raises(InputError, match="its attention is unknown"):
        decode.check_decodes(replace(MODEL, num_heads=0))


def test_other_devices_follow_the_h200():
    h200, h20 = decode_law(prices_named("h200")), decode_law(prices_named("h20"))
    assert h20.cache_gb_per_s == pytest.approx(h200.cache_gb_per_s * 4096 / 4800)
    assert h20.dense_tflops == pytest.approx(h200.dense_tflops * 148 / 989)
    assert h20.experts.weight_gb_per_s == pytest.approx(h200.experts.weight_gb_per_s * 4096 / 4800)
    assert h20.attention_fixed_us == h200.attention_fixed_us
    assert decode_law(prices_named("h200"), LAW) is LAW


def test_laws_as_files(tmp_path):
    import json

    path = tmp_path / "law.json"
    for said in (asdict(LAW), {"law": asdict(LAW), "errors": {}}):
        path.write_text(json.dumps(said))
        assert load_law(path) == LAW
    bad = {**asdict(LAW), "more": 1}
    for text, message in (("{", "cannot read"), ("[]", "must hold keys"), (json.dumps(bad), "unknown key 'more'"),
                          ('{"law": 3}', "must be a table with a table experts"), ("{}", "a table experts"),
                          (json.dumps({**asdict(LAW), "reduce_us": -1}), "reduce_us must be"),
                          (json.dumps({**asdict(LAW), "cache_gb_per_s": 0}), "cache_gb_per_s must be"),
                          (json.dumps({**asdict(LAW), "attention_bend": 0.5}), "attention_bend must be"),
                          (json.dumps({**asdict(LAW), "factor_of_cache": 3}), "factors must be a table"),
                          (json.dumps({**asdict(LAW), "factor_of_cache": {"a": -1}}), "factor of a must be"),
                          (json.dumps({**asdict(LAW), "experts": {"tflop": 1}}), "experts: unknown key 'tflop'"),
                          (json.dumps({**asdict(LAW), "experts": {"tflops": 1}}), "missing")):  # fmt: skip
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            load_law(path)
    with pytest.raises(InputError, match="cannot read"):
        load_law(tmp_path / "none.json")
