"""Rates: what a token, a copy and a move of one model cost, in microseconds, so that the planner can weigh them.

Linear on purpose: the planner needs the price of one more row, not a prediction of a step. `rates_for` derives them
from the model's shapes and the hardware's prices, and nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import ceil, isfinite

from equilibra.core.checks import check_whole
from equilibra.core.errors import InputError
from equilibra.core.model import MoEModel
from equilibra.core.plan import Stage
from equilibra.cost.presets import default_prices
from equilibra.cost.prices import MOST_ROWS, Prices

__all__ = ["MOST_ROWS", "Rates", "rates_for"]


def _free() -> dict[Stage, float]:
    return dict.fromkeys(Stage, 0.0)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Prices in microseconds. A rate of zero means free."""

    row_us: dict[Stage, float]
    """compute of one (token, expert) pair on one rank, by stage"""
    cross_row_us: float = 0.0
    """one pair that crosses nodes, both ways in all passes, on one rank's share of the network"""
    flash_copy_us: dict[Stage, float] = field(default_factory=_free)
    """one flash copy on one rank's links inside the node, by stage; gradients return in the update"""
    standing_copy_us: float = 0.0
    """weights of one standing copy once across nodes and its gradient back"""
    move_us: float = 0.0
    """one home moved across nodes, with optimizer state"""
    move_inside_us: float = 0.0
    """one home moved inside its node"""
    exposed_share: float = 0.1
    """part of a flash copy's time that prefetching does not hide"""
    link_us: dict[Stage, float] = field(default_factory=_free)
    """how long one flash copy holds a link, by stage: the update fetches it forward and backward, and its gradient
    returns"""
    gap_us: dict[Stage, float] = field(default_factory=_free)
    """what a layer and micro-batch takes besides its rows, by stage: copies are hidden in it too"""
    gap_row_us: dict[Stage, float] = field(default_factory=_free)
    """the same per row of the mean rank: dense parts, traffic across nodes, activations computed anew"""
    hold_us: dict[Stage, float] = field(default_factory=_free)
    """what one copy more costs the rank that holds it besides its rows, by stage: its weights are read, and in the
    update its gradient is written"""
    serve_us: dict[Stage, float] = field(default_factory=_free)
    """what it costs the rank it comes from, by stage: in the update the returned gradient is added"""
    move_beside_us: dict[Stage, float] = field(default_factory=_free)
    """what weights or a gradient of another layer's copy cost the rank that holds it, as they move beside this one"""
    add_beside_us: dict[Stage, float] = field(default_factory=_free)
    """what adding a returned gradient of another layer costs the rank that the copy came from"""
    tile_rows: int = 1
    """rows of an instance that kernels compute together; it counts where what moves beside a layer has a price"""
    token_cost: int = 24_576
    """what a token costs besides attention, in units of s² of a sequence of s tokens (the default: what verl uses)"""

    def __post_init__(self) -> None:
        by_stage = [one.name for one in fields(self) if one.type == "dict[Stage, float]"]
        for name in by_stage:
            if set(getattr(self, name)) != set(Stage):
                raise InputError(f"{name} needs the stages {', '.join(Stage)}, not {', '.join(getattr(self, name))}")
        numbers = [number for name in by_stage for number in getattr(self, name).values()]
        numbers += [getattr(self, one.name) for one in fields(self) if one.type == "float"]
        if not all(isfinite(number) and number >= 0 for number in numbers):
            raise InputError(f"rates must be finite and not negative: {numbers}")
        check_whole("tile_rows", self.tile_rows, low=1, high=MOST_ROWS)
        if not 0 <= self.token_cost <= 10**7:
            raise InputError(f"token_cost must be from 0 to 10 million, not {self.token_cost}")
        if min(self.row_us.values()) <= 0:
            raise InputError("a row must take more than 0 microseconds")

    @property
    def step_row_us(self) -> float:
        """One pair through both stages."""
        return sum(self.row_us.values())

    @property
    def row_slack(self) -> float:
        """How much of the mean a rank may compute more, to even out traffic across nodes; -1: traffic is free."""
        if self.cross_row_us == 0:
            return -1.0
        return 0.02 if self.cross_row_us > 2 * self.step_row_us else 0.0

    def min_tokens_per_copy(self, stage: Stage) -> int:
        """Tokens a flash copy must take off the slowest rank to save more than it costs."""
        return int(min(ceil(self.exposed_share * self.flash_copy_us[stage] / self.row_us[stage]), 2**40))

    def hold_rows(self, stage: Stage) -> int:
        """What a copy costs the rank that holds it, in whole rows."""
        return round(min(self.hold_us[stage] / self.row_us[stage], MOST_ROWS))

    def serve_rows(self, stage: Stage) -> int:
        """What a copy costs the rank it comes from, in whole rows."""
        return round(min(self.serve_us[stage] / self.row_us[stage], MOST_ROWS))

    @classmethod
    def free(cls) -> Rates:
        """Only rows cost: what balance is possible if copies and moves are free."""
        return cls(row_us=dict.fromkeys(Stage, 1.0))


