"""Copies of experts that are parameters of another framework, as Megatron's are, through every engine.

Experts lie in one buffer with gaps, as DDP keeps them; gradients go to `main_grad`. No Megatron is needed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from equilibra.core.load import StepLoad
from equilibra.core.placement import Cluster
from equilibra.core.plan import GroupPlan, Stage
from equilibra.core.visit import VisitKey
from equilibra.cost.rates import Rates
from equilibra.events.schema import Direction
from equilibra.execute.copies.copies import CopySetting
from equilibra.execute.copies.transfer import Path
from equilibra.execute.group import join_expert_group
from equilibra.execute.record import Recorder
from equilibra.integrations.megatron.copies import CopiesOfVisit, MegatronExperts, SharedCopies
from equilibra.integrations.planned import SlotCounts, contiguous_slots, slot_table
from equilibra.plan.planner import StepProblem, planner_named

NUM_EXPERTS, WIDTH, LAYERS = 8, 64, 2


class Experts(nn.Module):
    """Two matrices for each home expert, named as Megatron names them."""

    def __init__(self, num: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.local_experts = nn.ModuleList()
        buffer = torch.zeros(num * 2 * (WIDTH * WIDTH + 64), dtype=dtype, device=device)
        for slot in range(num):
            expert = nn.Module()
            for number, name in enumerate(("fc1", "fc2")):
                first = (2 * slot + number) * (WIDTH * WIDTH + 64)
                weight = nn.Parameter(buffer[first : first + WIDTH * WIDTH].view(WIDTH, WIDTH))
                weight.main_grad = torch.zeros(WIDTH, WIDTH, device=device)  # type: ignore[attr-defined]
                expert.register_parameter(name, weight)
            self.local_experts.append(expert)


def value_of(layer: int, expert: int, part: int) -> float:
    """A weight that tells where it belongs, exact in bfloat16."""
    return float(layer * 64 + expert * 4 + part + 1)


def copies_of_others(path: str, ranks_per_node: int, cuda: bool) -> dict[str, float]:
    """Take the copies of three micro-batches, forward and back, and return what each held; the largest errors."""
    device = torch.device("cuda" if cuda else "cpu")
    cluster = Cluster(num_nodes=torch.distributed.get_world_size() // ranks_per_node, ranks_per_node=ranks_per_node)
    with join_expert_group(cluster, timeout_s=60) as group:
        rng, homes = np.random.default_rng(0), []
        shape = (3, LAYERS, NUM_EXPERTS, cluster.num_ranks)
        load = StepLoad(tokens_MLER=rng.poisson(rng.gamma(0.4, 60, (*shape[:3], 1)), shape).astype(np.int32))
        problem = StepProblem(
            cluster=cluster, given_load=load, rates=Rates.free(), spare_slots=2, standing_slots=2, max_moves_per_layer=0
        )
        plan = planner_named("equilibra").plan(problem)
        slots = contiguous_slots(cluster, num_layers=LAYERS, num_experts=NUM_EXPERTS)
        for layer in range(LAYERS):
            module = Experts(NUM_EXPERTS // cluster.num_ranks, torch.bfloat16 if cuda else torch.float32, device)
            experts = MegatronExperts(module, layer)
            experts.expert_of_home = slots.expert_of_slot[layer, group.rank].tolist()
            for expert, parts in zip(experts.expert_of_home, experts.parts, strict=True):
                for number, part in enumerate(parts.values()):
                    part.detach().fill_(value_of(layer, expert, number))
            homes.append(experts)
        setting = CopySetting(spare_slots=2, path=dict.fromkeys(Stage, Path(path)))
        shared = SharedCopies(group, homes, setting, Recorder(group.rank, on=False), lambda _key, _direction: [])
        shared.arm(GroupPlan(plan=plan, load=load, micro_batches=[0, 1, 2]))
        wrong, held = 0.0, 0
        wanted = np.zeros((LAYERS, NUM_EXPERTS))
        order = [(m, layer) for m in range(3) for layer in range(LAYERS)]
        for direction, visits in ((Direction.FORWARD, order), (Direction.BACKWARD, order[::-1])):
            for m, layer in visits:
                key = VisitKey(Stage.UPDATE, m, layer)
                table = slot_table(
                    plan.visit(*key), slots.expert_of_slot[layer], SlotCounts(standing=2, flash=2), group.rank,
                    group.ranks_of_node,
                )  # fmt: skip
                visit = CopiesOfVisit(shared, table, homes[layer], deferred=True)
                shared.offered().settle(layer)
                visit.take(direction)
                entry = plan.visit(*key)
                mine = [*entry.standing_expert[entry.standing_rank == group.rank], *table.flash.held_expert]
                found = [*visit.standing, *visit.flash]
                assert len(found) == len(mine)
                held += len(found)
                for expert, parts in zip(mine, found, strict=True):
                    for number, part in enumerate(parts.values()):
                        wrong = max(wrong, float((part.float() - value_of(layer, int(expert), number)).abs().max()))
                if direction is Direction.BACKWARD:
                    visit.give_back([{name: torch.ones_like(part) * (m + 1) for name, part in parts.items()}
                                     for parts in found])  # fmt: skip
                    np.add.at(wanted[layer], entry.standing_expert, m + 1)
                    np.add.at(wanted[layer], entry.flash_expert, m + 1)
        shared.end()
        missed = max(
            float((part.main_grad - wanted[layer, expert]).abs().max())  # type: ignore[attr-defined]
            for layer, experts in enumerate(homes)
            for expert, parts in zip(experts.expert_of_home, experts.parts, strict=True)
            for part in parts.values()
        )
        assert shared.found is not None
        shared.found.close()
    return {
        "wrong weights": wrong, "missed gradients": missed, "held": held, "standing": plan.standing.num_copies,
        "flash": plan.stages[Stage.UPDATE].num_copies,
    }  # fmt: skip
