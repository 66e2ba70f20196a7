"""Plans without recorded routing: from what the routers have just chosen, from the loads of past steps, or from both.

Symbols: M micro-batches, L layers, E experts, R ranks, C standing copies.

`PastLoads`: every forward of a step notes how many pairs its router has sent to each expert, without exchanging
anything or waiting for the device. Before the next step ranks gather these counts once, and plan the last few steps
together, which smooths them.

`LivePlanner`: the ranks of an expert-parallel group exchange the counts of each forward, and all make the same plan on
the host, in microseconds; flash copies are fetched before the experts run. Nothing is kept between passes: recomputed
activations have the same counts, hence the same plan. The price: every layer waits for the counts and for its copies.
On several nodes it splits tokens over standing copies too, which past loads chose and which are fetched once a step.

`SharePlanner`: nothing is exchanged while a step runs. Every rank counts as a node, since standing copies balance
nodes, and a copy takes a fixed share of every source's tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.load import StepLoad, imbalance, static_imbalance
from equilibra.core.plan import StandingCopies, StepPlan
from equilibra.core.visit import Stage, Visit, VisitKey
from equilibra.cost.rates import Rates
from equilibra.events.schema import Direction
from equilibra.execute.group import Channel, ExpertGroup
from equilibra.execute.record import direction_now
from equilibra.integrations.executor.balancer import gather_counts
from equilibra.plan.history import rank_load_by_shares, shares_of
from equilibra.plan.one_layer import OneLayer

NO_COPIES: NDArray[np.int32] = np.zeros(0, np.int32)


class Observed:
    """Keeps the imbalance of what ran, with static placement and under the plans."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self.num_seen, self._sums = 0, np.zeros(2)

    def _see(self, static: float, planned: float) -> None:
        self.num_seen += 1
        self._sums += static, planned

    def take_imbalance(self) -> tuple[float, float]:
        """Slowest over mean rank, static and planned, averaged since the last call; 1 where nothing has run."""
        static, planned = (self._sums / self.num_seen).tolist() if self.num_seen else (1.0, 1.0)
        self._forget()
        return static, planned


class LivePlanner(Observed):
    """Plans the forwards of one rank's layers."""

    def __init__(
        self, group: ExpertGroup, rates: Rates, *, num_layers: int, spare_slots: int, tolerance: float
    ) -> None:
        super().__init__()
        self.group = group
        self._standing = [(NO_COPIES, NO_COPIES)] * num_layers
        """expert and rank of the copies in force, by layer"""
        self._layers: dict[int, OneLayer] = {}
        """those that have run with these copies"""
        self._options = {
            "cluster": group.cluster, "spare_slots": spare_slots, "tolerance": tolerance,
            "min_tokens_per_copy": rates.min_tokens_per_copy(Stage.UPDATE),
            "hold_rows": rates.hold_rows(Stage.UPDATE), "serve_rows": rates.serve_rows(Stage.UPDATE),
        }  # fmt: skip
        self.num_copies = 0
        """copies made so far, on all ranks"""
        self._number = -1
        """number of the last forward"""

    def stand(self, copies: StandingCopies) -> None:
        """Split the tokens of later forwards over these copies too."""
        for layer in range(len(self._standing)):
            of_layer = copies.layer == layer
            self._standing[layer] = copies.expert[of_layer], copies.rank[of_layer]
        self._layers.clear()

    def visit(self, layer: int, home_of_expert: NDArray[np.int32], counts_E: Tensor) -> Visit:
        """Collective over the expert-parallel group: the visit of the forward that begins. counts_E: this rank's."""
        counts_RE = counts_E.new_empty(self.group.num_ranks, counts_E.numel())
        what = f"gathering counts of MoE layer {layer}"
        self.group.all_gather(Channel.DISPATCH, counts_E[None].contiguous(), counts_RE, what=what).wait()
        tokens_ER = counts_RE.cpu().numpy().T
        standing_expert, standing_rank = self._standing[layer]
        if layer not in self._layers:
            self._layers[layer] = OneLayer(
                len(tokens_ER), home_of_expert=home_of_expert, standing_expert=standing_expert,
                standing_rank=standing_rank, **self._options,  # type: ignore[arg-type]
            )  # fmt: skip
        found = self._layers[layer].balance(tokens_ER)
        static_R = np.bincount(home_of_expert, weights=tokens_ER.sum(axis=1), minlength=self.group.num_ranks)
        self._see(float(imbalance(static_R)), found.imbalance)
        self.num_copies += found.expert_of_copy.size
        self._number += 1
        flash = np.stack([found.expert_of_copy, found.rank_of_copy, found.origin_of_copy]).astype(np.int32)
        expert, rank, origin = flash
        order = np.lexsort((expert, origin, rank))
        return Visit(
            key=VisitKey(Stage.UPDATE, self._number, layer), home_of_expert=home_of_expert,
            standing_expert=standing_expert, standing_rank=standing_rank, standing_tokens_CR=found.standing_tokens_CR,
            flash_expert=expert[order], flash_rank=rank[order], flash_origin=origin[order],
            flash_tokens_FR=found.tokens_FR[order],
        )  # fmt: skip


