"""The written-out backward pass against autograd."""

import pytest
import torch

from equilibra.execute.experts import Activation, MoESpec, expert_math
from equilibra.execute.kernels import ExpertParts, RowWeights
from equilibra.execute.moe import ReferenceMoE

pytestmark = pytest.mark.arithmetic


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("weigh", [True, False])
def test_forward_and_backward_equal_autograd(activation, bias, weigh):
    torch.manual_seed(1)
    spec = MoESpec(hidden=5, expert_ffn=4, num_experts=3, top_k=1, activation=activation, expert_bias=bias)
    layer = ReferenceMoE(spec, dtype=torch.float64)
    layer.experts["gate_up"].data.mul_(5)  # clamps must matter
    sizes = [4, 0, 7]
    rows = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    wanted = torch.cat([layer.expert(0, rows[:4]), layer.expert(2, rows[4:])])
    weights = torch.rand(11, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(wanted)
    (wanted * weights[:, None] if weigh else wanted).backward(dy)
    instances = [ExpertParts(**{n: p.data[e] for n, p in layer.experts.items()}) for e in range(3)]
    gradients = [ExpertParts(**{n: torch.zeros_like(p.data[e]) for n, p in layer.experts.items()}) for e in range(3)]
    y, h = expert_math.forward(activation, rows.detach(), sizes, instances)
    dx = torch.empty_like(rows)
    weighted = RowWeights(weights.detach(), torch.full_like(weights, torch.nan).detach()) if weigh else None
    expert_math.backward(activation, (rows.detach(), h, dy), sizes, instances, gradients, dx, weighted=weighted)
    assert torch.allclose(y, wanted, atol=1e-13)
    assert torch.allclose(dx, rows.grad, atol=1e-12)
    assert not weigh or torch.allclose(weighted.gradients_N, weights.grad, atol=1e-12)
    for name, parameter in layer.experts.items():
        for expert in range(3):
            assert torch.allclose(getattr(gradients[expert], name), parameter.grad[expert], atol=1e-12), name


def test_gradients_are_kept_in_more_digits_than_rows():
    torch.manual_seed(2)
    parts = ExpertParts(gate_up=torch.randn(4, 3).bfloat16(), down=torch.randn(3, 2).bfloat16())
    total = ExpertParts(gate_up=torch.zeros(4, 3), down=torch.zeros(3, 2))
    rows = torch.randn(6, 3).bfloat16()
    y, h = expert_math.forward(Activation.SWIGLU, rows, [6], [parts])
    for _ in range(3):
        dx = torch.empty_like(rows)
        expert_math.backward(Activation.SWIGLU, (rows, h, torch.ones_like(y)), [6], [parts], [total], dx)
    assert total.gate_up.dtype == torch.float32
    once = ExpertParts(gate_up=torch.zeros(4, 3), down=torch.zeros(3, 2))
    expert_math.backward(Activation.SWIGLU, (rows, h, torch.ones_like(y)), [6], [parts], [once], dx)
    assert torch.equal(total.gate_up, once.gate_up + once.gate_up + once.gate_up)


def test_gradients_are_added_to_unless_asked_otherwise():
    torch.manual_seed(3)
    parts = [ExpertParts(gate_up=torch.randn(4, 3), down=torch.randn(3, 2)) for _ in range(3)]
    rows = torch.randn(7, 3)
    y, h = expert_math.forward(Activation.SWIGLU, rows, [3, 2, 2], parts)

    def gradients(start, **afresh):
        made = [ExpertParts(gate_up=torch.full((4, 3), start), down=torch.full((3, 2), start)) for _ in range(3)]
        saved = (rows, h, torch.ones_like(y))
        expert_math.backward(Activation.SWIGLU, saved, [3, 2, 2], parts, made, torch.empty_like(rows), **afresh)
        return [one.down for one in made]

    zero = gradients(0.0)
    for kept, alone in zip(gradients(8.0), zero, strict=True):
        torch.testing.assert_close(kept, alone + 8)
    first, middle, last = gradients(8.0, num_first=1, num_last=1)
    torch.testing.assert_close(first, zero[0])
    torch.testing.assert_close(middle, zero[1] + 8)
    torch.testing.assert_close(last, zero[2])
