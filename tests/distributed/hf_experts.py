"""A model of transformers with sharded experts against the same model as transformers computes it, on every rank."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from equilibra.core.placement import Cluster
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.execute import CopySetting, join_expert_group
from equilibra.execute.steps.balancer import Balancer, BalancerSetting
from equilibra.integrations.hf import build_model, family_of, open_model_folder, shard_experts
from equilibra.integrations.hf.folder import norms_in_float64
from equilibra.rl.vocabulary import padded
from equilibra.trace.routing import RoutingTrace

LENGTHS = (5, 9, 3, 7, 6, 8)
EXPERTS, VOCABULARY = 8, 300
CPU = torch.device("cpu")


def plain(folder: Path, dtype: torch.dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()
    model.set_experts_implementation("eager")
    norms_in_float64(model, dtype)
    return model


def sequences():
    random = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCABULARY, (length,), generator=random) for length in LENGTHS]


def hidden(model, tokens, mask):
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model.model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state


def loss_of(run, parts):
    """Of some sequences in a rectangle with padding; the rows of their tokens too."""
    inputs = padded([(torch.cat([tokens, tokens[:1]]), 1) for tokens in parts], 0, CPU)
    return inputs, lambda: weighted(run(inputs.tokens_BT, inputs.mask_BT).flatten(0, 1)[inputs.rows])


def weighted(states):
    """A loss that the last norm does not make constant."""
    return (states * torch.linspace(0.1, 2.0, states.shape[-1], dtype=states.dtype)).square().sum()


def recorded(model, parts, shift):
    """[T, L, K] experts of each sequence, as the model chooses them, all moved on by `shift`."""
    seen = []
    blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    routers = [getattr(block, family_of(model.config.model_type).router) for block in blocks]
    hooks = [router.register_forward_hook(lambda _m, _i, out: seen.append(out[2])) for router in routers]
    found = []
    with torch.no_grad():
        for tokens in parts:
            seen.clear()
            hidden(model, tokens[None], torch.ones_like(tokens)[None])
            found.append(((torch.stack(seen, dim=1) + shift) % EXPERTS).numpy().astype(np.uint8))
    for hook in hooks:
        hook.remove()
    return found


def planned(model, run, runtime, group, ids, parts):
    """Loss of this rank, gradients under a plan that copies and moves."""
    setting = BalancerSetting(tokens_per_rank=16, planner="equilibra", standing_slots=0, rates=Rates.free())
    balancer = Balancer(runtime, setting, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    mine = range(group.world_rank, len(parts), group.world_size)
    routing = RoutingTrace(
        ids=np.concatenate([ids[s] for s in mine]), offsets=np.cumsum([0, *(len(ids[s]) for s in mine)]),
        num_experts=EXPERTS,
    )  # fmt: skip
    step = balancer.begin(routing)
    data = dict(zip(step.sequences.tolist(), step.send([parts[s] for s in mine]), strict=True))
    total = 0.0
    for micro_batch in step.micro_batches(Stage.UPDATE):
        with micro_batch:
            inputs, loss = loss_of(run, [data[s] for s in micro_batch.sequences.tolist()])
            micro_batch.rows = inputs.rows
            value = loss()
            value.backward()
            total += float(value.detach())
    balancer.finish_gradients(model)
    copies = step.plan.stages[Stage.UPDATE].num_copies
    balancer.close()
    return total, copies


def live(model, runtime, group, parts):
    """The same without any plan: tokens go to the homes of their experts."""
    balancer = Balancer(runtime, BalancerSetting(tokens_per_rank=64), optimizer=None)
    _, loss = loss_of(lambda t, m: hidden(model, t, m), parts[group.world_rank :: group.world_size])
    value = loss()
    value.backward()
    balancer.finish_gradients(model)
    balancer.close()
    return float(value.detach())


def gap(found, wanted):
    return float((found - wanted).abs().max() / (wanted.abs().max() + 1e-30))


def gaps(model, runtime, reference):
    """Largest relative difference of any gradient from those of the whole model."""
    worst = 0.0
    theirs = dict(reference.named_parameters())
    for name, value in model.named_parameters():
        if ".homes." not in name and name in theirs and theirs[name].grad is not None:
            worst = max(worst, gap(value.grad, theirs[name].grad))
    blocks = [layer.mlp.experts for layer in reference.model.layers if hasattr(layer.mlp, "experts")]
    for weights, whole in zip(runtime.weights, blocks, strict=True):
        homes = torch.from_numpy(weights.experts.astype(np.int64))
        for name in weights.names:
            worst = max(worst, gap(weights.get_parameter(name).grad, gradient_of(whole, name)[homes]))
    return worst


def gradient_of(experts, name):
    """[E, ...] in our shapes; those of gpt-oss are transposed, with gate and up in turn."""
    gradient = getattr(
        experts, {"gate_up": "gate_up_proj", "down": "down_proj"}.get(name, name.replace("_bias", "_proj_bias"))
    ).grad
    if not hasattr(experts, "down_proj_bias"):
        return gradient
    if name.startswith("gate_up"):
        gradient = torch.cat([gradient[..., ::2], gradient[..., 1::2]], dim=-1)
    return gradient if name.endswith("_bias") else gradient.transpose(1, 2)


def check(folder: Path, ranks: int, dtype: torch.dtype, checkpointing: bool) -> dict[str, float]:
    group = join_expert_group(Cluster(num_nodes=1, ranks_per_node=ranks), timeout_s=100)
    parts, copies = sequences(), CopySetting(spare_slots=2)
    reference = plain(folder, dtype)
    wanted = 0.0
    for tokens in parts:
        value = weighted(hidden(reference, tokens[None], torch.ones_like(tokens)[None]))
        value.backward()
        wanted += float(value.detach())

    def total(value):
        return float(sum(part.sum() for part in group.gather(np.array([value]), what="losses")))

    found = {}
    for name in ("live", "planned", "shifted"):
        model = plain(folder, dtype)
        if checkpointing and name != "live":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        runtime = shard_experts(model, group, copies)
        if name == "live":
            loss = live(model, runtime, group, parts)
        else:
            ids = recorded(reference, parts, 0 if name == "planned" else 3)
            loss, found["copies"] = planned(model, lambda t, m, of=model: hidden(of, t, m), runtime, group, ids, parts)
        found[f"{name} loss"] = total(loss) / wanted - 1.0
        if name != "shifted":
            found[f"{name} gradients"] = gaps(model, runtime, reference)
    blocks = build_model(open_model_folder(folder), group, copies, seed=0, dtype=dtype, device=CPU)
    other, _ = planned(blocks, blocks.hidden, blocks.runtime, group, recorded(reference, parts, 3), parts)
    found["shifted loss against build_model"] = total(other) / wanted - 1.0 - found["shifted loss"]
    mine, theirs = runtime.weights, blocks.runtime.weights
    found["shifted gradients against build_model"] = max(
        gap(one.get_parameter(part).grad, two.get_parameter(part).grad)
        for one, two in zip(mine, theirs, strict=True) for part in one.names
    )  # fmt: skip
    return found