class PastLoads:
    """The loads of past steps on one rank."""

    def __init__(self, group: ExpertGroup, *, num_layers: int, num_experts: int, num_steps: int) -> None:
        self.group, self.num_experts = group, num_experts
        self.noting = False
        """whether the forwards that run belong to a step to learn from"""
        self._counts: list[list[Tensor]] = [[] for _ in range(num_layers)]
        self._past: deque[NDArray[np.int32]] = deque(maxlen=num_steps)

    def note(self, layer: int, counts_E: Tensor) -> None:
        """Note a forward, unless backward repeats it."""
        if self.noting and direction_now() is Direction.FORWARD:
            self._counts[layer].append(counts_E)

    def gather(self) -> StepLoad | None:
        """Collective: the load of the step that has ended; None if nothing was noted."""
        counts_LME = np.zeros((len(self._counts), 0, self.num_experts))
        if num := min(map(len, self._counts), default=0):  # a pass that was cut off has fewer in later layers
            counts_LME = torch.stack([torch.stack(of_layer[:num]) for of_layer in self._counts]).cpu().numpy()
        self._counts = [[] for _ in self._counts]
        counts_MLE = np.ascontiguousarray(counts_LME.transpose(1, 0, 2), np.int32)
        tokens_MLER = gather_counts(self.group, counts_MLE, what="gathering the loads of a step")
        if not tokens_MLER.size:
            return None
        self._past.append(tokens_MLER)
        return StepLoad(tokens_MLER=tokens_MLER)

    def together(self) -> StepLoad:
        """The micro-batches of all steps that are kept."""
        return StepLoad(tokens_MLER=np.concatenate(self._past))


class SharePlanner(Observed):
    """Follows a plan of past loads: a standing copy takes a fixed share of an expert's tokens."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self._plan: StepPlan | None = None
        self._shares_CR: NDArray[np.int32] = np.zeros((0, num_ranks), np.int32)

    def observe(self, load: StepLoad) -> None:
        """Note how even a step was that has ended."""
        planned = static_imbalance(load)
        if self._plan is not None:
            planned = float(imbalance(rank_load_by_shares(load, self._plan, self._shares_CR)).mean())
        self._see(static_imbalance(load), planned)

    def follow(self, plan: StepPlan, load: StepLoad) -> Mapping[int, Visit]:
        """Put a plan of past loads in force; by layer, its visit with shares of SCALE in place of tokens."""
        self._plan, self._shares_CR = plan, shares_of(plan, load)
        visits, standing = {}, plan.standing
        for layer in range(plan.num_layers):
            of_layer = np.flatnonzero(standing.layer == layer)
            visits[layer] = replace(
                plan.visit(Stage.UPDATE, 0, layer), standing_expert=standing.expert[of_layer],
                standing_rank=standing.rank[of_layer], standing_tokens_CR=self._shares_CR[of_layer],
            )  # fmt: skip
        return visits
