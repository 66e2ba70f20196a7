"""The planner protocol, the problem planners solve, planners by name, and the setting with which a run plans.

`registry` adds the planners we ship.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from hashlib import sha256
from importlib import import_module
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import PlanLimits, check_text
from equilibra.core.errors import InputError
from equilibra.core.load import Schedule, SequenceLoad, StepLoad, check_mini_batches, step_load
from equilibra.core.model import MoEModel
from equilibra.core.placement import Cluster, Placement, contiguous
from equilibra.core.plan import StepPlan
from equilibra.cost.presets import AUTO, prices_of
from equilibra.cost.prices import Prices
from equilibra.cost.rates import Rates, rates_for

__all__ = [
    "Planner", "PlannerSetting", "StepProblem", "Timing", "online_us_of", "planner_named", "planner_names", "register",
    "respects_nodes", "respects_slots", "timing_of",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class StepProblem(PlanLimits):
    """One step to plan: values only, no clocks, devices or process groups, so every rank makes the same plan."""

    cluster: Cluster
    given_load: StepLoad | None = None
    """the load of fixed micro-batches; None: derived from sequences and schedule"""
    sequences: SequenceLoad | None = None
    """the sequences, for planners that pack"""
    schedule: Schedule | None = None
    """the framework's schedule; planners that do not pack keep it"""
    mini_batch_of_sequence: NDArray[np.integer] | None = None
    """[S] optimizer step of each sequence, which the schedule must respect; None: all 0"""
    tokens_per_rank: int | None = None
    """token budget of a (micro-batch, rank), for planners that pack"""
    least_micro_batches: int = 1
    """fewest micro-batches per mini-batch, for planners that pack; empty ones are left out"""
    previous: Placement | None = None
    """homes before the step; None: contiguous"""
    history_LE: NDArray[np.int64] | None = None
    """[L, E] loads of the previous step, for planners that use history"""
    rates: Rates
    """costs of rows, copies and moves"""

    __eq__, __hash__ = object.__eq__, object.__hash__  # not inherited from the limits

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.given_load is None) == (self.sequences is None or self.schedule is None):
            raise InputError("a step problem needs either given_load, or sequences with a schedule")
        if self.load.num_ranks != self.cluster.num_ranks:
            raise InputError(
                f"loads of {self.load.num_ranks} source ranks do not fit a cluster of {self.cluster.num_ranks} ranks"
            )
        self.cluster.experts_per_rank(self.load.num_experts)
        if self.previous is not None:
            shape = self.previous.home_of_expert.shape
            if shape != (self.load.num_layers, self.load.num_experts) or self.previous.cluster != self.cluster:
                raise InputError(f"the previous placement {shape} belongs to another model or cluster")
        if self.mini_batch_of_sequence is not None:
            self._check_mini_batches(self.mini_batch_of_sequence)

    def _check_mini_batches(self, mini_batch_of_sequence: NDArray[np.integer]) -> None:
        if self.sequences is None or self.schedule is None:
            raise InputError("mini_batch_of_sequence needs sequences and a schedule, not a fixed load")
        check_mini_batches(mini_batch_of_sequence, self.sequences.num_sequences)
        other = np.flatnonzero(self.schedule.mini_batch_of_sequence != mini_batch_of_sequence)
        if other.size:
            s = int(other[0])
            raise InputError(
                f"sequence {s} is in mini-batch {mini_batch_of_sequence[s]}, but the schedule puts it in mini-batch "
                f"{self.schedule.mini_batch_of_sequence[s]}: schedule each mini-batch separately and join "
                "the schedules (equilibra.plan.pack.joined)"
            )

    @cached_property
    def load(self) -> StepLoad:
        """The load under the given schedule."""
        if self.given_load is not None:
            return self.given_load
        assert self.sequences is not None
        assert self.schedule is not None
        return step_load(self.sequences, self.schedule, self.cluster)

    def load_under(self, schedule: Schedule | None) -> StepLoad:
        """The load under another schedule, such as a plan's."""
        if schedule is None or schedule is self.schedule or self.sequences is None:
            return self.load
        return step_load(self.sequences, schedule, self.cluster)

    @cached_property
    def home_now(self) -> Placement:
        if self.previous is not None:
            return self.previous
        return contiguous(self.cluster, num_layers=self.load.num_layers, num_experts=self.load.num_experts)


