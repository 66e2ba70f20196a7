"""The policy loss against a loop over tokens in plain Python and its finite differences; weights and values by hand."""

from math import exp, log

import numpy as np
import pytest
import torch

from equilibra.core.errors import InputError
from equilibra.rl.loss import Average, Divergence, LossSetting, Ratio, policy_loss, token_weights, value_loss

pytestmark = pytest.mark.arithmetic

CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
SETTINGS = [
    LossSetting(),
    LossSetting(**CLIPS),
    LossSetting(**CLIPS, dual_clip=2.5),
    LossSetting(**CLIPS, ratio=Ratio.SEQUENCE),
    LossSetting(**CLIPS, ratio=Ratio.SEQUENCE, dual_clip=1.4),
    LossSetting(**CLIPS, divergence=Divergence.K1, kl_weight=0.7),
    LossSetting(**CLIPS, divergence=Divergence.K2, kl_weight=0.7),
    LossSetting(**CLIPS, divergence=Divergence.K3, kl_weight=0.7),
    LossSetting(**CLIPS, entropy_weight=0.3),
    LossSetting(**CLIPS, ratio=Ratio.SEQUENCE, dual_clip=1.4, divergence="k3", kl_weight=0.2, entropy_weight=0.1),
]
RATIOS = [0.5, 0.9, 1.1, 1.5, 0.6, 0.95, 1.25, 3.0, 1.6, 1.7, 0.7, 0.75]
ADVANTAGES = [1.0, 0.8, 1.2, 0.9, -1.0, -0.8, -1.1, -0.7, 1.3, -0.6, 0.5, -0.4]
SEQUENCES = [0, 0, 0, 1, 3, 3, 4, 4, 5, 6, 7, 8]  # number 2 has no token; 5, 6 are above the clips, 7, 8 below


def micro_batch():
    generator = torch.Generator().manual_seed(1)
    old = -torch.rand(12, generator=generator, dtype=torch.float64) * 2 - 1
    new = (old + torch.tensor(RATIOS, dtype=torch.float64).log()).requires_grad_()
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    weights = torch.rand(12, generator=generator, dtype=torch.float64) + 0.1
    weights[[2, 6]] = 0
    reference = new.detach() + torch.randn(12, generator=generator, dtype=torch.float64)
    entropy = torch.rand(12, generator=generator, dtype=torch.float64)
    return new, old, advantages, weights, torch.tensor(SEQUENCES), reference, entropy


def naive(new, old, advantages, weights, sequence, reference, entropy, setting):
    """The same loss, token by token."""
    whole = 0.0
    for t, weight in enumerate(weights):
        if weight == 0:
            continue
        same = [t] if setting.ratio is Ratio.TOKEN else [
            u for u in range(len(new)) if sequence[u] == sequence[t] and weights[u] != 0
        ]  # fmt: skip
        ratio, advantage = exp(sum(new[u] - old[u] for u in same) / len(same)), advantages[t]
        clipped = min(max(ratio, 1 - setting.clip_low), 1 + setting.clip_high)
        objective = min(ratio * advantage, clipped * advantage)
        if setting.dual_clip and advantage < 0:
            objective = max(objective, setting.dual_clip * advantage)
        d = new[t] - reference[t]
        divergence = {
            "none": 0,
            "k1": d,
            "k2": d * d / 2,
            "k3": exp(reference[t] - new[t]) - (reference[t] - new[t]) - 1,
        }
        term = -objective + setting.kl_weight * divergence[setting.divergence] - setting.entropy_weight * entropy[t]
        whole += weight * term
    return whole


@pytest.mark.parametrize("setting", SETTINGS)
def test_value_and_gradient_are_those_of_the_naive_loss(setting):
    batch = micro_batch()
    new, *given, reference, entropy = batch
    found = policy_loss(new, *given, setting, reference_T=reference, entropy_T=entropy).loss
    numbers = [tensor.tolist() for tensor in batch]
    assert found.item() == pytest.approx(naive(*numbers, setting), rel=1e-12)
    found.backward()
    step, wanted = 1e-6, []
    for t in range(12):
        up, down = ([n + (step if u == t else 0) * sign for u, n in enumerate(numbers[0])] for sign in (1, -1))
        wanted.append((naive(up, *numbers[1:], setting) - naive(down, *numbers[1:], setting)) / (2 * step))
    assert new.grad.tolist() == pytest.approx(wanted, abs=1e-8)


