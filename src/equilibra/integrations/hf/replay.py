"""Replay through transformers' own routers: their top-k answers with the recorded experts.

So the weights of the recorded experts are the live router's, which learns (R3), in every family alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from equilibra.core.errors import ExecuteError

__all__ = ["route_recorded"]


def route_recorded(
    forward: Callable[[], Any], recorded_TK: Tensor, *, rows: Tensor | None, num_experts: int, layer: int
) -> Any:  # noqa: ANN401 - what the router returns
    """A router's forward that chooses what was recorded; experts below zero are routed live.

    rows: those of the router's that were recorded, None: all of them. layer: for messages.
    """
    with _Recorded(recorded_TK, rows, (num_experts, recorded_TK.shape[1])) as mode:
        said = forward()
    if mode.times != 1:
        raise ExecuteError(f"the router of MoE layer {layer} chose experts {mode.times} times, not once: no replay")
    return said


class _Recorded(TorchFunctionMode):
    """Answers the top-k over all experts with the recorded ones, and with the live ones where there are none."""

    def __init__(self, recorded_TK: Tensor, rows: Tensor | None, shape: tuple[int, int]) -> None:
        super().__init__()
        self.recorded_TK, self.rows, self.shape, self.times = recorded_TK, rows, shape, 0

    def __torch_function__(
        self, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None  # noqa: ANN401
    ) -> Any:  # noqa: ANN401  # fmt: skip
        """One call of torch."""
        kwargs = kwargs or {}
        said = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk):
            return said
        scores, wanted = args[0], args[1] if len(args) > 1 else kwargs["k"]
        if scores.ndim != 2 or (scores.shape[1], wanted) != self.shape:
            return said
        self.times += 1
        chosen = self._chosen(said.indices)
        return torch.return_types.topk((scores.gather(1, chosen), chosen))

    def _chosen(self, live_TK: Tensor) -> Tensor:
        rows = slice(None) if self.rows is None else self.rows
        chosen = live_TK.clone()
        chosen[rows] = torch.where(self.recorded_TK < 0, live_TK[rows], self.recorded_TK)
        return chosen