class Timing(StrEnum):
    """When a planner decides, and therefore what the step waits for."""

    AHEAD = "ahead"
    """before the step, by replayed routing: split sizes are known, copies are prefetched"""
    FIXED = "fixed"
    """before the step, by history or totals: every layer still exchanges counts"""
    ONLINE = "online"
    """in every layer, after its router: the step waits for planning and copies"""


class Planner(Protocol):
    """One method: a problem in, a plan out.

    A planner that ignores a limit sets the class attribute `respects_slots = False` or `respects_nodes = False`, which
    the functions of these names read. The contract suite (tests/contracts) holds all others to the limits.
    """

    @property
    def name(self) -> str:
        """Its name in the registry and in plans."""
        ...

    def plan(self, problem: StepProblem) -> StepPlan:
        """The plan of the step; the same problem gives the same plan on every machine."""
        ...


def respects_slots(planner: Planner) -> bool:
    """Whether no rank holds more copies than the problem allows.

    That is spare_slots flash copies at a time and standing_slots standing copies per node and layer; for planners whose
    redundant experts stay all step, spare_slots experts per layer above an even share of homes.
    """
    return bool(getattr(planner, "respects_slots", True))


def respects_nodes(planner: Planner) -> bool:
    """Whether flash copies stay on the node they are copied from."""
    return bool(getattr(planner, "respects_nodes", True))


def timing_of(planner: Planner) -> Timing:
    """When the planner decides: its class attribute `timing`, AHEAD by default."""
    return Timing(getattr(planner, "timing", Timing.AHEAD))


def online_us_of(planner: Planner) -> float:
    """Microseconds that an online planner takes in every layer: its class attribute `online_us`."""
    return float(getattr(planner, "online_us", 0.0))


_PLANNERS: dict[str, Callable[[], Planner]] = {}


def register(name: str, make: Callable[[], Planner]) -> None:
    """Add a planner under a name."""
    if name in _PLANNERS:
        raise InputError(f"a planner named {name!r} is registered already")
    _PLANNERS[name] = make


def planner_names() -> list[str]:
    """Names of all planners."""
    return list(_all_planners())


def planner_named(name: str) -> Planner:
    """The planner of that name; InputError that lists the names if there is none."""
    planners = _all_planners()
    if name not in planners:
        raise InputError(f"no planner is named {name!r}; use one of {', '.join(planners)}")
    return planners[name]()


def _all_planners() -> dict[str, Callable[[], Planner]]:
    """All planners. Those we ship are imported late: they import this file, and their kernels load slowly."""
    import_module("equilibra.plan.registry")
    return _PLANNERS


@dataclass(frozen=True, kw_only=True)
class PlannerSetting(PlanLimits):
    """How a run plans its steps: planner, limits and prices, the same on every rank."""

    planner: str | Planner = "equilibra"
    """planner or its name; "static" turns balancing off: contiguous homes, no copies"""
    hardware: str | Prices = AUTO
    """prices: a preset; a file written by `equilibra doctor` or `calibrate`; or auto, the GPU's preset (for an unknown
    device an H200's, with copies that cost no more than their rows)"""
    rates: Rates | None = None
    """costs of rows, copies and moves, instead of those derived from the hardware"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.planner, str):
            planner_named(self.planner)
        elif not hasattr(self.planner, "plan"):
            raise InputError(f"planner must be a name or a Planner, not {self.planner!r}")
        if not isinstance(self.hardware, Prices):
            check_text(f"{self.section}hardware", self.hardware)

    @property
    def chosen_planner(self) -> Planner:
        return planner_named(self.planner) if isinstance(self.planner, str) else self.planner

    def on(self, device_name: str | None) -> Self:
        """The setting with auto resolved for a device as the driver names it (None: no GPU)."""
        return self if self.rates else replace(self, hardware=prices_of(self.hardware, device_name))

    def prices_hash(self) -> str:
        """A hash of the prices, for ranks to compare."""
        return sha256(repr(self.rates or prices_of(self.hardware)).encode()).hexdigest()

    def rates_of(self, model: MoEModel, *, num_nodes: int) -> Rates:
        """The planner's rates for a model."""
        return self.rates or rates_for(model, prices_of(self.hardware), num_nodes=num_nodes)
