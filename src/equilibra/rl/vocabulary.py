"""Log-probability and entropy of answer tokens, without all logits in memory at once.

Symbols: B sequences, T tokens of the longest, N answer tokens, D hidden size, V vocabulary, C tokens of a chunk.

Logits [N, V] in float32 are the largest tensor of a step: 5 GB for 8k tokens and a vocabulary of 152k, several times
over for the softmax and its gradient. Here tokens go through the head in chunks, and the backward pass recomputes the
logits of each chunk. Gradients of the head are summed over chunks in float32 or better, and rounded once.

    H = log Σ_v exp z_v - Σ_v p_v z_v        z = logits / temperature, p = softmax z
    ∂ log p_t / ∂ z_v = [v = t] - p_v        ∂ H / ∂ z_v = -p_v (log p_v + H)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

CHUNK_BYTES = 256 << 20
"""bytes of one chunk's logits in float32; the peak is about three times as much"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Padded:
    """Right-padded inputs and targets of a micro-batch; one padding token if it is empty.

    A sequence's last token is only a target, so every input has recorded routing.
    """

    tokens_BT: Tensor
    mask_BT: Tensor
    """1 for tokens, 0 for padding"""
    rows: Tensor
    """flat indices of all inputs, sequence by sequence"""
    predicting: Tensor
    """[N] flat indices of the inputs that predict answer tokens"""
    targets: Tensor
    """[N] answer tokens"""
    sequence: Tensor
    """[N] sequence of each answer token"""


def padded(sequences: Sequence[tuple[Tensor, int]], pad: int, device: torch.device) -> Padded:
    """Pad sequences, each given as (tokens, prompt length)."""
    inputs = [tokens[:-1] for tokens, _ in sequences] or [torch.tensor([pad])]  # attention needs a token
    tokens_BT = pad_sequence(inputs, batch_first=True, padding_value=pad)
    mask_BT = pad_sequence([torch.ones_like(one) for one in inputs], batch_first=True)
    is_input = mask_BT.bool() & bool(sequences)  # the token of an empty micro-batch reaches neither experts nor loss
    first_B = torch.tensor([prompt - 1 for _, prompt in sequences] or [0])
    predicting = (is_input & (torch.arange(mask_BT.shape[1]) >= first_B[:, None])).flatten().nonzero()[:, 0]
    targets = torch.cat([torch.zeros(0, dtype=torch.long), *(tokens[prompt:] for tokens, prompt in sequences)])
    return Padded(
        tokens_BT=tokens_BT.to(device), mask_BT=mask_BT.to(device), targets=targets.to(device),
        rows=is_input.flatten().nonzero()[:, 0].to(device), predicting=predicting.to(device),
        sequence=(predicting // mask_BT.shape[1]).to(device),
    )  # fmt: skip


def chunk_of(vocabulary: int) -> int:
    """C: tokens whose logits fit into `CHUNK_BYTES`."""
    return max(1, CHUNK_BYTES // (4 * vocabulary))


def token_logprobs(
    head: Callable[[Tensor], Tensor], hidden_ND: Tensor, targets_N: Tensor, parameters: Sequence[Tensor], *,
    temperature: float, chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[N] log-probabilities of the targets and [N] entropies, in float32 or better; with gradients.

    head: [C, D] -> [C, V] logits, row by row. parameters: those that `head` reads; they may require gradients.
    """
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        head, temperature, chunk, targets_N, hidden_ND, *parameters
    )
    return found


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch has no type for it
        head: Callable[[Tensor], Tensor],
        temperature: float,
        chunk: int,
        targets_N: Tensor,
        hidden_ND: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.head, ctx.temperature, ctx.chunk = head, temperature, chunk
        ctx.save_for_backward(targets_N, hidden_ND, *parameters)
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        logprobs, entropy = (hidden_ND.new_empty(len(hidden_ND), dtype=dtype) for _ in range(2))
        for first in range(0, len(hidden_ND), chunk):
            here = slice(first, first + chunk)
            logs_CV = _log_softmax(head(hidden_ND[here]), temperature)
            logprobs[here] = logs_CV.gather(1, targets_N[here, None])[:, 0]
            entropy[here] = _entropy(logs_CV, logs_CV.exp())
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        targets_N, hidden_ND, *parameters = ctx.saved_tensors
        learning = [parameter for parameter, needed in zip(parameters, ctx.needs_input_grad[5:], strict=True) if needed]
        sums = [torch.zeros_like(one, dtype=torch.promote_types(one.dtype, torch.float32)) for one in learning]
        of_hidden = torch.zeros_like(hidden_ND)
        for first in range(0, len(hidden_ND), ctx.chunk):
            here = slice(first, first + ctx.chunk)
            with torch.enable_grad():
                inputs = hidden_ND[here].detach().requires_grad_()
                logits_CV = ctx.head(inputs)
            parts = [part[here] for part in gradients]
            of_logits = _gradient(logits_CV.detach(), targets_N[here], parts, ctx.temperature).to(logits_CV.dtype)
            of_hidden[here], *more = torch.autograd.grad(logits_CV, [inputs, *learning], of_logits)
            for total, part in zip(sums, more, strict=True):
                total.add_(part)
        done = iter([total.to(one.dtype) for total, one in zip(sums, learning, strict=True)])
        wanted = ctx.needs_input_grad
        return (
            None, None, None, None, of_hidden if wanted[4] else None,
            *(next(done) if needed else None for needed in wanted[5:]),
        )  # fmt: skip


def _log_softmax(logits_CV: Tensor, temperature: float) -> Tensor:
    wide = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    return (wide / temperature).log_softmax(dim=-1)


def _entropy(logs_CV: Tensor, probabilities_CV: Tensor) -> Tensor:
    return -(probabilities_CV * logs_CV).sum(dim=-1)


def _gradient(logits_CV: Tensor, targets_C: Tensor, gradients: Sequence[Tensor], temperature: float) -> Tensor:
    """[C, V] gradient of the logits from those of log-probabilities and entropies; at most three such tensors."""
    of_logprobs, of_entropy = (part[:, None] for part in gradients)
    logs = _log_softmax(logits_CV, temperature)
    probabilities = logs.exp()
    logs += _entropy(logs, probabilities)[:, None]
    found = logs.mul_(-of_entropy).sub_(of_logprobs).mul_(probabilities)
    found.scatter_add_(1, targets_C[:, None], of_logprobs.to(found.dtype))
    return found.div_(temperature)
