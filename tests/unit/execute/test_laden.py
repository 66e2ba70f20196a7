"""Rows with a number each: both arrive as they left, whatever the width and the type."""

import pytest

torch = pytest.importorskip("torch")

from equilibra.execute.moe import ALIGNED, Laden  # noqa: E402

T, K = 6, 3


@pytest.mark.parametrize("travels", [True, False])
@pytest.mark.parametrize("width", [1, 5, 8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_and_numbers_there_and_back(dtype, width, travels):
    torch.manual_seed(0)
    tokens, weights = torch.randn(T, width).to(dtype), torch.rand(T, K)
    row_of_pair = torch.randperm(T * K).view(T, K)
    token_of_row = torch.empty(T * K, dtype=torch.int64)
    token_of_row[row_of_pair] = torch.arange(T)[:, None].expand(T, K)
    laden = Laden.empty(T * K, width, tokens, travels=travels)
    laden.fill(tokens, lambda: token_of_row, row_of_pair.int(), weights)
    exchanged = []

    def exchange(every):
        exchanged.append(every.is_contiguous() and every.shape[1] * every.itemsize % ALIGNED == 0)
        return every.clone()

    arrived = laden.sent(exchange)
    assert exchanged == ([True] if travels else [])
    assert torch.equal(arrived.rows_ND, tokens[token_of_row])
    assert torch.equal(arrived.numbers_N[row_of_pair].float(), weights)  # to the bit, also beside rows of 16 bits
    pairs = torch.empty(T, K)
    total = arrived.sum_of_choices(row_of_pair.int(), pairs)
    assert torch.equal(pairs, weights)
    assert torch.allclose(total.double(), tokens.double() * K, rtol=0.02 if dtype == torch.bfloat16 else 1e-6)


def test_numbers_of_other_pairs_are_noticed():
    tokens, row_of_pair = torch.ones(2, 4), torch.tensor([[0, 1], [2, 3]])
    laden = Laden.empty(4, 4, tokens, travels=True)
    laden.fill(tokens, lambda: torch.tensor([0, 0, 1, 1]), row_of_pair, torch.tensor([[1.0, 2], [3, 4]]))
    pairs = torch.empty(2, 2)
    laden.sum_of_choices(row_of_pair.flip(0), pairs)
    assert pairs.tolist() == [[3, 4], [1, 2]]
