"""Random worlds for the runtime: models, routing and plans, and a plain training run to compare with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from equilibra.core.load import StepLoad
from equilibra.core.placement import Cluster, Placement
from equilibra.core.plan import Stage, StagePlan, StandingCopies, StepPlan
from equilibra.execute.experts import Activation, GroupScore, MoESpec, RouterSpec, Score
from equilibra.execute.moe import BalancedMoE, ReferenceMoE
from equilibra.execute.runtime import Runtime
from equilibra.plan.planner import StepProblem
from equilibra.trace.routing import RoutingTrace, id_dtype


def random_spec(rng: np.random.Generator, num_ranks: int) -> MoESpec:
    """Any kind of router and experts."""
    per_rank = int(rng.choice([1, 2, 3, 4]))
    experts = per_rank * num_ranks
    groups = int(rng.choice([g for g in (1, 2, 4) if experts % g == 0]))
    top_groups = int(rng.integers(1, groups + 1))
    top_k = int(rng.integers(1, min(experts // groups * top_groups, 16) + 1))
    router = RouterSpec(
        score=rng.choice(list(Score)), normalise=bool(rng.integers(2)), scale=float(rng.choice([1.0, 2.5])),
        bias=bool(rng.integers(2)), selection_bias=bool(rng.integers(2)), num_groups=groups, top_groups=top_groups,
        group_score=rng.choice(list(GroupScore)),
    )  # fmt: skip
    return MoESpec(
        hidden=int(rng.integers(2, 9)), expert_ffn=int(rng.integers(1, 7)), num_experts=experts, top_k=top_k,
        router=router, activation=rng.choice(list(Activation)), expert_bias=bool(rng.integers(2)),
        shared_ffn=int(rng.choice([0, 3])),
    )  # fmt: skip


class Stack(nn.Module):
    """A residual model of MoE layers with dense parts between them."""

    def __init__(self, layers: list[nn.Module], hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Linear(hidden, hidden, dtype=dtype)
        self.dense = nn.ModuleList([nn.Linear(hidden, hidden, dtype=dtype) for _ in layers])
        self.moe = nn.ModuleList(layers)

    def forward(self, x: Tensor, recorded_TLK: Tensor | None = None) -> Tensor:
        h = self.embed(x)
        for layer, (dense, moe) in enumerate(zip(self.dense, self.moe, strict=True)):
            h = h + torch.tanh(dense(h))
            h = h + (moe(h) if recorded_TLK is None else moe(h, recorded_TLK[:, layer]))
        return h


def reference_stack(spec: MoESpec, num_layers: int, dtype: torch.dtype, seed: int) -> Stack:
    torch.manual_seed(seed)
    stack = Stack([ReferenceMoE(spec, dtype=dtype) for _ in range(num_layers)], spec.hidden, dtype)
    for moe in stack.moe:
        if moe.router.selection_bias is not None:
            moe.router.selection_bias.normal_(std=0.1)
        moe.router.weight.data.normal_()
    return stack


def balanced_stack(reference: Stack, runtime: Runtime, dtype: torch.dtype) -> Stack:
    spec = reference.moe[0].spec
    stack = Stack([BalancedMoE(spec, runtime, dtype=dtype) for _ in reference.moe], spec.hidden, dtype)
    stack.embed.load_state_dict(reference.embed.state_dict())
    stack.dense.load_state_dict(reference.dense.state_dict())
    for mine, theirs in zip(stack.moe, reference.moe, strict=True):
        mine.load_reference(theirs)
    return stack


@dataclass(frozen=True)
class Batch:
    """Sequences of one step, each owned by a world rank."""

    tokens: list[Tensor]
    experts: list[np.ndarray]
    recorded: list[np.ndarray]
    owner: list[int]
    num_experts: int

    def routing_of(self, rank: int) -> RoutingTrace | None:
        mine = [s for s, owner in enumerate(self.owner) if owner == rank]
        if not mine:
            return None
        lengths = [len(self.experts[s]) for s in mine]
        recorded = np.concatenate([self.recorded[s] for s in mine])
        return RoutingTrace(
            ids=np.concatenate([self.experts[s] for s in mine]).astype(id_dtype(self.num_experts)),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), num_experts=self.num_experts,
            recorded=None if recorded.all() else recorded,
        )  # fmt: skip

    def data_of(self, rank: int) -> list[Tensor]:
        return [self.tokens[s] for s, owner in enumerate(self.owner) if owner == rank]

    def replay(self, s: int) -> Tensor:
        """[T, L, K] with -1 where nothing was recorded."""
        experts = self.experts[s].astype(np.int64)
        experts[~self.recorded[s]] = -1
        return torch.from_numpy(experts).to(self.tokens[s].device)

    def to(self, device: torch.device) -> Batch:
        return replace(self, tokens=[tokens.to(device) for tokens in self.tokens])


def random_batch(
    rng: np.random.Generator, spec: MoESpec, num_layers: int, world: int, *, unrecorded: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Batch:  # fmt: skip
    """Skewed routing; some experts may get no token at all, some ranks no sequence."""
    count = int(rng.integers(1, 3 * world + 2))
    owner = np.sort(rng.integers(0, world, count)).tolist()
    skew = rng.dirichlet(np.full(spec.num_experts, 0.5), num_layers)
    tokens, experts, recorded = [], [], []
    for _ in range(count):
        length = int(rng.integers(1, 13))
        ids = np.empty((length, num_layers, spec.top_k), np.int64)
        for layer in range(num_layers):
            noise = np.log(skew[layer] + 1e-12) + rng.gumbel(size=(length, spec.num_experts))
            ids[:, layer] = np.argsort(-noise, axis=1)[:, : spec.top_k]
        experts.append(ids)
        recorded.append(rng.random(length) >= unrecorded)
        tokens.append(torch.from_numpy(rng.normal(size=(length, spec.hidden))).to(dtype))
    return Batch(tokens, experts, recorded, owner, spec.num_experts)


def loss_of(out: Tensor, weight: float) -> Tensor:
    """Not the same for all coordinates, so that a wrong row shows."""
    scale = torch.arange(1, out.shape[1] + 1, dtype=out.dtype, device=out.device)
    return (out**2 * scale).sum() * weight + out.sum() * weight


@dataclass(frozen=True)
class RandomPlanner:
    """Any valid plan: homes, standing copies, flash copies and quotas drawn at random."""

    seed: int
    name: str = "random"

    def plan(self, problem: StepProblem) -> StepPlan:
        rng = np.random.default_rng([self.seed, int(problem.load.tokens_MLER.sum())])
        load, cluster = problem.load, problem.cluster
        home = problem.home_now.home_of_expert.copy()
        for layer in range(load.num_layers):
            if rng.random() < 0.6:
                home[layer] = rng.permutation(home[layer])
        standing, served = _random_standing(rng, load, home, cluster, problem.standing_slots)
        stages = {
            stage: _random_stage(rng, load, home, standing, served, cluster, problem.spare_slots) for stage in Stage
        }
        return StepPlan(
            planner=self.name, placement=Placement(home_of_expert=home, cluster=cluster), previous=problem.home_now,
            standing=standing, stages=stages, bound_LM=load.lower_bound(), schedule=problem.schedule,
        )  # fmt: skip


def _random_standing(
    rng: np.random.Generator, load: StepLoad, home: np.ndarray, cluster: Cluster, slots: int
) -> tuple[StandingCopies, set[tuple[int, int, int]]]:
    per_node, found = cluster.ranks_per_node, set()
    for layer in range(load.num_layers):
        for node in range(cluster.num_nodes):
            for _ in range(int(rng.integers(0, slots + 1))):
                expert, rank = int(rng.integers(load.num_experts)), node * per_node + int(rng.integers(per_node))
                if home[layer, expert] != rank:
                    found.add((layer, expert, rank))
    rows = np.array(sorted(found), np.int32).reshape(-1, 3)
    layer, expert, rank = (np.ascontiguousarray(column) for column in rows.T)
    return StandingCopies(layer=layer, expert=expert, rank=rank), found


def _random_stage(
    rng: np.random.Generator, load: StepLoad, home: np.ndarray, standing: StandingCopies,
    has: set[tuple[int, int, int]], cluster: Cluster, slots: int,
) -> StagePlan:  # fmt: skip
    per_node, num_ranks = cluster.ranks_per_node, cluster.num_ranks
    left = load.tokens_MLER.copy()

    def some(m: int, layer: int, expert: int) -> np.ndarray:
        take = rng.integers(0, left[m, layer, expert] + 1).astype(np.int32)
        left[m, layer, expert] -= take
        return take

    served = np.zeros((standing.num_copies, load.num_micro_batches, num_ranks), np.int32)
    for c in range(standing.num_copies):
        for m in range(load.num_micro_batches):
            served[c, m] = some(m, int(standing.layer[c]), int(standing.expert[c]))
    copies, first = [], [0]
    for layer in range(load.num_layers):
        for m in range(load.num_micro_batches):
            for rank in range(num_ranks):
                chosen = rng.permutation(load.num_experts)[: int(rng.integers(0, slots + 1))]
                for expert in chosen.tolist():
                    inside = [
                        r for r in range(rank // per_node * per_node, (rank // per_node + 1) * per_node)
                        if home[layer, expert] == r or (layer, expert, r) in has
                    ]  # fmt: skip
                    if inside and rank not in inside:
                        copies.append((expert, rank, int(rng.choice(inside)), some(m, layer, expert)))
            first.append(len(copies))
    column = lambda i: np.array([copy[i] for copy in copies], np.int32)  # noqa: E731
    tokens = np.array([copy[3] for copy in copies], np.int32).reshape(-1, num_ranks)
    return StagePlan(
        first_of_problem=np.array(first, np.int64), expert=column(0), rank=column(1), origin=column(2),
        tokens_FR=tokens, standing_tokens_CMR=served,
    )  # fmt: skip
