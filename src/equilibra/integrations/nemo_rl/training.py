"""NeMo-RL's Megatron workers under plans: every pass that replays routing is planned before it begins.

    from equilibra.integrations.nemo_rl.training import install
    install()                    # in the policy workers, before their first pass

All passes of a worker go through one function of NeMo-RL, `megatron_forward_backward`, which gets an iterator over
micro-batches. `install` replaces it: the micro-batches of a pass are taken from the iterator, their routing is read
with NeMo-RL's own function as the routers will get it, the pass is planned, and NeMo-RL's function runs it. The model
is balanced at its first pass with routing. Homes stay where they are, since NeMo-RL exports experts by rank.

NeMo-RL is not imported before `install`. Its -1 rows, tokens without a route, are routed live and not counted.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from equilibra.core.errors import InputError
from equilibra.core.plan import Stage
from equilibra.integrations.executor.balancer import LazyRouting
from equilibra.integrations.megatron import Balancer, balance
from equilibra.integrations.planned import MegatronSetting

__all__ = ["PlannedPasses", "install"]

logger = logging.getLogger(__name__)

TRAIN, REPLAY = "nemo_rl.models.megatron.train", "nemo_rl.models.megatron.router_replay"
WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker"
PASS, ROUTES = "megatron_forward_backward", "build_router_replay_assignments"
NEEDED = ("model", "data_iterator", "num_microbatches", "forward_only", "use_router_replay")
"""parameters of a pass that are read"""


def install(setting: MegatronSetting | None = None) -> PlannedPasses:
    """Plan the passes of this process's policy worker. The same setting on every worker."""
    setting = setting or MegatronSetting()
    if setting.mode != "replay":
        raise InputError(
            f"mode={setting.mode!r} needs no routing of a pass, so nothing to install: call "
            "equilibra.integrations.megatron.balance on the worker's model"
        )
    try:
        train, replay, worker = (import_module(name) for name in (TRAIN, REPLAY, WORKER))
    except ImportError as error:
        raise InputError(
            f"cannot plan NeMo-RL's passes here ({error}): call install() in a policy worker with the Megatron backend"
        ) from error
    passes = PlannedPasses(getattr(replay, ROUTES), setting)
    planned = passes.around(getattr(worker, PASS))
    for module in (train, worker):  # the worker has imported it by name
        setattr(module, PASS, planned)
    return passes


@dataclass(eq=False)
class PlannedPasses:
    """The passes of a policy worker."""

    routes: Callable[[Any, Tensor], Sequence[tuple[Any, Tensor]]]
    """NeMo-RL's function from a micro-batch's routing to that of each router"""
    setting: MegatronSetting
    balancer: Balancer | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """of the last planned pass"""

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """NeMo-RL's function, with a plan for each pass that replays routing."""
        if getattr(run, "planned", False):
            raise InputError("this worker's passes are planned already: call install() once")
        signature = inspect.signature(run)
        missing = [name for name in NEEDED if name not in signature.parameters]
        if missing:
            raise InputError(f"{PASS} of this NeMo-RL has no {', '.join(missing)}: it is newer or older than supported")

        @wraps(run)
        def planned(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            given = call.arguments
            if not given["use_router_replay"]:
                return run(*args, **kwargs)
            batches = [next(given["data_iterator"]) for _ in range(given["num_microbatches"])]
            given["data_iterator"] = iter(batches)
            balancer = self._begin(given["model"], batches, forward_only=given["forward_only"])
            try:
                return run(*call.args, **call.kwargs)
            finally:
                balancer.end()

        planned.planned = True  # type: ignore[attr-defined]
        return planned

    def _begin(self, model: nn.Module | Sequence[nn.Module], batches: list[Any], *, forward_only: bool) -> Balancer:
        if self.balancer is None:
            self.balancer = balance(model, self.setting)
        start, stage = time.perf_counter(), Stage.LOGPROB if forward_only else Stage.UPDATE
        step = self.balancer.begin(LazyRouting(batches, partial(self._routing_of, model)), stage)
        self.metrics = {
            "imbalance_before": step.static_imbalance, "imbalance_after": step.planned_imbalance,
            "planning_s": time.perf_counter() - start,
        }  # fmt: skip
        if self.balancer.group.world_rank == 0:
            logger.info(
                "%d micro-batches planned in %.3f s; imbalance %.3f, static placement %.3f", len(batches),
                self.metrics["planning_s"], step.planned_imbalance, step.static_imbalance,
            )  # fmt: skip
        return self.balancer

    def _routing_of(self, model: Any, batch: Any) -> list[Tensor]:  # noqa: ANN401
        """[L] ids [T, K] of a micro-batch."""
        routed = batch.routed_experts_cp_sharded
        if routed is None:
            raise InputError("a micro-batch has no routed_experts: the rollout did not return its routing")
        return [ids for _, ids in self.routes(model, routed)]