@pytest.mark.parametrize("setting", SETTINGS)
def test_gradcheck(setting):
    new, *given, reference, entropy = micro_batch()
    entropy.requires_grad_()

    def loss(new, entropy):
        return policy_loss(new, *given, setting, reference_T=reference, entropy_T=entropy).loss

    assert torch.autograd.gradcheck(loss, (new, entropy))


def one_token(ratio, advantage, **options):
    """Loss and gradient of one token of weight 1 by its log-probability."""
    new = torch.tensor([log(ratio)], dtype=torch.float64, requires_grad=True)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    found = policy_loss(new, zero, advantage * one, one, torch.zeros(1, dtype=torch.int64), LossSetting(**options))
    found.loss.backward()
    return pytest.approx([found.loss.item(), new.grad.item(), found.clipped.item()])


def test_sides_of_the_clip_by_hand():
    # loss, gradient = -r·A while it counts, share of clipped tokens
    assert one_token(1.1, 2.0) == [-2.2, -2.2, 0]
    assert one_token(1.5, 2.0) == [-2.4, 0, 1]  # no more than 1.2 · 2
    assert one_token(1.25, 2.0, clip_high=0.28) == [-2.5, -2.5, 0]  # clip-higher still learns here
    assert one_token(0.5, 2.0) == [-1.0, -1.0, 0]  # too rare and good: the way back is open
    assert one_token(0.5, -2.0) == [1.6, 0, 1]  # no less than 0.8 · 2
    assert one_token(3.0, -2.0) == [6.0, 6.0, 0]  # too likely and bad: no bound ...
    assert one_token(3.0, -2.0, dual_clip=2.5) == [5.0, 0, 1]  # ... but this one
    assert one_token(3.0, 2.0, dual_clip=2.5) == [-2.4, 0, 1]  # which is not for good ones
    assert one_token(1.0, 2.0) == [-2.0, -2.0, 0]
    assert one_token(1.5, 0.0) == [0, 0, 0]


def test_far_ratios_stay_finite():
    assert one_token(exp(90.0), 1.0) == [-1.2, 0, 1]
    new = torch.tensor([500.0, -500.0], requires_grad=True)
    found = policy_loss(
        new, torch.zeros(2), torch.ones(2), torch.ones(2), torch.tensor([0, 1]),
        LossSetting(divergence="k3", kl_weight=1.0), reference_T=torch.zeros(2),
    )  # fmt: skip
    found.loss.backward()
    assert torch.isfinite(found.loss)
    assert torch.isfinite(found.kl)
    assert torch.isfinite(new.grad).all()


def test_statistics_by_hand():
    new = torch.tensor([log(1.5), log(0.5)], dtype=torch.float64)
    zeros, weights = torch.zeros(2, dtype=torch.float64), torch.tensor([0.25, 0.5], dtype=torch.float64)
    setting = LossSetting(divergence="k2", kl_weight=0.1, entropy_weight=0.01)
    entropy, reference = torch.tensor([2.0, 4.0]), new - torch.tensor([2.0, -4.0])
    found = policy_loss(
        new, zeros, zeros + 1, weights, torch.tensor([0, 0]), setting, reference_T=reference, entropy_T=entropy
    )
    assert found.policy.item() == pytest.approx(-0.25 * 1.2 - 0.5 * 0.5)
    assert found.kl.item() == pytest.approx(0.25 * (0.5 - log(1.5)) + 0.5 * (-0.5 - log(0.5)))
    assert found.divergence.item() == pytest.approx(0.25 * 2 + 0.5 * 8)
    assert found.entropy.item() == pytest.approx(0.25 * 2 + 0.5 * 4)
    assert found.clipped.item() == 0.25
    assert found.weight.item() == 0.75
    assert found.loss.item() == pytest.approx(-0.55 + 0.1 * 4.5 - 0.01 * 2.5)


