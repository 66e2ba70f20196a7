"""The first gradients of a step are written where nothing was: never what was in that memory, also after an error."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from equilibra.core.placement import Cluster, contiguous  # noqa: E402
from equilibra.core.plan import Stage  # noqa: E402
from equilibra.cost.rates import Rates  # noqa: E402
from equilibra.execute.experts import MoESpec, expert_math  # noqa: E402
from equilibra.execute.group import join_expert_group  # noqa: E402
from equilibra.execute.moe import BalancedMoE  # noqa: E402
from equilibra.execute.runtime import Runtime  # noqa: E402
from equilibra.execute.steps.balancer import Balancer, BalancerSetting  # noqa: E402
from equilibra.trace.routing import RoutingTrace  # noqa: E402

pytestmark = pytest.mark.arithmetic
ALONE = Cluster(num_nodes=1, ranks_per_node=1)
IDS = np.array([[[0, 1]], [[2, 1]], [[0, 2]]], np.uint8)
"""expert 3 has no rows: its gradient must be zeros, not nothing"""


@pytest.fixture(autouse=True)
def memory_is_full_of_nan(monkeypatch):
    real = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda like, **more: real(like, **more).fill_(torch.nan))


@pytest.fixture
def layer():
    runtime = Runtime(join_expert_group(ALONE), contiguous(ALONE, num_layers=1, num_experts=4))
    torch.manual_seed(0)
    moe = BalancedMoE(MoESpec(hidden=8, expert_ffn=8, num_experts=4, top_k=2), runtime).double()
    balancer = Balancer(runtime, BalancerSetting(tokens_per_rank=3, rates=Rates.free()))
    routing = RoutingTrace(ids=IDS, offsets=np.array([0, 3], np.int64), num_experts=4)
    (micro_batch,) = balancer.begin(routing).micro_batches(Stage.UPDATE)
    tokens = torch.randn(3, 8, dtype=torch.float64)

    def run():
        with micro_batch:
            moe(tokens).square().sum().backward()

    return moe.experts, run


def gradients_of(experts):
    return [part.grad.clone() for part in experts.parts()]


def test_writing_is_adding_to_zeros(layer):
    experts, run = layer
    for part in experts.parts():
        part.grad = torch.zeros_like(part)
    run()
    wanted = gradients_of(experts)
    experts.drop_gradients()
    run()
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(gradients_of(experts), wanted, strict=True))
    assert wanted[0][3].abs().max() == 0
    run()
    assert all(torch.allclose(a, 2 * b, rtol=1e-12) for a, b in zip(gradients_of(experts), wanted, strict=True))


def test_an_error_leaves_no_gradients_that_were_never_written(layer, monkeypatch):
    experts, run = layer
    run()
    wanted = gradients_of(experts)

    def out_of_memory(*_given, **_more):
        raise torch.OutOfMemoryError

    for there_before in (False, True):
        if not there_before:
            experts.drop_gradients()
        with monkeypatch.context() as broken:
            broken.setattr(expert_math, "backward", out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                run()
        assert experts.has_gradients is there_before
        run()
        times = 2 if there_before else 1
        assert all(torch.allclose(a, times * b) for a, b in zip(gradients_of(experts), wanted, strict=True))
