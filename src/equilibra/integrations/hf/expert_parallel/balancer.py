"""`plan_expert_parallel`: a model under transformers' own expert parallelism, and the steps that plan it.

    register_expert_parallel()                                          # before the model is loaded
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(fsdp_size=8, ep_size=4))
    balancer = plan_expert_parallel(model, ParallelSetting(spare_slots=2))      # on all ranks, once

    step = balancer.begin(routing)      # collective: counts and plan; routing is [M][L] ids [T, K] of this rank
    ...                                 # forward and backward of the micro-batches in their order, as before
    balancer.end()                      # passes that are not planned (evaluation) may follow

Homes do not move: FSDP owns the parameters, as DTensors that are cut over the ranks where transformers put them. So
checkpoints, optimizers and `save_pretrained` see what they saw before.
"""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from typing import Any

from torch.distributed.tensor import DTensor

from equilibra.core.errors import InputError
from equilibra.core.load import StepLoad
from equilibra.core.model import MoEModel
from equilibra.core.plan import Stage, StepPlan
from equilibra.cost.rates import rates_for
from equilibra.execute.experts.spec import MoESpec
from equilibra.execute.group import ExpertGroup
from equilibra.integrations.hf.expert_parallel.place import Armed, Place, known_or_live
from equilibra.integrations.hf.expert_parallel.style import style_of
from equilibra.integrations.hf.families import family_of
from equilibra.integrations.planned.counts import Routing, gather_load
from equilibra.integrations.planned.groups import stage_group
from equilibra.integrations.planned.setting import PlanSetting, cluster_of
from equilibra.integrations.planned.slots import contiguous_slots, slot_table
from equilibra.integrations.planned.step import Step
from equilibra.plan.planner import StepProblem

__all__ = ["ParallelBalancer", "ParallelSetting", "plan_expert_parallel"]


ParallelSetting = PlanSetting


def plan_expert_parallel(model: Any, setting: ParallelSetting | None = None) -> ParallelBalancer:  # noqa: ANN401
    """Switch the MoE layers of a loaded model to planned execution; on all processes of the world.

    No parameter changes: before or after the optimizer is made.
    """
    setting, family = setting or ParallelSetting(), family_of(model.config.model_type)
    spec, blocks = family.spec(model.config), [one.mlp for one in model.model.layers if hasattr(one.mlp, "experts")]
    weight = _check(model, blocks)
    expert_parallel, expert_data = (weight.device_mesh[name].get_group() for name in ("ep", "efsdp"))
    cluster = cluster_of(expert_parallel.size(), setting.ranks_per_node)
    group = stage_group(expert_parallel, expert_data, cluster, setting.timeout_s)
    group.agree(
        f"{setting.chosen_planner.name}, {setting.spare_slots} spare slots, nodes of {cluster.ranks_per_node}, "
        f"seed {setting.seed}, {sha256(repr(setting.rates).encode()).hexdigest()}",
        what="how steps are planned",
    )
    places = []
    for layer, block in enumerate(blocks):
        place = Place(layer, group, block.experts, spec.num_experts, setting.spare_slots)
        style, router = style_of(block.experts), getattr(block, family.router)
        assert style is not None
        style.place = place
        object.__setattr__(router, "forward", partial(place.route, router.forward))
        places.append(place)
    return ParallelBalancer(group, setting, places, spec, weight.dtype.itemsize)


def _check(model: Any, blocks: list[Any]) -> DTensor:  # noqa: ANN401
    """A parameter of the experts; an error if the model cannot be planned."""
    styles = [style_of(block.experts) for block in blocks]
    if not blocks or None in styles:
        raise InputError(
            "there is nothing to plan: the model has no MoE layers, or was not loaded with our style; call "
            "register_expert_parallel() first, then from_pretrained(..., distributed_config=DistributedConfig("
            "fsdp_size=..., ep_size=...)) with ep_size of 2 or more"
        )
    if any(style is not None and style.place is not None for style in styles):
        raise InputError("the model is planned already: call plan_expert_parallel() once")
    config = model.config.distributed_config
    if config.tp_size > 1:
        raise InputError(
            f"cannot plan with tp_size={config.tp_size}: ranks that share a batch would each dispatch a part of it, "
            "and routing is given by batch; use tp_size=1"
        )
    weight = next(blocks[0].experts.parameters())
    assert isinstance(weight, DTensor)
    return weight