def test_sequence_ratio_is_a_geometric_mean():
    new = torch.tensor(
        [log(4.0), 0.0, 7.0], dtype=torch.float64, requires_grad=True
    )  # √(4·1) = 2; the third not trained
    weights, zeros = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    found = policy_loss(
        new, zeros, zeros - 1, weights, torch.zeros(3, dtype=torch.int64), LossSetting(ratio="sequence")
    )
    found.loss.backward()
    assert found.loss.item() == pytest.approx(2)
    assert new.grad.tolist() == pytest.approx([1, 1, 0])  # 2 / 2 each: tokens of a sequence move together
    tokens = policy_loss(new, zeros, zeros - 1, weights, zeros.long(), LossSetting())
    assert tokens.loss.item() == pytest.approx(2.5)  # (4 + 1) / 2: another loss


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_without_weight_have_no_influence(setting, bad):
    new, old, advantages, weights, sequence, reference, entropy = micro_batch()
    trained = weights != 0
    alone = new.detach()[trained].requires_grad_()
    wanted = policy_loss(
        alone, old[trained], advantages[trained], weights[trained], sequence[trained], setting,
        reference_T=reference[trained], entropy_T=entropy[trained],
    )  # fmt: skip
    wanted.loss.backward()
    new = new.detach().masked_fill(~trained, bad).requires_grad_()
    spoilt = [numbers.masked_fill(~trained, bad) for numbers in (old, advantages, reference, entropy)]
    found = policy_loss(
        new, spoilt[0], spoilt[1], weights, sequence, setting, reference_T=spoilt[2], entropy_T=spoilt[3]
    )
    found.loss.backward()
    for name in ("loss", "policy", "kl", "divergence", "entropy", "clipped", "weight"):
        assert getattr(found, name).item() == pytest.approx(getattr(wanted, name).item(), rel=1e-12)
    assert new.grad[trained].tolist() == pytest.approx(alone.grad.tolist(), rel=1e-12)
    assert not new.grad[~trained].any()


def test_a_trained_nan_is_not_hidden():
    new, old, *rest, _, _ = micro_batch()
    assert policy_loss(new, torch.full_like(old, torch.nan), *rest, LossSetting()).loss.isnan()


@pytest.mark.parametrize("ratio", Ratio)
def test_no_tokens(ratio):
    new = torch.zeros(0, requires_grad=True)
    empty = torch.zeros(0)
    setting = LossSetting(ratio=ratio, divergence="k3", kl_weight=0.1)
    found = policy_loss(
        new * 1, empty, empty, empty, torch.zeros(0, dtype=torch.int64), setting, reference_T=empty, entropy_T=empty
    )
    assert found.loss.item() == 0
    found.loss.backward()
    assert new.grad.shape == (0,)
    assert not policy_loss(empty, empty, empty, empty, empty.long(), setting, reference_T=empty).loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_types_are_summed_in_float32(dtype):
    new, old, *rest, _, _ = micro_batch()
    narrow = new.detach().to(dtype).requires_grad_()
    found = policy_loss(narrow, old, *rest, LossSetting())
    found.loss.backward()
    assert found.loss.dtype == torch.float32
    assert narrow.grad.dtype == dtype
    wanted = policy_loss(new, old, *rest, LossSetting()).loss.item()
    assert found.loss.item() == pytest.approx(wanted, rel=2e-2)


def test_only_new_log_probabilities_and_entropy_learn():
    batch = micro_batch()
    for tensor in (*batch[:4], *batch[5:]):
        tensor.requires_grad_()
    new, old, advantages, weights, sequence, reference, entropy = batch
    setting = LossSetting(divergence="k3", kl_weight=0.1, entropy_weight=0.1)
    policy_loss(
        new, old, advantages, weights, sequence, setting, reference_T=reference, entropy_T=entropy
    ).loss.backward()
    assert entropy.grad.tolist() == pytest.approx((-0.1 * weights).tolist())
    assert all(tensor.grad is None for tensor in (old, advantages, weights, reference))


def alone(array):
    return array


MASKS = [np.array([True, True, False]), np.array([True]), np.array([False, False]), np.zeros(0, bool)]


@pytest.mark.parametrize(
    ("average", "wanted"),
    [
        (Average.TOKEN, [[1 / 3, 1 / 3, 0], [1 / 3], [0, 0], []]),
        (Average.SEQUENCE, [[1 / 4, 1 / 4, 0], [1 / 2], [0, 0], []]),  # two sequences have trained tokens
        (Average.SEQUENCE_SUM_OVER_MAX, [[1 / 20, 1 / 20, 0], [1 / 20], [0, 0], []]),  # 2 sequences · length 10
    ],
)
def test_weights_by_hand(average, wanted):
    weights = token_weights(MASKS, LossSetting(average=average), alone, 10)
    assert [one.tolist() for one in weights] == [pytest.approx(one) for one in wanted]
    assert all(one.dtype == np.float64 for one in weights)


