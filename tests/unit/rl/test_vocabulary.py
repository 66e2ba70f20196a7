"""Log-probabilities in chunks: the numbers and gradients of all logits at once, in bounded memory."""

import pytest
import torch
from torch import nn

from equilibra.rl.vocabulary import chunk_of, token_logprobs

N, D, V = 23, 8, 50


def at_once(head, hidden_ND, targets_N, temperature):
    """What the chunks must agree with."""
    logs = (head(hidden_ND) / temperature).log_softmax(dim=-1)
    return logs.gather(1, targets_N[:, None])[:, 0], -(logs.exp() * logs).sum(dim=-1)


def case(dtype, tokens=N, bias=True):
    torch.manual_seed(4)
    head = nn.Linear(D, V, bias=bias).to(dtype)
    return head, torch.randn(tokens, D, dtype=dtype, requires_grad=True), torch.randint(0, V, (tokens,))


def gradients(made, head, hidden):
    weights = torch.linspace(-1, 2, len(hidden), dtype=made[0].dtype)
    loss = (weights * made[0]).sum() + 0.3 * (weights.square() * made[1]).sum()
    return torch.autograd.grad(loss, [hidden, *head.parameters()])


@pytest.mark.parametrize("chunk", [1, 5, 23, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_change_nothing(chunk, temperature):
    head, hidden, targets = case(torch.float64)
    found = token_logprobs(head, hidden, targets, list(head.parameters()), temperature=temperature, chunk=chunk)
    expected = at_once(head, hidden, targets, temperature)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
    for one, other in zip(gradients(found, head, hidden), gradients(expected, head, hidden), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
        assert other.abs().max() > 1e-2


def test_no_tokens_and_no_gradients():
    head, hidden, targets = case(torch.float32, tokens=0)
    found = token_logprobs(head, hidden, targets, list(head.parameters()), temperature=1.0, chunk=4)
    assert [part.shape for part in found] == [(0,), (0,)]
    assert all((part == 0).all() for part in gradients(found, head, hidden))  # zeros, not None: ranks sum them
    head, hidden, targets = case(torch.float32)
    with torch.no_grad():
        assert not token_logprobs(head, hidden, targets, [], temperature=1.0, chunk=4)[0].requires_grad
    head.requires_grad_(requires_grad=False)
    logprobs, _ = token_logprobs(head, hidden, targets, list(head.parameters()), temperature=1.0, chunk=4)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert head.weight.grad is None


def test_gradients_of_a_bfloat16_head_are_summed_in_float32():
    """Many chunks must not lose more than one: each is rounded, the sum is not."""
    head, hidden, targets = case(torch.bfloat16, tokens=512, bias=False)
    exact, inputs = nn.Linear(D, V, bias=False).double(), hidden.detach().double().requires_grad_()
    exact.load_state_dict(head.state_dict())
    expected = gradients(at_once(exact, inputs, targets, 1.0), exact, inputs)[1]
    found = token_logprobs(head, hidden, targets, list(head.parameters()), temperature=1.0, chunk=2)
    assert found[0].dtype == torch.float32
    gap = (gradients(found, head, hidden)[1].double() - expected).abs().max() / expected.abs().max()
    assert gap < 4 * 2.0**-8


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, torch.Tensor):
                self.largest = max(self.largest, one.numel())
        return out


def test_no_tensor_is_larger_than_a_chunk():
    chunk, vocabulary = 16, 4000
    torch.manual_seed(0)
    head = nn.Linear(4, vocabulary, bias=False)
    hidden, targets = torch.randn(256, 4, requires_grad=True), torch.randint(0, vocabulary, (256,))
    for made, most in (
        (lambda: token_logprobs(head, hidden, targets, [head.weight], temperature=1.0, chunk=chunk), chunk),
        (lambda: at_once(head, hidden, targets, 1.0), 256),  # the control
    ):
        with Watch() as watch:
            gradients(made(), head, hidden)
        assert watch.largest == most * vocabulary


def test_chunks_fit():
    assert chunk_of(151_936) == 441
    assert chunk_of(10**9) == 1