class ParallelBalancer:
    """Plans and arms; one per rank."""

    def __init__(
        self, group: ExpertGroup, setting: ParallelSetting, places: list[Place], spec: MoESpec, weight_bytes: int
    ) -> None:
        self.group, self.setting, self.places, self.spec = group, setting, places, spec
        self.planner = setting.chosen_planner
        self.slots = contiguous_slots(group.cluster, num_layers=len(places), num_experts=spec.num_experts)
        model = MoEModel(
            name="transformers", num_layers=len(places), hidden=spec.hidden, expert_ffn=spec.expert_ffn,
            num_experts=spec.num_experts, top_k=spec.top_k, weight_bytes=weight_bytes,
        )  # fmt: skip
        self._rates = setting.rates or rates_for(model, num_nodes=group.cluster.num_nodes)
        self._routing: tuple[Step, Routing] | None = None

    def begin(self, routing: Routing, stage: Stage = Stage.UPDATE) -> Step:
        """Collective: plan the micro-batches of an optimizer step, and arm.

        routing: for each micro-batch of this rank, in order, the experts [T, K] of each MoE layer; T are the tokens of
        its batch with padding. Rows with a negative id, or with an expert twice, are routed live and not counted.
        """
        self.end()
        spec = self.spec
        load = gather_load(
            self.group, routing, num_layers=len(self.places), num_experts=spec.num_experts, top_k=spec.top_k
        )
        plan = self._plan(load)
        self.group.agree(f"plan {plan.digest}", what="the plan of the step")
        step = Step(plan=plan, load=load)
        self._routing = step, [[known_or_live(ids) for ids in layers] for layers in routing]
        self.arm(step, stage)
        return step

    def arm(self, step: Step, stage: Stage = Stage.UPDATE) -> None:
        """Begin another pass over the step's micro-batches: the first forward that comes is of the first of them.

        LOGPROB is a pass without backward (old log-probabilities), UPDATE one with it.
        """
        if self._routing is None or self._routing[0] is not step:
            raise InputError("cannot arm a step that is over: arm the one that begin() returned last")
        first = self.group.index * len(self._routing[1])
        for place in self.places:
            expert_of_slot = self.slots.expert_of_slot[place.layer]
            place.arm([
                Armed(
                    visit=slot_table(
                        step.plan.visit(stage, first + m, place.layer), expert_of_slot, self.setting.spare_slots,
                        self.group.rank,
                    ),
                    recorded_TK=layers[place.layer],
                )
                for m, layers in enumerate(self._routing[1])
            ])  # fmt: skip

    def end(self) -> None:
        """Passes from now on run as transformers runs them."""
        self._routing = None
        for place in self.places:
            place.arm(None)

    def _plan(self, load: StepLoad) -> StepPlan:
        """The same on every rank: flash copies, and homes that stay."""
        setting = self.setting
        problem = StepProblem(
            cluster=self.group.cluster, given_load=load, previous=self.slots.placement, spare_slots=setting.spare_slots,
            standing_slots=0, max_moves_per_layer=0, rates=self._rates, seed=setting.seed,
        )  # fmt: skip
        plan = self.planner.plan(problem)
        plan.check(load, spare_slots=setting.spare_slots, standing_slots=0)
        if plan.placement != self.slots.placement:
            raise InputError(
                f"planner {self.planner.name!r} moved homes, which cannot move here: FSDP owns the experts' "
                "parameters; use one that obeys max_moves_per_layer=0"
            )
        return plan