@pytest.mark.parametrize("average", Average)
def test_weights_without_samples_or_trained_tokens(average):
    calls = []

    def total(array):
        calls.append(array.tolist())
        return array

    setting = LossSetting(average=average)
    assert token_weights([], setting, total, 10) == []
    assert [one.tolist() for one in token_weights(MASKS[2:], setting, total, 10)] == [[0, 0], []]
    assert calls == [[0, 0], [0, 0]]  # once each, or other ranks would wait


def value_case(clip):
    values = torch.tensor([1.0, 1.0, 2.0, torch.nan], dtype=torch.float64, requires_grad=True)
    old, returns = torch.tensor([0.9, 0.5, 1.0, 0.0]), torch.tensor([0.0, 1.0, 0.0, torch.inf])
    loss = value_loss(values, old, returns, torch.tensor([0.5, 0.25, 0.25, 0.0]), clip)
    loss.backward()
    return loss.item(), values.grad.tolist()


def test_value_loss_by_hand():
    # ½ · (0.5 · 1² + 0.25 · 0² + 0.25 · 2²)
    loss, gradient = value_case(0.0)
    assert loss == pytest.approx(0.75)
    assert gradient == pytest.approx([0.5, 0, 0.5, 0])


def test_clipped_value_loss_by_hand():
    # within the clip; moved 0.5 to the return but counts as 0.7: ½·0.25·0.3², no gradient; moved away: full error
    loss, gradient = value_case(0.2)
    assert loss == pytest.approx(0.5 * (0.5 + 0.25 * 0.09 + 0.25 * 4), abs=1e-7)
    assert gradient == pytest.approx([0.5, 0, 0.5, 0])


def test_value_gradients_and_no_tokens():
    values = torch.tensor([1.0, 0.8, 2.0, 0.4], dtype=torch.float64, requires_grad=True)
    others = [torch.tensor(x, dtype=torch.float64) for x in ([0.9, 0.5, 1.0, 1.0], [0.2, 1.0, 0.1, 1.5], [1, 2, 3, 4])]
    for clip in (0.0, 0.2):
        assert torch.autograd.gradcheck(lambda values, clip=clip: value_loss(values, *others, clip), (values,))
    empty = torch.zeros(0, requires_grad=True)
    value_loss(empty, empty, empty, empty, 0.2).backward()
    assert empty.grad.shape == (0,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clip_low": 0.0}, "clip_low must be a number more than 0 to 1, not 0.0"),
        ({"clip_low": 1.5}, "clip_low must be a number more than 0 to 1, not 1.5"),
        ({"clip_high": -0.1}, "clip_high must be a number more than 0 .*, not -0.1"),
        ({"clip_high": float("nan")}, "clip_high must be a number more than 0 .*, not nan"),
        ({"clip_high": "wide"}, "clip_high must be a number .*, not 'wide'"),
        ({"dual_clip": 1.0}, "dual_clip, where it is not 0 for off, must be a number more than 1 .*, not 1.0"),
        ({"kl_weight": -1.0, "divergence": "k1"}, "kl_weight must be a number from 0"),
        ({"entropy_weight": float("inf")}, "entropy_weight must be a number from 0 .*, not inf"),
        ({"kl_weight": 0.1}, "kl_weight 0.1 needs a divergence; use k1, k2 or k3"),
        ({"ratio": "word"}, "ratio must be one of token, sequence, not 'word'"),
        ({"average": None}, "average must be one of token, sequence, sequence-sum-over-max, not None"),
    ],
)
def test_settings_check_themselves(options, words):
    with pytest.raises(InputError, match=words):
        LossSetting(**options)


def test_words_stand_for_members():
    setting = LossSetting(ratio="sequence", divergence="k3", average="sequence-sum-over-max")
    assert setting.ratio is Ratio.SEQUENCE
    assert setting.divergence is Divergence.K3
    assert setting.average is Average.SEQUENCE_SUM_OVER_MAX


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (LossSetting(divergence="k3"), "the divergence k3 needs log-probabilities under the reference"),
        (LossSetting(entropy_weight=0.1), "entropy_weight 0.1 needs the entropy of each token"),
    ],
)
def test_missing_parts(setting, words):
    with pytest.raises(InputError, match=words):
        policy_loss(*micro_batch()[:5], setting)


def test_wrong_shapes():
    three, two = torch.zeros(3), torch.zeros(2)
    with pytest.raises(InputError, match="one number per token"):
        policy_loss(three, two, three, three, three.long(), LossSetting())
    with pytest.raises(InputError, match="one number per token"):
        value_loss(torch.zeros(3, 1), torch.zeros(3, 1), torch.zeros(3, 1), torch.zeros(3, 1), 0.0)
