"""What is kept between micro-batches: no view of weights that moved away, no table of a micro-batch that ran."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from equilibra.core.placement import Cluster, contiguous
from equilibra.core.plan import Stage
from equilibra.execute.experts import MoESpec
from equilibra.execute.group import join_expert_group
from equilibra.execute.moe import BalancedMoE
from equilibra.execute.runtime import Runtime
from equilibra.execute.steps.balancer import Balancer, BalancerSetting
from equilibra.trace.routing import RoutingTrace

SPEC = MoESpec(hidden=8, expert_ffn=6, num_experts=4, top_k=2)
LAYERS, TOKENS = 2, 16


class Alone:
    """A model of MoE layers on one rank, and steps of equally long sequences, each a micro-batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        cluster = Cluster(num_nodes=1, ranks_per_node=1)
        placement = contiguous(cluster, num_layers=LAYERS, num_experts=SPEC.num_experts)
        self.runtime = Runtime(join_expert_group(cluster), placement)
        self.model = torch.nn.ModuleList(
            [BalancedMoE(SPEC, self.runtime, dtype=torch.float64) for _ in range(LAYERS)]
        )  # fmt: skip
        self.balancer = Balancer(self.runtime, BalancerSetting(tokens_per_rank=TOKENS, planner="static"))

    def begin(self, sequences):
        scores = np.random.default_rng(0).random((TOKENS, LAYERS, SPEC.num_experts))
        ids = np.tile(np.argsort(scores, axis=2)[:, :, : SPEC.top_k].astype(np.uint8), (sequences, 1, 1))
        offsets = np.arange(sequences + 1, dtype=np.int64) * TOKENS
        return self.balancer.begin(RoutingTrace(ids=ids, offsets=offsets, num_experts=SPEC.num_experts))

    def forward(self, *, again=False):
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(TOKENS, SPEC.hidden, generator=generator, dtype=torch.float64, requires_grad=True)
        for layer in self.model:
            hidden = hidden + (checkpoint(layer, hidden, use_reentrant=False) if again else layer(hidden))
        return hidden.square().sum()


@pytest.fixture
def alone():
    made = Alone()
    yield made
    made.balancer.close()


def test_weights_that_move_away_are_freed(alone):
    """Offloading gives parameters new storage: whatever still views the old one keeps its memory."""
    old = []
    for weights in alone.runtime.weights:
        for part in weights.parts():
            values = part.detach().numpy().copy()
            old.append(weakref.ref(values))
            part.data = torch.from_numpy(values)
            del values
    alone.balancer.weights_changed()
    with torch.no_grad():
        for micro_batch in alone.begin(2).micro_batches(Stage.LOGPROB):
            with micro_batch:
                alone.forward()
        alone.forward()  # routed live
    assert all(values() is not None for values in old)
    for weights in alone.runtime.weights:
        for part in weights.parts():
            part.data = torch.empty(0, dtype=torch.float64)
    gc.collect()
    assert [values() is None for values in old] == [True] * len(old)


@pytest.mark.parametrize("again", [False, True])
def test_tables_do_not_grow_with_micro_batches(alone, again):
    def bytes_of(sequences):
        step = alone.begin(sequences)
        micro_batches = step.micro_batches(Stage.UPDATE)
        assert len(micro_batches) == sequences
        for micro_batch in micro_batches:
            with micro_batch:
                alone.forward(again=again).backward()
        return alone.runtime.memory_bytes()["tables"], sum(one.table_bytes for one in micro_batches)

    one, kept = bytes_of(1)
    assert one == TOKENS * SPEC.top_k * LAYERS * (2 + 4 + 4)  # expert, token of a row, row of a pair: a rank alone
    assert kept == 0
    assert bytes_of(8) == (one, 0)


def test_a_backward_pass_may_come_later(alone):
    """Micro-batches in flight: recompute makes tables again where they are gone."""
    micro_batches = alone.begin(3).micro_batches(Stage.UPDATE)
    losses = []
    for micro_batch in micro_batches:
        with micro_batch:
            losses.append(alone.forward(again=True))
    for micro_batch, loss in zip(micro_batches, losses, strict=True):
        with micro_batch:
            loss.backward()
    later = [part.grad.clone() for weights in alone.runtime.weights for part in weights.parts()]
    alone.balancer.discard_gradients(alone.model)
    for micro_batch in alone.begin(3).micro_batches(Stage.UPDATE):
        with micro_batch:
            alone.forward().backward()
    at_once = [part.grad for weights in alone.runtime.weights for part in weights.parts()]
    for one, other in zip(later, at_once, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert one.abs().max() > 0