def rates_for(model: MoEModel, prices: Prices | None = None, *, num_nodes: int = 1) -> Rates:
    """What a model's experts cost on a kind of machine; `presets.default_prices()` if none is given.

    Where a list has prices of our kernels, the planner levels time: rows, tiles, and what copies cost the ranks that
    hold and serve them. Without, it levels rows. Those prices are of forward and backward together, so only the update
    counts them.
    """
    machine = prices or default_prices()
    forward_us = machine.experts_forward.row_us(model, backward=False)
    backward_us = machine.experts_backward.row_us(model, backward=True)
    inside_us_per_byte, across_us_per_byte = 1e-3 / machine.flash_gb_per_s, 1e-3 / machine.nic_gb_per_s
    with_gradient = model.expert_bytes + model.expert_gradient_bytes
    squared_us = 2e-6 * model.attention_width * model.quadratic_share / machine.attention_tflops
    crossing = (num_nodes - 1) / num_nodes * 2 * model.hidden * model.weight_bytes * across_us_per_byte
    dense_us = 2e-6 * model.dense_parameters / machine.dense_tflops
    token_us = dense_us + model.top_k * (forward_us + crossing)
    between_us = dense_us / model.top_k + crossing
    update_us, kernels, expert_mb = forward_us + backward_us, machine.kernels, model.expert_bytes * 1e-6
    of_copies = {}
    if kernels is not None:
        update_us = 6e-6 * model.expert_parameters / kernels.tflops
        for name in ("hold_us", "serve_us", "move_beside_us", "add_beside_us"):
            of_copies[name] = {Stage.LOGPROB: 0.0, Stage.UPDATE: getattr(kernels, f"{name}_per_mb") * expert_mb}
    passes = 3  # log-prob forward, update forward, update backward: each dispatches and combines once
    return Rates(
        row_us={Stage.LOGPROB: forward_us, Stage.UPDATE: update_us},
        cross_row_us=passes * 2 * model.hidden * model.weight_bytes * across_us_per_byte,
        flash_copy_us={
            Stage.LOGPROB: model.expert_bytes * inside_us_per_byte,
            Stage.UPDATE: with_gradient * inside_us_per_byte,
        },
        standing_copy_us=with_gradient * across_us_per_byte,
        move_us=model.expert_home_bytes * across_us_per_byte,
        move_inside_us=model.expert_home_bytes * inside_us_per_byte,
        exposed_share=min(machine.flash_gb_per_s / machine.copy_loss_gb_per_s, 1.0),
        link_us={
            Stage.LOGPROB: model.expert_bytes * inside_us_per_byte,
            Stage.UPDATE: (model.expert_bytes + with_gradient) * inside_us_per_byte,
        },
        gap_us={
            Stage.LOGPROB: machine.experts_forward.fixed_us,
            Stage.UPDATE: 2 * machine.experts_forward.fixed_us + machine.experts_backward.fixed_us,
        },
        gap_row_us={Stage.LOGPROB: between_us, Stage.UPDATE: 3 * between_us + forward_us},
        **of_copies,
        tile_rows=kernels.tile_rows if kernels else 1,
        token_cost=int(min(token_us / max(squared_us, 1e-12), 10**7)),
    )
