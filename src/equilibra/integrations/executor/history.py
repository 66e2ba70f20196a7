"""Standing copies and homes from the loads of past steps, where no routing is recorded ahead.

Symbols: M micro-batches, L layers, E experts, R ranks, C standing copies.

Every forward of a step notes how many pairs its router has sent to each expert; nothing is exchanged and the device is
not waited for. Before the next step ranks gather these counts once and plan the last few steps together: that is the
smoothing. Every rank counts as a node, since standing copies level whatever is a node.
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
from equilibra.core.plan import Stage, StepPlan
from equilibra.core.visit import Visit
from equilibra.execute.group import ExpertGroup
from equilibra.plan.history import rank_load_by_shares, shares_of

__all__ = ["History"]


class History:
    """The loads of past steps on one rank, and the plan in force."""

    def __init__(self, group: ExpertGroup, *, num_layers: int, num_experts: int, num_steps: int) -> None:
        self.group, self.num_experts = group, num_experts
        self.noting = False
        """whether forwards are of a step to learn from"""
        self._counts: list[list[Tensor]] = [[] for _ in range(num_layers)]
        self._past: deque[NDArray[np.int32]] = deque(maxlen=num_steps)
        self._plan: StepPlan | None = None
        self._shares_CR: NDArray[np.int32] = np.zeros((0, group.num_ranks), np.int32)
        self._seen: list[tuple[float, float]] = []

    def note(self, layer: int, counts_E: Tensor) -> None:
        """Remember this rank's counts of a forward."""
        if self.noting:
            self._counts[layer].append(counts_E)

    def past_load(self) -> tuple[StepLoad | None, bool]:
        """Collective: the load of past steps (None: nothing is known yet), and whether it has changed since."""
        noted = [torch.stack(of_layer) for of_layer in self._counts if of_layer]
        self._counts = [[] for _ in self._counts]
        counts_LME = torch.stack(noted).cpu().numpy() if noted else np.zeros((len(self._counts), 0, self.num_experts))
        counts_MLE = np.ascontiguousarray(counts_LME.transpose(1, 0, 2), np.int32)
        every = self.group.gather(counts_MLE, what="gathering the loads of a step")
        ranks = self.group.num_ranks
        groups = [np.stack(every[at : at + ranks], axis=3) for at in range(0, len(every), ranks)]
        tokens_MLER = np.ascontiguousarray(np.concatenate(groups))
        new = bool(tokens_MLER.size)
        if new:
            load = StepLoad(tokens_MLER=tokens_MLER)
            planned = static_imbalance(load)
            if self._plan is not None:
                planned = float(imbalance(rank_load_by_shares(load, self._plan, self._shares_CR)).mean())
            self._seen.append((static_imbalance(load), planned))
            self._past.append(tokens_MLER)
        return (StepLoad(tokens_MLER=np.concatenate(self._past)) if self._past else None), new

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

    def take_imbalance(self) -> tuple[float, float]:
        """Slowest over mean rank of past steps, on contiguous homes and under the plans; since the last call."""
        seen, self._seen = self._seen or [(1.0, 1.0)], []
        static, planned = np.mean(seen, axis=0).tolist()
        return static, planned
