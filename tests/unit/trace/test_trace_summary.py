import numpy as np
import pytest

from equilibra.core.errors import InputError, TraceFormatError
from equilibra.core.placement import Cluster
from equilibra.trace import count
from equilibra.trace.count import summarize
from equilibra.trace.open import load_trace, save_trace
from equilibra.trace.routing import RoutingTrace


def test_a_worked_example():
    """Four experts on four ranks of two nodes, one layer, top 1; two micro-batches of four tokens."""
    ids = np.array([0, 0, 1, 2, 3, 3, 3, 3], dtype=np.uint8).reshape(8, 1, 1)
    trace = RoutingTrace(ids=ids, offsets=np.array([0, 2, 4, 8]), num_experts=4)
    summary = summarize(trace, Cluster(num_nodes=2, ranks_per_node=2), 4)
    assert summary.microbatches == 2
    assert summary.imbalance_batch == 4 / 2  # ranks get 2, 1, 1, 4
    assert summary.imbalance_microbatch_mean == (2.0 + 4.0) / 2  # 2, 1, 1, 0 and 0, 0, 0, 4
    assert summary.imbalance_microbatch_worst == 4.0
    assert summary.node_imbalance_batch == 5 / 4
    assert summary.node_imbalance_microbatch_mean == (3 / 2 + 2.0) / 2
    assert summary.load_share_of_rank == (0.25, 0.125, 0.125, 0.5)
    assert (summary.tokens, summary.sequences, summary.layers, summary.experts, summary.top_k) == (
        8,
        3,
        1,
        4,
        1,
    )
    assert summary.length_max == 4


def test_only_recorded_tokens_are_load():
    ids = np.array([0, 3, 3, 3], dtype=np.uint8).reshape(4, 1, 1)
    recorded = np.array([True, True, False, False])
    trace = RoutingTrace(ids=ids, offsets=np.array([0, 4]), num_experts=4, recorded=recorded)
    summary = summarize(trace, Cluster(ranks_per_node=2), 100)
    assert summary.imbalance_batch == 1.0
    assert summary.tokens_without_routing == 2
    nothing = RoutingTrace(ids=ids, offsets=np.array([0, 4]), num_experts=4, recorded=np.zeros(4, dtype=np.bool_))
    assert summarize(nothing, Cluster(ranks_per_node=2), 100).imbalance_microbatch_p99 == 1.0


def test_both_formats_and_small_blocks_give_the_same(full_trace, tmp_path, monkeypatch):
    cluster = Cluster(num_nodes=2, ranks_per_node=4)
    expected = summarize(full_trace, cluster, 25)
    assert expected.groups == 2
    assert expected.policy_versions == 2
    monkeypatch.setattr(count, "BLOCK_BYTES", 1)
    for name in ("a.npz", "a.eqtrace"):
        save_trace(full_trace, tmp_path / name)
        assert summarize(load_trace(tmp_path / name), cluster, 25) == expected


def test_experts_must_divide_over_ranks(full_trace):
    with pytest.raises(InputError, match="cannot give 16 experts equal homes on 3 ranks"):
        summarize(full_trace, Cluster(ranks_per_node=3), 25)


@pytest.mark.parametrize("name", ["missing.npz", "file.txt", "folder"])
def test_what_cannot_be_opened(tmp_path, name):
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(TraceFormatError):
        load_trace(tmp_path / name)


def test_what_cannot_be_saved(full_trace, tmp_path):
    with pytest.raises(InputError, match=r"must end in \.npz or \.eqtrace"):
        save_trace(full_trace, tmp_path / "a.txt")
    save_trace(full_trace, tmp_path / "a.eqtrace")
    with pytest.raises(InputError, match="16 experts, not of the 32"):
        load_trace(tmp_path / "a.eqtrace", num_experts=32)


@pytest.mark.parametrize(
    ("ranks", "tokens", "published"),
    [
        (8, 2000, 1.68),
        (8, 8000, 1.58),
        (8, 32_000, 1.54),
        (16, 2000, 2.44),
        (16, 8000, 2.23),
        (16, 32_000, 2.16),
    ],
)
def test_known_imbalance_of_gpt_oss(real_traces, ranks, tokens, published):
    """The known figures; at 32k there are four micro-batches only, and how the last one is cut decides."""
    summary = summarize(load_trace(real_traces / "gpt-oss-20b.npz"), Cluster(ranks_per_node=ranks), tokens)
    assert summary.imbalance_microbatch_mean == pytest.approx(published, abs=0.01 if tokens < 32_000 else 0.07)
