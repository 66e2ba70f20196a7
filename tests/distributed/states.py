"""A small model with everything a checkpoint holds; its state is told expert by expert, so worlds can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from equilibra.core.placement import Cluster, Migration, Placement, contiguous
from equilibra.execute.experts import MoESpec, RouterSpec
from equilibra.execute.group import join_expert_group
from equilibra.execute.moe import BalancedMoE
from equilibra.execute.runtime import Runtime

LAYERS, EXPERTS, HIDDEN = 3, 8, 8
SPEC = MoESpec(
    hidden=HIDDEN, expert_ffn=6, num_experts=EXPERTS, top_k=2, expert_bias=True, shared_ffn=4,
    router=RouterSpec(selection_bias=True),
)  # fmt: skip


class Model(nn.Module):
    """Dense parts, a buffer, and MoE layers."""

    def __init__(self, runtime: Runtime, spec: MoESpec, num_layers: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Linear(spec.hidden, spec.hidden, dtype=dtype)
        self.register_buffer("scale", torch.full((spec.hidden,), 0.5, dtype=dtype))
        self.moe = nn.ModuleList([BalancedMoE(spec, runtime, dtype=dtype) for _ in range(num_layers)])

    def forward(self, tokens_TD: Tensor) -> Tensor:
        hidden = self.embed(tokens_TD) * self.scale
        for layer in self.moe:
            hidden = hidden + layer(hidden)
        return hidden


@dataclass
class World:
    """One rank's model with its optimizer."""

    runtime: Runtime
    model: Model
    optimizer: torch.optim.Optimizer
    masters: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    steps: int = 0

    def train(self, steps: int) -> None:
        """Every rank has tokens of its own; what is learned does not depend on where experts live."""
        group = self.runtime.group
        for _ in range(steps):
            for rank in range(group.world_size):
                # every rank's tokens in turn: the same sums whatever the number of ranks
                generator = torch.Generator().manual_seed(1000 * self.steps + rank)
                tokens = torch.randn(16, self.runtime.spec.hidden, generator=generator, dtype=torch.float64)
                if rank == group.world_rank:
                    mine = tokens.to(next(self.model.parameters()).dtype)
            self.model(mine).square().sum().backward()
            self.runtime.finish_gradients()
            experts = {id(part) for weights in self.runtime.weights for part in weights.parts()}
            for parameter in self.model.parameters():
                if parameter.grad is not None and id(parameter) not in experts and group.channels:
                    dist.all_reduce(parameter.grad)
            for parameter, master in self.masters.items():
                master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
            self.optimizer.step()
            with torch.no_grad():
                for parameter, master in self.masters.items():
                    parameter.copy_(master)
            self.zero_grad()
            self.runtime.weights_changed()
            self.steps += 1

    def zero_grad(self) -> None:
        self.model.zero_grad()
        self.optimizer.zero_grad()

    def digests(self) -> dict[str, str]:
        """Of every tensor of this rank, by logical name."""
        found: dict[str, str] = {}
        experts = set[int]()
        for layer, weights in enumerate(self.runtime.weights):
            for part in weights.names:
                parameter = weights.get_parameter(part)
                experts.add(id(parameter))
                for name, tensor in self.named_state(parameter):
                    for slot, expert in enumerate(weights.experts.tolist()):
                        one = tensor[slot] if tensor.ndim else tensor
                        found[f"{layer}.{expert}.{part}{name}"] = digest(one)
        for key, value in self.model.state_dict(keep_vars=True).items():
            if id(value) not in experts and not key.endswith("_extra_state"):
                for name, tensor in self.named_state(value):
                    found[f"{key}{name}"] = digest(tensor)
        return found

    def named_state(self, parameter: Tensor) -> Iterable[tuple[str, Tensor]]:
        """The parameter, its master, and what the optimizer keeps of it."""
        yield "", parameter
        master = self.masters.get(parameter, parameter)
        if master is not parameter:
            yield ".master", master
        for name, value in self.optimizer.state.get(master, {}).items():
            yield f".{name}", value


def digest(tensor: Tensor) -> str:
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw + str(tensor.dtype).encode() + str(list(tensor.shape)).encode()).hexdigest()[:16]


def merged(parts: Iterable[dict[str, str]]) -> dict[str, str]:
    """What all ranks said; where two have the same, they must agree."""
    found: dict[str, str] = {}
    for part in parts:
        for name, value in part.items():
            assert found.setdefault(name, value) == value, name
    return found


def make_world(
    num_nodes: int, ranks_per_node: int, *, placement_seed: int | None = None, seed: int = 0, masters: bool = False,
    dtype: torch.dtype = torch.float64, spec: MoESpec = SPEC, num_layers: int = LAYERS, timeout_s: float = 20.0,
    foreach: bool = False,
) -> World:  # fmt: skip
    """The same model whatever the ranks: parameters are drawn per expert. All ranks call it."""
    cluster = Cluster(num_nodes=num_nodes, ranks_per_node=ranks_per_node)
    group = join_expert_group(cluster, timeout_s=timeout_s)
    runtime = Runtime(group, placement(cluster, placement_seed, spec=spec, num_layers=num_layers))
    torch.manual_seed(seed)
    model = Model(runtime, spec, num_layers, dtype)
    generator = torch.Generator().manual_seed(seed)
    experts = {id(part) for weights in runtime.weights for part in weights.parts()}
    with torch.no_grad():
        for layer, weights in enumerate(runtime.weights):
            for expert in range(spec.num_experts):
                for part in weights.names:
                    values = torch.randn(weights.layout.shapes[part], generator=generator, dtype=torch.float64) * 0.3
                    if runtime.placement.home_of_expert[layer, expert] == group.rank:
                        weights.get_parameter(part)[weights.slot_of(expert)].copy_(values)
        for key, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in experts and not key.endswith("_extra_state"):
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.3)
    copies: dict[nn.Parameter, Tensor] = {}
    if masters:
        wide = torch.float32 if dtype == torch.bfloat16 else torch.float64
        copies = {parameter: parameter.detach().to(wide).clone().requires_grad_() for parameter in model.parameters()}
    optimized = list(copies.values()) or list(model.parameters())
    optimizer = torch.optim.AdamW(optimized, lr=1e-2, foreach=foreach)
    return World(runtime, model, optimizer, copies)


def placement(
    cluster: Cluster, seed: int | None, *, spec: MoESpec = SPEC, num_layers: int = LAYERS, still: int | None = None
) -> Placement:
    """Even homes at random, other ones in every layer; `still` is a layer that stays contiguous."""
    plain = contiguous(cluster, num_layers=num_layers, num_experts=spec.num_experts)
    if seed is None:
        return plain
    rng, home = np.random.default_rng(seed), plain.home_of_expert.copy()
    for layer in range(num_layers):
        home[layer] = rng.permutation(home[layer]) if layer != still else home[layer]
    return Placement(home_of_expert=home, cluster=cluster)


def to(world: World, seed: int | None, *, still: int | None = None) -> Migration:
    """From where homes are."""
    before = world.runtime.placement
    after = placement(before.cluster, seed, spec=world.runtime.spec, num_layers=before.num_layers, still=still)
    return Migration(before=before, after=after)
