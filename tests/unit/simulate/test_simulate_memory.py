"""Memory by hand."""

import numpy as np
import pytest

from equilibra.core.model import MoEModel
from equilibra.simulate.work import dense_activation_bytes, expert_activation_bytes, memory_need

# An expert has 3 * 10 * 20 = 600 weights: 1200 bytes, 2400 of gradient. A token keeps (16 * 10 + 2 * 10) * 2 = 360
# bytes in a layer, a row (2 * 10 + 3 * 20) * 2 = 160.
MODEL = MoEModel(name="m", num_layers=4, hidden=10, expert_ffn=20, num_experts=8, top_k=2, dense_parameters=1000,
                 attention_width=10, outer_parameters=300, embedding_parameters=200)  # fmt: skip
NEED = {"layers": 2, "experts_at_home": 4, "dense_replicas": 5, "expert_replicas": 2, "slots_in_flight": 3,
        "standing_copies": 6, "micro_batches_in_flight": 2, "activation_recompute": True}  # fmt: skip
TOKENS_MR = np.array([[5.0, 5.0], [7.0, 3.0]])
ROWS_LMR = np.array([[[10.0, 10.0], [9.0, 11.0]], [[4.0, 16.0], [12.0, 8.0]]])


def test_activations():
    assert dense_activation_bytes(MODEL) == 360
    assert expert_activation_bytes(MODEL) == 160


def test_with_activation_recompute():
    # dense: 2 * 1000 + 300 + 200 = 2500, experts: 2 * 4 * 600 = 4800 weights.
    # kept inputs: 2 layers * 10 * 2 bytes = 40 a token, 2 micro-batches in flight; the fullest (micro-batch, rank):
    #   (0, 0): 5 * (80 + 360) + 10 * 160 = 3800     (0, 1): 2200 + 16 * 160 = 4760
    #   (1, 0): 7 * 440 + 12 * 160 = 5000            (1, 1): 1320 + 11 * 160 = 3080
    found = memory_need(MODEL, TOKENS_MR, ROWS_LMR, **NEED)
    assert found == {
        "weights": 7300 * 2, "gradients": 7300 * 4, "optimizer": pytest.approx((2500 / 5 + 4800 / 2) * 12),
        "spare_slots": 3 * 3600, "standing_copies": 6 * 3600, "activations_experts": 1920, "activations_other": 3080,
    }  # fmt: skip


def test_without_it_everything_is_kept():
    # (0, 0): 2 * (5 * 360 * 2 + 14 * 160) = 11680   (0, 1): 2 * (3600 + 26 * 160) = 15520
    # (1, 0): 2 * (7 * 720 + 21 * 160) = 16800       (1, 1): 2 * (2160 + 19 * 160) = 10400
    found = memory_need(MODEL, TOKENS_MR, ROWS_LMR, **{**NEED, "activation_recompute": False})
    assert found["activations_experts"] == 2 * 21 * 160
    assert found["activations_other"] == 16800 - 2 * 21 * 160
    assert sum(found.values()) > sum(memory_need(MODEL, TOKENS_MR, ROWS_LMR, **NEED).values())


def test_the_hottest_rank_needs_most():
    even = np.full((1, 1, 4), 100.0)
    hot = np.array([[[400.0, 0, 0, 0]]])
    tokens = np.full((1, 4), 50.0)
    need = [sum(memory_need(MODEL, tokens, rows, **NEED).values()) for rows in (even, hot)]
    assert need[1] - need[0] == 300 * 160
