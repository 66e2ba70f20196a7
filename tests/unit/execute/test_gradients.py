"""Gradients, masters and optimizers on one rank: what reaches the optimizer, and what must not."""

import math

import pytest
import torch
from tests.distributed.worlds import Stack, loss_of
from torch import nn

from equilibra.core.errors import ExecuteError, InputError, NonFiniteError
from equilibra.core.placement import Cluster, contiguous
from equilibra.execute.experts import MoESpec, RouterSpec
from equilibra.execute.group import join_expert_group
from equilibra.execute.moe import BalancedMoE
from equilibra.execute.runtime import Runtime
from equilibra.execute.state.checkpoint import Checkpoints, checkpoint_steps
from equilibra.execute.steps import balancer as balancer_module
from equilibra.execute.steps.balancer import Balancer, BalancerSetting
from equilibra.execute.steps.gradients import clip_gradients, gradient_norm, gradient_of
from equilibra.execute.steps.masters import float32_masters

SPEC = MoESpec(hidden=4, expert_ffn=3, num_experts=4, top_k=2, router=RouterSpec())
SETTING = BalancerSetting(tokens_per_rank=8, planner="static")


def make(dtype=torch.bfloat16, layers=1):
    torch.manual_seed(7)
    cluster = Cluster(num_nodes=1, ranks_per_node=1)
    runtime = Runtime(join_expert_group(cluster), contiguous(cluster, num_layers=layers, num_experts=SPEC.num_experts))
    model = Stack([BalancedMoE(SPEC, runtime, dtype=dtype) for _ in range(layers)], SPEC.hidden, dtype)
    for moe in model.moe:
        nn.init.normal_(moe.router.weight)
        for part in moe.experts.parts():
            nn.init.normal_(part, std=0.5)
    return model, runtime


