"""The attention that stands in for Transformer Engine's under context parallelism, beside Megatron's own."""

from __future__ import annotations

import numpy as np
import torch
from tests.megatron_core import models, stand_ins


def against_whole_sequences() -> float:
    """The largest difference to Megatron's attention to whole sequences, and of gradients."""
    from megatron.core import parallel_state as groups
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    models.join(2, context=2)
    rank, shape = groups.get_context_parallel_rank(), (models.SEQUENCE, 1, 2, models.HIDDEN // 2)
    values = torch.from_numpy(np.random.default_rng(4).normal(size=(3, *shape))).float()
    whole, part = values.clone().requires_grad_(), values.clone().requires_grad_()
    own = DotProductAttention(models.config(context_parallel_size=1), 1, AttnMaskType.causal, "self")
    causal = torch.ones(models.SEQUENCE, models.SEQUENCE).tril()[None, None] < 0.5
    rows = stand_ins.positions(2, models.SEQUENCE)[rank]
    wanted = own(*whole, causal)
    found = stand_ins.attention_class()(models.config())(*part[:, rows])
    towards = torch.linspace(-1, 1, wanted.numel()).view_as(wanted)
    (wanted * towards).sum().backward()
    (found * towards[rows]).sum().backward()
    off = (found - wanted[rows]).abs().max(), (part.grad - whole.grad)[:, rows].abs().max()
    return float(max(off))
