"""Plan a forward of a layer from what its routers have just chosen, where no routing is recorded ahead.

Symbols: E experts, R ranks.

The ranks of an expert-parallel group exchange their counts and all make the same plan on the host, in microseconds;
copies are fetched before the experts run. Nothing is kept between passes: when activations are recomputed, the same
counts give the same plan. In exchange for needing no recording, every layer waits for the counts and for its copies.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.load import imbalance
from equilibra.core.visit import Stage, Visit, VisitKey
from equilibra.cost.rates import Rates
from equilibra.execute.group import Channel, ExpertGroup
from equilibra.plan.micro_batch import balance

__all__ = ["LivePlanner"]


class LivePlanner:
    """Plans the forwards of one rank's layers."""

    def __init__(self, group: ExpertGroup, rates: Rates, *, spare_slots: int, tolerance: float) -> None:
        self.group = group
        self._options = {
            "cluster": group.cluster, "spare_slots": spare_slots, "tolerance": tolerance,
            "min_tokens_per_copy": rates.min_tokens_per_copy(Stage.UPDATE),
            "hold_rows": rates.hold_rows(Stage.UPDATE), "serve_rows": rates.serve_rows(Stage.UPDATE),
        }  # fmt: skip
        self._seen: list[tuple[float, float]] = []
        self.num_copies = 0
        """copies made so far, on all ranks"""
        self._number = -1
        """of the last forward"""

    def visit(self, layer: int, home_of_expert: NDArray[np.int32], counts_E: Tensor) -> Visit:
        """Collective over the expert-parallel group: the visit of the forward that begins. counts_E: this rank's."""
        counts_RE = counts_E.new_empty(self.group.num_ranks, counts_E.numel())
        what = f"gathering counts of MoE layer {layer}"
        self.group.all_gather(Channel.DISPATCH, counts_E[None].contiguous(), counts_RE, what=what).wait()
        tokens_ER = counts_RE.cpu().numpy().T
        found = balance(tokens_ER, home_of_expert=home_of_expert, **self._options)  # type: ignore[arg-type]
        static_R = np.bincount(home_of_expert, weights=tokens_ER.sum(axis=1), minlength=self.group.num_ranks)
        self._seen.append((float(imbalance(static_R)), found.imbalance))
        self.num_copies += found.expert_of_copy.size
        self._number += 1
        expert, rank = found.expert_of_copy.astype(np.int32), found.rank_of_copy.astype(np.int32)
        origin = home_of_expert[expert]
        order = np.lexsort((expert, origin, rank))
        return Visit(
            key=VisitKey(Stage.UPDATE, self._number, layer), home_of_expert=home_of_expert,
            standing_expert=expert[:0], standing_rank=rank[:0], standing_tokens_CR=found.tokens_FR[:0],
            flash_expert=expert[order], flash_rank=rank[order], flash_origin=origin[order],
            flash_tokens_FR=found.tokens_FR[order],
        )  # fmt: skip

    def take_imbalance(self) -> tuple[float, float]:
        """Slowest over mean rank without and with copies, averaged over the forwards since the last call."""
        seen, self._seen = self._seen or [(1.0, 1.0)], []
        static, planned = np.mean(seen, axis=0).tolist()
        return static, planned
