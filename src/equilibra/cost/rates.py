"""Rates: what a row, a copy and a move of one model cost the planner, in microseconds.

They are linear on purpose: the planner needs the price of one more row, not a prediction of a step. Only `rates_for`
derives them, from the model's shapes and the hardware's prices.
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
    """one flash copy on a rank's links inside the node, by stage; in the update with its gradient"""
    standing_copy_us: float = 0.0
    """one standing copy: weights across nodes and the gradient back"""
    move_us: float = 0.0
    """one home moved across nodes, with optimizer state"""
    move_inside_us: float = 0.0
    """one home moved inside its node"""
    exposed_share: float = 0.1
    """share of a flash copy's time that prefetching does not hide"""
    link_us: dict[Stage, float] = field(default_factory=_free)
    """time one flash copy occupies a link, by stage; the update fetches it twice and returns its gradient"""
    gap_us: dict[Stage, float] = field(default_factory=_free)
    """time of a layer and micro-batch besides its rows, by stage; it also hides copies"""
    gap_row_us: dict[Stage, float] = field(default_factory=_free)
    """the same per row of the mean rank: dense parts, traffic across nodes, recomputed activations"""
    hold_us: dict[Stage, float] = field(default_factory=_free)
    """cost of one more copy to the rank that holds it besides its rows, by stage: reading its weights and, in the
    update, writing its gradient"""
    serve_us: dict[Stage, float] = field(default_factory=_free)
    """its cost to the rank it comes from, by stage: in the update, adding the returned gradient"""
    move_beside_us: dict[Stage, float] = field(default_factory=_free)
    """cost of moving another layer's weights or gradient during this one, to the rank that holds the copy"""
    add_beside_us: dict[Stage, float] = field(default_factory=_free)
    """cost of adding another layer's returned gradient, to the rank the copy came from"""
    tile_rows: int = 1
    """rows of an instance computed as one tile; used where moves during a layer have a price"""
    token_cost: int = 24_576
    """cost of a token besides attention, in units of s² for a sequence of s tokens (default: verl's)"""

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
        return sum(self.row_us.values())

    @property
    def row_slack(self) -> float:
        """Share of the mean by which a rank may compute more to even out traffic across nodes; -1: traffic is free."""
        if self.cross_row_us == 0:
            return -1.0
        return 0.02 if self.cross_row_us > 2 * self.step_row_us else 0.0

    def min_tokens_per_copy(self, stage: Stage) -> int:
        """Tokens a flash copy must take off the slowest rank to pay for itself."""
        return int(min(ceil(self.exposed_share * self.flash_copy_us[stage] / self.row_us[stage]), 2**40))

    def hold_rows(self, stage: Stage) -> int:
        """Cost of a copy to the rank that holds it, in whole rows."""
        return round(min(self.hold_us[stage] / self.row_us[stage], MOST_ROWS))

    def serve_rows(self, stage: Stage) -> int:
        """Cost of a copy to the rank it comes from, in whole rows."""
        return round(min(self.serve_us[stage] / self.row_us[stage], MOST_ROWS))

    @classmethod
    def free(cls) -> Rates:
        """Rates where only rows cost something: copies and moves are free."""
        return cls(row_us=dict.fromkeys(Stage, 1.0))


def rates_for(model: MoEModel, prices: Prices | None = None, *, num_nodes: int = 1) -> Rates:
    """Rates of a model's experts on a machine; `presets.default_prices()` if none is given.

    With kernel prices the planner levels time: rows, tiles, and the cost of copies to the ranks that hold and serve
    them. Without, it levels rows. Kernel prices cover forward and backward together, so they apply to the update only.
    """
    machine = prices or default_prices()
    forward_us = machine.experts_forward.row_us(model, backward=False)
    backward_us = machine.experts_backward.row_us(model, backward=True)
    inside_us_per_byte, across_us_per_byte = 1e-3 / machine.flash_gb_per_s, 1e-3 / machine.nic_gb_per_s
    with_gradient = model.expert_bytes + model.expert_gradient_bytes
    copy_us = model.expert_bytes * inside_us_per_byte
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
        flash_copy_us={Stage.LOGPROB: copy_us, Stage.UPDATE: with_gradient * inside_us_per_byte},
        standing_copy_us=with_gradient * across_us_per_byte,
        move_us=model.expert_home_bytes * across_us_per_byte,
        move_inside_us=model.expert_home_bytes * inside_us_per_byte,
        exposed_share=min(machine.flash_gb_per_s / machine.copy_loss_gb_per_s, 1.0),
        link_us={Stage.LOGPROB: copy_us, Stage.UPDATE: (model.expert_bytes + with_gradient) * inside_us_per_byte},
        gap_us={
            Stage.LOGPROB: machine.experts_forward.fixed_us,
            Stage.UPDATE: 2 * machine.experts_forward.fixed_us + machine.experts_backward.fixed_us,
        },
        gap_row_us={Stage.LOGPROB: between_us, Stage.UPDATE: 3 * between_us + forward_us},
        **of_copies,
        tile_rows=kernels.tile_rows if kernels else 1,
        token_cost=int(min(token_us / max(squared_us, 1e-12), 10**7)),
    )
