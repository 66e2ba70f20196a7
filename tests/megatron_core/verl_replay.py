"""A stand-in for verl's RouterReplay: a list `router_instances`, a mask of replayed rows, actions of its own."""

from __future__ import annotations

from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor


class Action(Enum):
    FORWARD = "replay_forward"
    BACKWARD = "replay_backward"


class VerlReplay:
    router_instances: ClassVar[list[VerlReplay]] = []

    def __init__(self) -> None:
        self.target_topk_idx: Tensor | None = None
        self.target_replay_mask: Tensor | None = None
        self.waiting: list[tuple[Tensor, Tensor | None]] = []
        self.action: Action | None = None
        VerlReplay.router_instances.append(self)

    def set_target_indices(self, topk_indices: Tensor, replay_mask: Tensor | None = None) -> None:
        self.target_topk_idx, self.target_replay_mask = topk_indices, replay_mask
        self.waiting.append((topk_indices, replay_mask))

    def set_router_replay_action(self, action: Any) -> None:
        self.action = Action(action.value)

    def clear_indices(self) -> None:
        self.target_topk_idx = self.target_replay_mask = None
        self.waiting = []

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        if self.action is Action.FORWARD:
            chosen, mask = self.target_topk_idx, self.target_replay_mask
        else:
            chosen, mask = self.waiting.pop(0)
        if mask is not None:
            _, live = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            chosen = torch.where(mask[:, None], chosen, live)
        return scores.gather(1, chosen), chosen
