"""Routers of the model families, and replay: recorded experts, live weights, the right gradient."""

import pytest
import torch

from equilibra.core.errors import InputError
from equilibra.execute.experts import GroupScore, MoESpec, RouterSpec, Score
from equilibra.execute.moe import ReferenceMoE, Router, choose_experts

SIZE = {"hidden": 6, "expert_ffn": 3, "num_experts": 8, "top_k": 3}


def router_of(**router):
    torch.manual_seed(0)
    made = Router(MoESpec(**SIZE, router=RouterSpec(**router)), dtype=torch.float64)
    made.weight.data.normal_()
    return made


def logits_of(router, tokens):
    return tokens @ router.weight.t() + (0 if router.bias is None else router.bias)


def test_mixtral_softmax_then_choice_then_normalised():
    router, tokens = router_of(), torch.randn(20, 6, dtype=torch.float64)
    experts, weights = router(tokens)
    values, wanted = torch.softmax(logits_of(router, tokens), -1).topk(3)
    assert torch.equal(experts, wanted)
    assert torch.allclose(weights, values / values.sum(-1, keepdim=True), atol=1e-15)


def test_gpt_oss_softmax_over_the_chosen_logits():
    router, tokens = router_of(bias=True), torch.randn(20, 6, dtype=torch.float64)
    router.bias.data.normal_()
    experts, weights = router(tokens)
    values, wanted = logits_of(router, tokens).topk(3)
    assert torch.equal(experts, wanted)
    assert torch.allclose(weights, values.softmax(-1), atol=1e-14)


def test_deepseek_v3_groups_choose_with_a_bias_that_does_not_weigh():
    router = router_of(
        score=Score.SIGMOID, selection_bias=True, num_groups=4, top_groups=2, scale=2.5, group_score=GroupScore.TOP2
    )
    router.selection_bias.normal_()
    tokens = torch.randn(50, 6, dtype=torch.float64)
    experts, weights = router(tokens)
    scores = logits_of(router, tokens).sigmoid().detach()
    for token in range(50):
        choice = scores[token] + router.selection_bias
        groups = choice.view(4, 2).sum(1).topk(2).indices
        allowed = [e for e in range(8) if e // 2 in groups]
        best = sorted(allowed, key=lambda e: -float(choice[e]))[:3]
        assert experts[token].tolist() == best
        chosen = scores[token, best]
        assert torch.allclose(weights[token], chosen / chosen.sum() * 2.5, atol=1e-14)


def test_deepseek_v2_groups_by_their_best_expert():
    spec = MoESpec(**SIZE, router=RouterSpec(num_groups=2, top_groups=1, group_score=GroupScore.MAX))
    scores = torch.tensor([[0.1, 0.1, 0.1, 0.1, 0.35, 0.05, 0.05, 0.05], [0.2, 0.2, 0.2, 0.1, 0.3, 0.0, 0.0, 0.0]])
    assert choose_experts(scores, spec)[0].tolist()[0] == 4
    assert set(choose_experts(scores, spec)[1].tolist()) <= {4, 5, 6, 7}


@pytest.mark.parametrize("score", list(Score))
@pytest.mark.parametrize("normalise", [True, False])
def test_replay_weighs_recorded_experts_and_the_router_learns(score, normalise):
    """The gradient is the derivative of the weights of the recorded experts, by finite differences, and not zero."""
    router, tokens = router_of(score=score, normalise=normalise), torch.randn(4, 6, dtype=torch.float64)
    recorded = torch.tensor([[7, 0, 1], [2, 3, 4], [5, 6, 7], [0, 2, 4]])
    factor = torch.randn(4, 3, dtype=torch.float64)
    experts, weights = router(tokens, recorded)
    assert torch.equal(experts, recorded)
    (weights * factor).sum().backward()
    assert float(router.weight.grad.abs().min()) > 0 or not normalise
    for row, column in ((7, 2), (0, 0), (3, 5)):
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                router.weight[row, column] += sign * 1e-6
                values.append(float((router(tokens, recorded)[1] * factor).sum()))
                router.weight[row, column] -= sign * 1e-6
        assert float(router.weight.grad[row, column]) == pytest.approx(
            (values[0] - values[1]) / 2e-6, rel=1e-6, abs=1e-9
        )
    assert float(router.weight.grad.abs().max()) > 1e-3


def test_tokens_without_a_recording_choose_live():
    router, tokens = router_of(), torch.randn(5, 6, dtype=torch.float64)
    recorded = torch.tensor([[0, 1, 2], [-1, -1, -1], [3, 4, 5], [-1, -1, -1], [6, 7, 0]])
    experts, _ = router(tokens, recorded, complete=False)
    live, _ = router(tokens)
    assert torch.equal(experts[[0, 2, 4]], recorded[[0, 2, 4]])
    assert torch.equal(experts[[1, 3]], live[[1, 3]])


def test_impossible_specs_say_what_would_do():
    with pytest.raises(InputError, match="lower top_k to 2"):
        MoESpec(**{**SIZE, "top_k": 3}, router=RouterSpec(num_groups=4, top_groups=1))
    with pytest.raises(InputError, match="3 equal groups"):
        MoESpec(**SIZE, router=RouterSpec(num_groups=3, top_groups=1))
    with pytest.raises(InputError, match=r"num_groups \(1\), not 2"):
        RouterSpec(top_groups=2)
    with pytest.raises(InputError, match=r"from 1 to num_groups \(4\), not 0"):
        RouterSpec(num_groups=4, top_groups=0)


def test_small_differences_between_scores_count_under_autocast_too():
    """bfloat16 has 8 bits: logits 1 and 1.001 would be one."""
    router = Router(MoESpec(**SIZE, router=RouterSpec()), dtype=torch.float32)
    router.weight.data = torch.zeros(8, 6)
    router.weight.data[:, 0] = 1 + torch.arange(8) / 1000
    tokens = torch.ones(1, 6)
    assert router(tokens)[0].tolist() == [[7, 6, 5]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert router(tokens)[0].tolist() == [[7, 6, 5]]
        assert router.scores(tokens).dtype == torch.float32


def test_the_reference_routes_live_what_was_not_recorded():
    torch.manual_seed(0)
    reference = ReferenceMoE(MoESpec(**SIZE), dtype=torch.float64)
    reference.router.weight.data.normal_()
    tokens = torch.randn(3, 6, dtype=torch.float64)
    live, _ = reference.router(tokens)
    recorded = torch.where(torch.tensor([[True], [False], [True]]), live, -1)
    assert torch.equal(reference(tokens, recorded), reference(tokens))
    assert torch.equal(reference(tokens, torch.full((3, 3), -1)), reference(tokens))
