"""`plan_expert_parallel` plans a model under transformers' own expert parallelism; its balancer plans steps.

    register_expert_parallel()                                          # before the model is loaded
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(fsdp_size=8, ep_size=4))
    balancer = plan_expert_parallel(model, ParallelSetting(spare_slots=2))      # on all ranks, once

    step = balancer.begin(routing)      # collective: counts and plan; routing is [M][L] ids [T, K] of this rank
    ...                                 # forward and backward of the micro-batches in the same order, as before
    balancer.end()                      # unplanned passes (evaluation) may follow

Homes do not move: FSDP owns the parameters, as DTensors sharded where transformers put them. So checkpoints, optimizers
and `save_pretrained` are unaffected.

transformers' `EpDispatchExpertsParallel` sends each (token, expert) pair to the expert's rank, runs the experts there
and combines. `PlannedExpertsParallel` replaces experts by slots: homes, then copies. Without a plan nothing differs. It
is registered under transformers' own name for the style, which its FSDP looks up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.distributed.expert_parallel import EpDispatchExpertsParallel
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from equilibra.core.errors import InputError
from equilibra.core.model import MoEModel
from equilibra.core.visit import Stage
from equilibra.execute.group import device_name
from equilibra.integrations.executor.balancer import Routing, Step, VisitBalancer, stage_group
from equilibra.integrations.hf.expert_parallel.visits import TransformersVisits, known_or_live, to_slots
from equilibra.integrations.hf.families import family_of
from equilibra.integrations.planned import PlanSetting, SlotCounts, cluster_of

__all__ = [
    "ParallelBalancer", "ParallelSetting", "PlannedExpertsParallel", "plan_expert_parallel", "register_expert_parallel",
]  # fmt: skip

ParallelSetting = PlanSetting
NAME = "ep_dispatch_experts"
OVERRIDDEN = {
    "install_forward": ("self", "module", "ep_mesh", "tp_mesh"),
    "_dispatch_tokens": ("self", "hidden_states", "top_k_index", "num_local_experts", "ep_group", "ep_size"),
    "_run_local_experts": ("self", "experts_forward", "tokens", "expert_ids"),
}
"""signatures that transformers must have: if it renamed a method, ours would silently never be called"""


class PlannedExpertsParallel(EpDispatchExpertsParallel):
    """The parallel style of one module; the registered instance makes a new one for every module."""

    def __init__(self) -> None:
        self.visits: TransformersVisits | None = None
        """the layer's visits, once it is planned"""

    def install_forward(self, module: nn.Module, ep_mesh: Any, *, tp_mesh: Any = None) -> nn.Module:  # noqa: ANN401
        style = PlannedExpertsParallel()
        module.expert_parallel_style = style  # type: ignore[assignment]
        super(PlannedExpertsParallel, style).install_forward(module, ep_mesh, tp_mesh=tp_mesh)  # type: ignore[no-untyped-call]
        return module

    def _dispatch_tokens(
        self, hidden_TD: Tensor, experts_TK: Tensor, num_local: int, ep_group: Any, ep_size: int  # noqa: ANN401
    ) -> Any:  # noqa: ANN401  # fmt: skip
        visits = self.visits
        if visits is not None and visits.current is not None:
            experts_TK, num_local = to_slots(experts_TK, visits.current), visits.num_slots
        return super()._dispatch_tokens(hidden_TD, experts_TK, num_local, ep_group, ep_size)

    def _run_local_experts(
        self, experts_forward: Callable[..., Tensor], rows_ND: Tensor, slot_of_row: Tensor
    ) -> Tensor:
        run = partial(super()._run_local_experts, experts_forward)
        if self.visits is None or self.visits.current is None:
            return run(rows_ND, slot_of_row)
        return self.visits.run(run, rows_ND, slot_of_row)


def register_expert_parallel() -> None:
    """Allow planning of models loaded after this call with `DistributedConfig(ep_size=...)`."""
    for name, expected in OVERRIDDEN.items():
        method = getattr(EpDispatchExpertsParallel, name, None)
        found = None if method is None else tuple(inspect.signature(method).parameters)
        if found != expected:
            raise InputError(
                f"cannot plan expert parallelism of transformers {transformers.__version__}: its {name} takes {found}, "
                f"{expected} are known; use 5.22.2"
            )
    ALL_PARALLEL_STYLES.register(NAME, PlannedExpertsParallel())  # type: ignore[arg-type]  # annotated for functions


def style_of(experts: nn.Module) -> PlannedExpertsParallel | None:
    """The module's planned style; None if it was loaded without."""
    found = getattr(experts, "expert_parallel_style", None)
    return found if isinstance(found, PlannedExpertsParallel) else None


