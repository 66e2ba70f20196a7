"""Instances of experts on expert processes: homes, copies of hot experts, and which instance serves which pair.

Symbols: L MoE layers, E experts, N expert processes, I most instances of an expert, P pairs.

Homes are contiguous and fixed. Copies fill a fixed number of spare slots per layer and process. They are planned from
the tokens of every expert as for a training micro-batch: `balance`, with expert processes as ranks. The planned tokens
of an instance become its share. The n-th pair of an expert goes to the instance whose part of [0, 1) contains the
fractional part of n times the golden ratio; these numbers fill the interval evenly, so shares hold for any run of
pairs, however short.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.core.placement import Cluster
from equilibra.plan.one_layer import balance

GOLDEN = 0.6180339887498949
"""fractional part of the golden ratio: its multiples fill the interval most evenly"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Instances:
    """The instances of every expert, and their shares."""

    process_LEI: NDArray[np.int32]
    """process of each instance, homes first; unused entries repeat the home"""
    until_LEI: NDArray[np.float64]
    """share of pairs up to and with this instance; 1 for the last and for unused entries"""
    num_processes: int

    @property
    def home_LE(self) -> NDArray[np.int32]:
        return self.process_LEI[:, :, 0]

    def experts_on(self, process: int, layer: int) -> list[int]:
        """Experts with an instance on a process."""
        return np.flatnonzero((self.process_LEI[layer] == process).any(axis=1)).tolist()

    def copies_on(self, process: int, layer: int) -> list[int]:
        """Experts with an instance on a process that is not their home."""
        return [e for e in self.experts_on(process, layer) if self.home_LE[layer, e] != process]

    def choose(self, layer: int, expert_P: NDArray[np.integer], count_E: NDArray[np.int64]) -> NDArray[np.int32]:
        """Process of each pair. `count` [E] holds the pairs of each expert so far and is advanced."""
        order = np.argsort(expert_P, kind="stable")
        sizes = np.bincount(expert_P, minlength=count_E.size)
        within = np.arange(expert_P.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        number_P = np.empty(expert_P.size, np.int64)
        number_P[order] = within
        at_P = (number_P + count_E[expert_P]) * GOLDEN % 1.0
        count_E += sizes
        which_P = (at_P[:, None] >= self.until_LEI[layer, expert_P]).sum(axis=1)
        chosen: NDArray[np.int32] = self.process_LEI[layer, expert_P, which_P]
        return chosen


def homes_only(num_layers: int, num_experts: int, num_processes: int) -> Instances:
    """Every expert at home, without copies."""
    if not 1 <= num_processes <= num_experts:
        raise InputError(
            f"cannot spread {num_experts} experts over {num_processes} expert processes: use at most {num_experts}"
        )
    home_E = (np.arange(num_experts) * num_processes // num_experts).astype(np.int32)
    shape = num_layers, num_experts, 1
    return Instances(
        process_LEI=np.broadcast_to(home_E[:, None], shape).copy(), until_LEI=np.ones(shape),
        num_processes=num_processes,
    )  # fmt: skip


def plan_instances(tokens_LE: NDArray[np.integer], num_processes: int, *, spare_slots: int) -> Instances:
    """Homes, and copies for these token counts, at most `spare_slots` per layer and process."""
    num_layers, num_experts = tokens_LE.shape
    base = homes_only(num_layers, num_experts, num_processes)
    if spare_slots == 0 or num_processes == 1:
        return base
    found = [_of_layer(tokens_E, base.home_LE[0], num_processes, spare_slots) for tokens_E in tokens_LE]
    most = max(len(instances) for layer in found for instances in layer)
    process = np.repeat(base.process_LEI, most, axis=2)
    until = np.ones((num_layers, num_experts, most))
    for layer, of_expert in enumerate(found):
        for expert, instances in enumerate(of_expert):
            process[layer, expert, : len(instances)] = [one for one, _ in instances]
            until[layer, expert, : len(instances) - 1] = np.cumsum([share for _, share in instances])[:-1]
    return Instances(process_LEI=process, until_LEI=until, num_processes=num_processes)


def _of_layer(
    tokens_E: NDArray[np.integer], home_E: NDArray[np.int32], num_processes: int, spare_slots: int
) -> list[list[tuple[int, float]]]:
    """(process, share) of every expert's instances, home first; tokens are spread evenly over source ranks."""
    spread_EN = tokens_E[:, None] // num_processes + (np.arange(num_processes) < tokens_E[:, None] % num_processes)
    cluster = Cluster(num_nodes=1, ranks_per_node=num_processes)
    plan = balance(spread_EN.astype(np.int32), cluster=cluster, home_of_expert=home_E, spare_slots=spare_slots)
    served = plan.tokens_FR.sum(axis=1)
    found = [[(int(home), 1.0)] for home in home_E]
    for expert, process, tokens in zip(plan.expert_of_copy, plan.rank_of_copy, served, strict=True):
        if tokens > 0:
            share, (home, at_home) = float(tokens) / float(tokens_E[expert]), found[expert][0]
            found[expert].append((int(process), share))
            found[expert][0] = (home, at_home - share)
    return found
