"""The protocol of all planners, the problem they solve, and their names. `registry` fills in the planners we ship."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from importlib import import_module
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from equilibra.core.cluster import Cluster
from equilibra.core.errors import InputError
from equilibra.core.limits import PlanLimits
from equilibra.core.load import Schedule, SequenceLoad, StepLoad, check_mini_batches, step_load
from equilibra.core.placement import Placement, contiguous
from equilibra.core.plan import StepPlan
from equilibra.cost.rates import Rates

__all__ = [
    "Planner",
    "StepProblem",
    "Timing",
    "online_us_of",
    "planner_named",
    "planner_names",
    "register",
    "respects_nodes",
    "respects_slots",
    "timing_of",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepProblem(PlanLimits):
    """One step to be planned. Values only: no clocks, devices or process groups, so every rank plans the same."""

    cluster: Cluster
    """the ranks"""
    given_load: StepLoad | None = None
    """the load, if micro-batches are fixed; otherwise it follows from sequences and schedule"""
    sequences: SequenceLoad | None = None
    """the sequences, for planners that pack"""
    schedule: Schedule | None = None
    """where the framework would put the sequences; planners that do not pack keep it"""
    mini_batch_of_sequence: NDArray[np.integer] | None = None
    """[S] the optimizer step each sequence is for: given, not decided; the schedule must keep to it. None: all 0"""
    tokens_per_rank: int | None = None
    """token budget of a (micro-batch, rank), for planners that pack"""
    least_micro_batches: int = 1
    """micro-batches that a planner that packs makes at least: a budget of the whole micro-batch may ask for them. With
    mini-batches it is the least of each, but for micro-batches that would be empty"""
    previous: Placement | None = None
    """homes now; contiguous if not given"""
    history_LE: NDArray[np.int64] | None = None
    """[L, E] loads of the last step, for planners that guess from history"""
    rates: Rates
    """what rows, copies and moves cost"""

    __eq__, __hash__ = object.__eq__, object.__hash__  # not those of the limits

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.given_load is None) == (self.sequences is None or self.schedule is None):
            raise InputError("a step problem needs either a load, or sequences with a schedule")
        if self.load.num_ranks != self.cluster.num_ranks:
            raise InputError(
                f"loads of {self.load.num_ranks} source ranks do not fit a cluster of {self.cluster.num_ranks} ranks"
            )
        self.cluster.experts_per_rank(self.load.num_experts)
        if self.previous is not None:
            shape = self.previous.home_of_expert.shape
            if shape != (self.load.num_layers, self.load.num_experts) or self.previous.cluster != self.cluster:
                raise InputError(f"the previous placement {shape} is of another model or cluster")
        if self.mini_batch_of_sequence is not None:
            self._check_mini_batches(self.mini_batch_of_sequence)

    def _check_mini_batches(self, mini_batch_of_sequence: NDArray[np.integer]) -> None:
        if self.sequences is None or self.schedule is None:
            raise InputError("mini-batches are of sequences: a problem with a fixed load has none")
        check_mini_batches(mini_batch_of_sequence, self.sequences.num_sequences)
        other = np.flatnonzero(self.schedule.mini_batch_of_sequence != mini_batch_of_sequence)
        if other.size:
            s = int(other[0])
            raise InputError(
                f"sequence {s} is of mini-batch {mini_batch_of_sequence[s]}, the given schedule has it in mini-batch "
                f"{self.schedule.mini_batch_of_sequence[s]}: make the schedule of each mini-batch by itself, and join "
                "them (equilibra.plan.pack.joined)"
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
        """The load under another schedule, for example the one of a plan."""
        if schedule is None or schedule is self.schedule or self.sequences is None:
            return self.load
        return step_load(self.sequences, schedule, self.cluster)

    @cached_property
    def home_now(self) -> Placement:
        """Homes before the step."""
        if self.previous is not None:
            return self.previous
        load = self.load
        return contiguous(self.cluster, num_layers=load.num_layers, num_experts=load.num_experts)


class Timing(StrEnum):
    """When a planner's decisions are made, which is what the step waits for."""

    AHEAD = "ahead"
    """from replayed routing: sizes are known before the step, copies come in time, nothing is exchanged"""
    FIXED = "fixed"
    """before the step, from history or totals: sizes are found out in every layer"""
    ONLINE = "online"
    """in every layer, after its router: planning and copies are waited for"""


class Planner(Protocol):
    """One method: a problem in, a plan out.

    A planner that ignores a limit says so with a class attribute, `respects_slots = False` or `respects_nodes = False`;
    the functions of these names read it. Planners without the attribute keep to the limit, and the contract suite
    (tests/contracts) holds them to it.
    """

    @property
    def name(self) -> str:
        """In the registry and in plans."""
        ...

    def plan(self, problem: StepProblem) -> StepPlan:
        """The plan for this step. The same problem gives the same plan, on every machine."""
        ...


def respects_slots(planner: Planner) -> bool:
    """Whether a rank never holds more copies than the problem allows.

    Either spare_slots flash copies at a time and standing_slots standing copies per node and layer, or, for planners
    whose redundant experts stay for the whole step, spare_slots experts of a layer more than its even share of homes.
    """
    return bool(getattr(planner, "respects_slots", True))


def respects_nodes(planner: Planner) -> bool:
    """Whether flash copies never leave the node they are copied from."""
    return bool(getattr(planner, "respects_nodes", True))


def timing_of(planner: Planner) -> Timing:
    """When it decides; planners say so with a class attribute `timing`, and plan ahead without one."""
    return Timing(getattr(planner, "timing", Timing.AHEAD))


def online_us_of(planner: Planner) -> float:
    """What an online planner takes in every layer, in microseconds: the class attribute `online_us`."""
    return float(getattr(planner, "online_us", 0.0))


_PLANNERS: dict[str, Callable[[], Planner]] = {}


def register(name: str, make: Callable[[], Planner]) -> None:
    """Make a planner known under a name."""
    if name in _PLANNERS:
        raise InputError(f"a planner named {name!r} is registered already")
    _PLANNERS[name] = make


def planner_names() -> list[str]:
    """Names of all planners."""
    return list(_all_planners())


def planner_named(name: str) -> Planner:
    """The planner of that name; an error that lists the names otherwise."""
    planners = _all_planners()
    if name not in planners:
        raise InputError(f"no planner is named {name!r}; use one of {', '.join(planners)}")
    return planners[name]()


def _all_planners() -> dict[str, Callable[[], Planner]]:
    """The planners, with those we ship: imported here, because they import this file, and their kernels take time."""
    import_module("equilibra.plan.registry")
    return _PLANNERS