def plan_expert_parallel(model: Any, setting: ParallelSetting | None = None) -> ParallelBalancer:  # noqa: ANN401
    """Collective over the world: switch the MoE layers of a loaded model to planned execution.

    Call it before or after making the optimizer: no parameter changes.
    """
    setting, family = setting or ParallelSetting(), family_of(model.config.model_type)
    spec, blocks = family.spec(model.config), [one.mlp for one in model.model.layers if hasattr(one.mlp, "experts")]
    weight = _check(model, blocks)
    setting = setting.on(device_name(weight.device))
    expert_parallel, expert_data = (weight.device_mesh[name].get_group() for name in ("ep", "efsdp"))
    cluster = cluster_of(expert_parallel.size(), setting.ranks_per_node)
    group = stage_group(expert_parallel, expert_data, cluster, setting.timeout_s)
    group.agree(setting.description(cluster), what="how steps are planned")
    layers = []
    for number, block in enumerate(blocks):
        visits = TransformersVisits(number, group, block.experts, spec.num_experts, setting.spare_slots)
        style, router = style_of(block.experts), getattr(block, family.router)
        assert style is not None
        style.visits = visits
        object.__setattr__(router, "forward", partial(visits.route, router.forward))
        layers.append(visits)
    shapes = MoEModel(
        name="transformers", num_layers=len(layers), hidden=spec.hidden, expert_ffn=spec.expert_ffn,
        num_experts=spec.num_experts, top_k=spec.top_k, weight_bytes=weight.dtype.itemsize,
    )  # fmt: skip
    return ParallelBalancer(group, setting, layers, shapes, SlotCounts(standing=0, flash=setting.spare_slots))


def _check(model: Any, blocks: list[Any]) -> DTensor:  # noqa: ANN401
    """Refuse models that cannot be planned; returns a parameter of the experts."""
    styles = [style_of(block.experts) for block in blocks]
    if not blocks or None in styles:
        raise InputError(
            "there is nothing to plan: the model has no MoE layers, or was loaded without Equilibra's style; call "
            "register_expert_parallel() first, then from_pretrained(..., distributed_config=DistributedConfig("
            "fsdp_size=..., ep_size=...)) with ep_size of 2 or more"
        )
    if any(style is not None and style.visits is not None for style in styles):
        raise InputError("the model is planned already: call plan_expert_parallel() once")
    config = model.config.distributed_config
    if config.tp_size > 1:
        raise InputError(
            f"cannot plan with tp_size={config.tp_size}: ranks that share a batch would each dispatch a part of it, "
            "but routing is given per batch; use tp_size=1"
        )
    weight = next(blocks[0].experts.parameters())
    assert isinstance(weight, DTensor)
    return weight


class ParallelBalancer(VisitBalancer[TransformersVisits, PlanSetting]):
    """Plans steps and arms layers; one per rank."""

    _begun: tuple[Step, Routing] | None = None

    def begin(self, routing: Routing, stage: Stage = Stage.UPDATE) -> Step:
        """Collective: plan the micro-batches of an optimizer step, and arm the layers.

        routing: for each micro-batch of this rank, in order, the experts [T, K] of each MoE layer; T includes padding.
        Rows with a negative id or a repeated expert are routed live and not counted.
        """
        self.end()
        load = self._load(routing)
        plan = self._plan(load, self.placement)
        if plan.placement != self.placement:
            raise InputError(
                f"planner {self.planner.name!r} moved homes, but FSDP owns the experts' parameters: use a planner that "
                "obeys max_moves_per_layer=0"
            )
        self.group.agree(f"plan {plan.digest}", what="the plan of the step")
        step = Step(plan=plan, load=load)
        self._begun = step, [[known_or_live(ids) for ids in layers] for layers in routing]
        self.arm(step, stage)
        return step

    def arm(self, step: Step, stage: Stage = Stage.UPDATE) -> None:
        """Begin another pass over the step's micro-batches, from the first one.

        LOGPROB is a pass without backward (old log-probs), UPDATE one with backward.
        """
        if self._begun is None or self._begun[0] is not step:
            raise InputError("cannot arm a step that is over: arm the one that begin() returned last")
        self._arm(step, stage)
        for visits in self.layers:
            visits.recorded = [layers[visits.layer] for layers in self._begun[1]]

    def end(self) -> None:
        """Disarm: later passes run as transformers runs them."""
        self._begun = None
        for visits in self.layers:
            visits.arm(None)
            visits.recorded = ()
