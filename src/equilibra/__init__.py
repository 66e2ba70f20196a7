"""Equilibra balances the experts of Mixture-of-Experts models while they are trained with reinforcement learning.

    from equilibra import Cluster, balance
    plan = balance(tokens, cluster=Cluster(num_nodes=1, ranks_per_node=8))   # tokens [experts, source ranks]

Names are imported when they are first used, so that `import equilibra` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equilibra.core.errors import EquilibraError as EquilibraError
    from equilibra.core.errors import InputError as InputError
    from equilibra.core.load import SequenceLoad as SequenceLoad
    from equilibra.core.load import StepLoad as StepLoad
    from equilibra.core.model import MoEModel as MoEModel
    from equilibra.core.placement import Cluster as Cluster
    from equilibra.core.placement import Placement as Placement
    from equilibra.core.plan import StepPlan as StepPlan
    from equilibra.plan.entry import plan_step as plan_step
    from equilibra.plan.one_layer import OneLayer as OneLayer
    from equilibra.plan.one_layer import balance as balance
    from equilibra.plan.step import Equilibra as Equilibra
    from equilibra.plan.store import load_plan as load_plan
    from equilibra.plan.store import save_plan as save_plan
    from equilibra.trace.count import sequence_loads as sequence_loads
    from equilibra.trace.open import load_trace as load_trace
    from equilibra.trace.routing import RoutingTrace as RoutingTrace

_HOME_OF_NAME = {
    "Cluster": "equilibra.core.placement",
    "Equilibra": "equilibra.plan.step",
    "EquilibraError": "equilibra.core.errors",
    "InputError": "equilibra.core.errors",
    "MoEModel": "equilibra.core.model",
    "OneLayer": "equilibra.plan.one_layer",
    "Placement": "equilibra.core.placement",
    "RoutingTrace": "equilibra.trace.routing",
    "SequenceLoad": "equilibra.core.load",
    "StepLoad": "equilibra.core.load",
    "StepPlan": "equilibra.core.plan",
    "balance": "equilibra.plan.one_layer",
    "load_plan": "equilibra.plan.store",
    "load_trace": "equilibra.trace.open",
    "plan_step": "equilibra.plan.entry",
    "save_plan": "equilibra.plan.store",
    "sequence_loads": "equilibra.trace.count",
}
__version__ = "0.1.0"
__all__ = [*_HOME_OF_NAME]  # noqa: PLE0604


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _HOME_OF_NAME:
        raise AttributeError(f"module 'equilibra' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF_NAME[name]), name)