def tokens(dtype=torch.bfloat16, seed=1):
    return torch.randn(5, SPEC.hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


def is_expert(name):
    return ".experts." in name


def with_optimizers(model, runtime, *, split, kind=torch.optim.SGD):
    masters = float32_masters(model)
    named = [(n, masters.get(p, p)) for n, p in model.named_parameters()]
    parts = [[p for n, p in named if not is_expert(n)], [p for n, p in named if is_expert(n)]]
    optimizers = [kind(part, lr=0.1) for part in (parts if split else [parts[0] + parts[1]])]
    return Balancer(runtime, SETTING, optimizer=optimizers, masters=masters), optimizers, masters


def one_step(split):
    model, runtime = make()
    balancer, optimizers, masters = with_optimizers(model, runtime, split=split)
    for _ in range(2):
        loss_of(model(tokens()), 1.0).backward()
        balancer.finish_gradients(model)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    balancer.close()
    return {name: (weight.detach(), masters[weight].detach()) for name, weight in model.named_parameters()}


def test_every_optimizer_trains_its_own_masters():
    before = {name: weight.detach().clone() for name, weight in make()[0].named_parameters()}
    together, apart = one_step(False), one_step(True)
    for name, (weight, master) in apart.items():
        assert not torch.equal(weight, before[name]), f"{name} was trained"
        assert torch.equal(weight, together[name][0])
        assert torch.equal(master, together[name][1])


def test_masters_that_no_optimizer_holds_are_an_error():
    model, runtime = make()
    masters = float32_masters(model)
    held = [masters[p] for n, p in model.named_parameters() if is_expert(n)]
    with pytest.raises(InputError, match=r"no attached optimizer holds the masters of 5 parameters"):
        Balancer(runtime, SETTING, optimizer=torch.optim.SGD(held), masters=masters)
    with pytest.raises(InputError, match="no attached optimizer holds the masters"):
        Balancer(runtime, SETTING, masters=masters)


def test_summing_again_before_every_optimizer_has_stepped_is_an_error():
    model, runtime = make()
    balancer, (dense, experts), _ = with_optimizers(model, runtime, split=True)
    loss_of(model(tokens()), 1.0).backward()
    balancer.finish_gradients(model)
    dense.step()
    with pytest.raises(ExecuteError, match="summed over ranks already"):
        balancer.finish_gradients(model)
    experts.step()
    dense.zero_grad()
    experts.zero_grad()
    loss_of(model(tokens()), 1.0).backward()
    balancer.finish_gradients(model)
    loss_of(model(tokens()), 1.0).backward()
    with pytest.raises(ExecuteError, match="a backward pass ran after finish_gradients"):
        dense.step()


def test_gradients_of_a_bfloat16_model_are_summed_in_float32():
    """The mean over 1,024 equal micro-batches is the gradient of one: bfloat16 sums stop growing at 256 of them."""

    def summed(count):
        model, runtime = make()
        balancer, _, masters = with_optimizers(model, runtime, split=False)
        for _ in range(count):
            _, weights_TK = model.moe[0].router(tokens(), None)
            loss_of(weights_TK, 1.0).backward()
        balancer.finish_gradients(model)
        return masters[model.moe[0].router.weight].grad / count

    one, many = summed(1), summed(1024)
    assert one.dtype == torch.float32
    torch.testing.assert_close(many, one, rtol=1e-4, atol=1e-6 * float(one.abs().max()))
    naive = torch.zeros_like(one, dtype=torch.bfloat16)
    for _ in range(1024):
        naive += one.bfloat16()
    shares = naive.float() / 1024 / one
    assert float(shares[one != 0].median()) < 0.6, "bfloat16 would show"


def test_a_master_shares_memory_with_no_second_gradient():
    model, runtime = make()
    balancer, _, masters = with_optimizers(model, runtime, split=False)
    loss_of(model(tokens()), 1.0).backward()
    weight = model.embed.weight
    place = weight.grad.data_ptr()
    balancer.finish_gradients(model)
    assert weight.grad is None
    assert masters[weight].grad.data_ptr() == place
    assert gradient_of(weight, runtime) is masters[weight].grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_clipping_stops_at_a_gradient_that_is_not_finite(dtype):
    model, runtime = make(dtype)
    balancer, *_ = with_optimizers(model, runtime, split=False)
    loss_of(model(tokens(dtype)), 1.0).backward()
    balancer.finish_gradients(model)
    norm = gradient_norm(model, runtime)
    assert math.isfinite(norm)
    gradients = {n: gradient_of(p, runtime) for n, p in model.named_parameters()}
    gradients["moe.0.experts.down"][2, 0, 0] = math.inf
    before = {n: g.clone() for n, g in gradients.items()}
    with pytest.raises(NonFiniteError, match=r"moe\.0\.experts\.down of expert 2 \(rank 0\)"):
        clip_gradients(model, runtime, norm / 2)
    assert not math.isfinite(clip_gradients(model, runtime, norm / 2, error_if_nonfinite=False))
    assert all(torch.equal(g, before[n]) for n, g in gradients.items()), "gradients stay as they were"
    gradients["moe.0.experts.down"][2, 0, 0] = 0.0
    clip_gradients(model, runtime, norm / 4)
    assert gradient_norm(model, runtime) == pytest.approx(norm / 4, rel=1e-5)


def test_a_parameter_that_was_not_used_keeps_no_gradient():
    model, runtime = make(torch.float64)
    model.unused = nn.Linear(3, 3, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    balancer = Balancer(runtime, SETTING, optimizer=optimizer)
    before = model.unused.weight.detach().clone()
    loss_of(model(tokens(torch.float64)), 1.0).backward()
    balancer.finish_gradients(model)
    assert model.unused.weight.grad is None
    optimizer.step()
    assert torch.equal(before, model.unused.weight), "no weight decay"
    assert model.embed.weight.grad is not None


@pytest.mark.parametrize("split", [False, True])
def test_gradscaler_scales_skips_and_goes_on(split):
    model, runtime = make(torch.float16)
    balancer, optimizers, masters = with_optimizers(model, runtime, split=split)
    plain, runtime_of_plain = make(torch.float16)
    other, (optimizer,), masters_of_plain = with_optimizers(plain, runtime_of_plain, split=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    scales = []
    for step in range(3):
        scaler.scale(loss_of(model(tokens(torch.float16)), 0.01)).backward()
        if step == 1:
            model.moe[0].experts.down.grad[1, 0, 0] = math.inf
        balancer.finish_gradients(model, scaler=scaler)
        clip_gradients(model, runtime, 0.05, error_if_nonfinite=False)
        for one in optimizers:
            scaler.step(one)
        scaler.update()
        for one in optimizers:
            one.zero_grad()
        scales.append(scaler.get_scale())
        if step != 1:  # the steps without infinities, of the same gradients without a scale
            loss_of(plain(tokens(torch.float16)), 0.01).backward()
            other.finish_gradients(plain)
            clip_gradients(plain, runtime_of_plain, 0.05)
            optimizer.step()
            optimizer.zero_grad()
    assert scales == [8.0, 4.0, 8.0], "grown, halved by the infinity, grown"
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(masters[mine], masters_of_plain[theirs], rtol=2e-3, atol=1e-4)


def test_a_step_that_is_skipped_by_zero_grad_leaves_nothing_behind():
    model, runtime = make()
    balancer, (optimizer,), masters = with_optimizers(model, runtime, split=False)
    loss_of(model(tokens(seed=1)), 1.0).backward()
    balancer.finish_gradients(model)
    optimizer.zero_grad()  # not finite, say
    loss_of(model(tokens(seed=2)), 1.0).backward()
    balancer.finish_gradients(model)
    found = {name: masters[weight].grad for name, weight in model.named_parameters()}
    balancer.discard_gradients(model)
    assert all(master.grad is None for master in masters.values())
    loss_of(model(tokens(seed=2)), 1.0).backward()
    balancer.finish_gradients(model)
    assert all(torch.equal(found[name], masters[weight].grad) for name, weight in model.named_parameters())


@pytest.mark.parametrize("what", ["weight", "master", "moment"])
def test_no_checkpoint_is_written_of_what_is_not_finite(what, tmp_path):
    model, runtime = make()
    model.register_buffer("mask", torch.full((2,), -math.inf))
    balancer, (optimizer,), masters = with_optimizers(model, runtime, split=False, kind=torch.optim.AdamW)
    loss_of(model(tokens()), 1.0).backward()
    balancer.finish_gradients(model)
    optimizer.step()
    checkpoints = Checkpoints(
        folder=tmp_path, runtime=runtime, module=model, optimizer=optimizer, masters=masters, keep=1
    )
    checkpoints.save(1)
    weight = model.moe[0].router.weight
    bad = {"weight": weight, "master": masters[weight], "moment": optimizer.state[masters[weight]]["exp_avg"]}[what]
    with torch.no_grad():
        bad[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"1 tensors hold NaN or infinities, the first .*dense\.moe\.0\.router"):
        checkpoints.save(2)
    assert checkpoint_steps(tmp_path) == [1], "the good one is kept"
    checkpoints.load()
    checkpoints.save(2)
    assert checkpoint_steps(tmp_path) == [2]
    checkpoints.close()


def test_weights_from_outside_are_compared_at_the_next_sum(monkeypatch):
    model, runtime = make()
    balancer, optimizers, _ = with_optimizers(model, runtime, split=False)
    compared = []
    monkeypatch.setattr(balancer_module, "check_replicated", lambda *_: compared.append(1))

    def sums(count):
        for _ in range(count):
            loss_of(model(tokens()), 1.0).backward()
            balancer.finish_gradients(model)
            optimizers[0].step()
            optimizers[0].zero_grad()
        return len(compared)

    assert sums(1) == 1, "before the first step"
    assert sums(1) == 1, "and not before each"
    balancer.weights_changed()
    assert sums(1) == 2
    balancer.close()


def test_gradients_for_an_optimizer_that_is_not_attached_are_summed_once():
    model, runtime = make(torch.float64)
    balancer = Balancer(runtime, SETTING)
    loss_of(model(tokens(torch.float64)), 1.0).backward()
    balancer.finish_gradients(model)
    with pytest.raises(ExecuteError, match="summed over ranks already"):
        balancer.finish_gradients(model)
    balancer.discard_gradients(model)
    loss_of(model(tokens(torch.float64)), 1.0).backward()
    balancer.finish_gradients(model)
    balancer.weights_changed()
    loss_of(model(tokens(torch.float64)), 1.0).backward()
    balancer.finish_gradients(model)
    balancer.close()
