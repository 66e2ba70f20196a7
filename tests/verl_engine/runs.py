"""What two ranks do in verl's engine, plain and balanced, one after another in the same processes: verl loads slowly.

verl is imported as a user has it: with the plugin in VERL_USE_EXTERNAL_MODULES. Plain engines have it switched off.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from tests.megatron_core import layer_runs, models
from tests.megatron_core.checkpoint_runs import heard, own_processes
from tests.verl_engine import absent, engines, rows

from equilibra.cost.presets import default_prices
from equilibra.integrations.executor.balancer import count_routing
from equilibra.integrations.verl import hooks

PLUGIN = "equilibra.integrations.verl.plugin"
OFF = {"equilibra": {"enabled": False}}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
STEPS = 3
FAST = replace(default_prices(), nic_gb_per_s=1e9)
"""a network on which standing copies pay even for a few tokens"""

NODES = {"ranks_per_node": 1, "hardware": FAST}
"""every rank a node of its own"""


def options(**block: Any) -> dict[str, Any]:
    return {"override_mcore_model_config": {"equilibra": block}}


def on_two_ranks() -> dict[str, Any]:
    """Comparisons on two expert-parallel ranks, which are two data-parallel ranks."""
    verl = absent.import_verl(PLUGIN)
    found: dict[str, Any] = {"version": __import__("verl").__version__}
    plain = train(verl, override_mcore_model_config=OFF)
    found["plain"] = plain
    found["balanced"] = train(verl, **options(spare_slots=2), param_offload=True, optimizer_offload=True)
    found["verified"] = train(verl, **options(spare_slots=2, verify_steps=2))
    from verl.models.mcore.patch import apply_patch_megatron_recomputation_backward

    apply_patch_megatron_recomputation_backward()  # as on GPUs: inputs are freed once they were computed anew
    found["logprob"] = train(verl, **options(spare_slots=2), override_transformer_config=FULL)
    found["live"] = train(verl, **options(mode="live"), mode="disabled", replay=False)
    found["live on nodes"] = train(verl, **options(mode="live", **NODES), mode="disabled", replay=False)
    found["history"] = train(verl, **options(mode="history", hardware=FAST), mode="disabled", replay=False)
    found["plain live"] = train(verl, override_mcore_model_config=OFF, mode="disabled", replay=False)
    found["standing"] = train(verl, **options(**NODES, standing_slots=2), param_offload=True)
    # two standing copies level all there is to level
    moving = options(**NODES, standing_slots=1, max_moves_per_layer=-1, verify_steps=1)
    found["homes"] = train(verl, **moving, param_offload=True, optimizer_offload=True)
    found["recorded"] = [
        recorded(verl, override_mcore_model_config=OFF),
        recorded(verl, **options(spare_slots=2)),
    ]
    found["replayed as planned"] = as_planned(verl)
    found["refused"] = refused(verl)
    found["counted"] = counted(verl)
    layer_runs.break_something("drop gradients of copies")
    found["sabotaged"] = train(verl, **options(spare_slots=2))
    found["noticed"] = list[str]()
    with heard(found["noticed"]):
        engines.update(engines.make(verl, **options(spare_slots=2, verify_steps=1)), 0)
    for name in ("balanced", "verified", "standing", "homes", "logprob", "sabotaged"):
        found[name]["weights"] = apart(plain["weights"], found[name]["weights"])
    plain_live = found["plain live"].pop("weights")
    for name in ("live", "live on nodes", "history"):
        found[name]["weights"] = apart(plain_live, found[name]["weights"])
    del plain["weights"]
    return found


def more_on_two_ranks() -> dict[str, Any]:
    """Other options of verl, sequences cut between the ranks, and a checkpoint."""
    verl = absent.import_verl(PLUGIN)
    plain = train(verl, override_mcore_model_config=OFF)
    found = {"plain": plain, "static": train(verl, **options(planner="static"))}
    found["gathered"] = train(
        verl, **options(), override_ddp_config={"overlap_param_gather": True, "overlap_grad_reduce": True}
    )
    found["checkpoint"] = through_a_checkpoint(verl)
    for name in ("tensor", "context"):
        found[f"{name} parallel"] = of_one_replica(verl, {"tensor": "tensor_model", "context": "context"}[name])
    for name in ("static", "gathered"):
        found[name]["weights"] = apart(plain["weights"], found[name]["weights"])
    del plain["weights"]
    return found


def train(verl: Any, *, replay: bool = True, **of_engine: Any) -> dict[str, Any]:
    """Log-probabilities with replay, without, then optimizer steps; one of them over micro-batches of a fixed size.

    replay: False for batches without recorded routing.
    """
    engine = engines.make(verl, **of_engine)
    given = {"replay": replay, "routed": replay}
    outputs = [engines.log_prob(engine, 0, **given)]
    ours = engine.equilibra
    planned = dict(ours.waiting) if ours is not None else {}
    outputs.append(engines.log_prob(engine, 0, replay=False))
    last = "metrics" in outputs[0]
    log_probs = np.stack([engines.of_responses(0, output) for output in outputs]) if last else None
    fixed = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
    outputs, weights = [], {}
    computed, of_copies = list[int](), list[int]()
    for number in range(STEPS + 1):
        with rows.counted(engine.module) as (here, of_copies_here):
            outputs.append(engines.update(engine, number, **given, **(fixed if number == STEPS else {})))
        computed, of_copies = computed + here, of_copies + of_copies_here
        weights |= {f"{number}.{name}": value for name, value in engines.export(engine).items()}
    by_rank = {f"{STEPS}.{name}": value for name, value in engines.export(engine, by_rank=True).items()}
    return {
        "balanced": ours is not None,
        "last": last,
        "log_probs": log_probs,
        "planned": planned,
        "losses": [sum(output["loss"]) for output in outputs] if last else [],
        "norms": [output["metrics"].get("grad_norm", 0.0) for output in outputs] if last else [],
        "metrics": [ours_of(output) for output in outputs if last],
        "logged": logged(engine, outputs[0]) if last else {},
        "rows": computed,
        "rows of copies": sum(of_copies),
        "weights": weights,
        "by rank": max(float((value - weights[name]).abs().max()) for name, value in by_rank.items()),
    }


def ours_of(output: dict[str, Any]) -> dict[str, Any]:
    """Equilibra's metrics of an update."""
    return {name: value for name, value in output["metrics"].items() if name.startswith("equilibra/")}


def logged(engine: Any, output: dict[str, Any]) -> dict[str, float]:
    """What is left of an update's metrics after the steps that verl's worker and trainer take, with their functions."""
    from verl.utils.metric import reduce_metrics
    from verl.utils.py_functional import append_to_dict
    from verl.utils.torch_functional import allgather_dict_into_dict

    of_ranks = allgather_dict_into_dict(ours_of(output), group=engine.get_data_parallel_group())
    metrics: dict[str, Any] = {}
    append_to_dict(metrics, {name: list(chain.from_iterable(value)) for name, value in of_ranks.items()})
    return {name: float(value) for name, value in reduce_metrics(metrics).items()}


def of_one_replica(verl: Any, kind: str) -> dict[str, Any]:
    """The same two ranks as halves of one data-parallel rank, with sequences cut between them."""
    from megatron.core import parallel_state as groups

    groups.destroy_model_parallel()
    two = {f"{kind}_parallel_size": 2}
    plain = train(verl, override_mcore_model_config=OFF, **two)
    found = train(verl, **options(spare_slots=2), override_transformer_config=FULL, **two)
    found["weights"] = apart(plain.pop("weights"), found["weights"])
    groups.destroy_model_parallel()
    return {"plain": plain, "balanced": found}


def counted(verl: Any) -> dict[str, Any]:
    """Pairs of all ranks by layer and expert as they are planned, and as they are in the batch, under each layout."""
    from megatron.core import parallel_state as groups

    found = {}
    for name in ("data", "context_parallel_size", "tensor_model_parallel_size"):
        groups.destroy_model_parallel()
        engine = engines.make(verl, **options(), **({} if name == "data" else {name: 2}))
        data = engines.batch(0)
        verl.tu.assign_non_tensor(data, sp_size=engine.engine_config.context_parallel_size)
        parts, _ = verl.prepare_micro_batches(data=data, dp_group=engine.get_data_parallel_group())
        size = {"num_layers": engines.LAYERS, "num_experts": models.NUM_EXPERTS, "top_k": models.TOP_K}
        planned = count_routing([engine.equilibra.routing_of(part) for part in parts], **size).sum(axis=0)
        recorded = [list(part[:-1].unbind(dim=1)) for part in data["routed_experts"].unbind()]
        wanted = count_routing(recorded, **size).sum(axis=0) * engine.get_data_parallel_size()
        both = torch.from_numpy(np.stack([planned * 2, wanted]))
        torch.distributed.all_reduce(both)
        found[name] = (both // 2).numpy()
    groups.destroy_model_parallel()
    return found


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


def recorded(verl: Any, **of_engine: Any) -> dict[str, Any]:
    """R2: the pass for log-probabilities records routing, the update replays it."""
    engine = engines.make(verl, mode="R2", **of_engine)
    output = engines.log_prob(engine, 0, routed=False)
    waiting = dict(engine.equilibra.waiting) if engine.equilibra else {}
    routed = output["model_output"]["routed_experts"]
    trained = engines.update(engine, 0, routed=routed)
    return {
        "recording": waiting,
        "routed": routed.values().numpy(),
        "loss": sum(trained["loss"]),
        "metrics": ours_of(trained),
    }


def as_planned(verl: Any) -> dict[str, Any]:
    """Ids and masks that the routers were given while the pass was planned, and afterwards while it ran."""
    engine = engines.make(verl, **options(spare_slots=1))
    given: list[tuple[Any, Any, Any]] = []
    original = verl.RouterReplay.set_target_indices

    def note(self: Any, topk_indices: Any, replay_mask: Any = None) -> None:
        given.append((id(self), topk_indices.clone(), replay_mask.clone()))
        original(self, topk_indices, replay_mask)

    verl.RouterReplay.set_target_indices = note
    try:
        engines.update(engine, 0)
    finally:
        verl.RouterReplay.set_target_indices = original
    half = len(given) // 2
    same = [
        a[0] == b[0] and torch.equal(a[1], b[1]) and torch.equal(a[2], b[2])
        for a, b in zip(given[:half], given[half:], strict=True)
    ]
    return {"calls": len(given), "same": same, "live": int((~given[0][2].bool()).sum())}


def through_a_checkpoint(verl: Any) -> dict[str, Any]:
    """Weights and optimizer of an engine with moved homes, saved by verl.

    It goes on, loads them when its homes have moved again, and goes on as before; so does a plain engine.
    """
    folder: list[Any] = [tempfile.mkdtemp(prefix="equilibra-test-")]
    torch.distributed.broadcast_object_list(folder)
    moving = options(**NODES, standing_slots=0, max_moves_per_layer=-1)
    saved = engines.make(verl, **moving, param_offload=True, optimizer_offload=True)
    engines.log_prob(saved, 0)
    planned, said = dict(saved.equilibra.waiting), list[str]()
    first = engines.update(saved, 0)
    moved = [not saved.equilibra.balancer.slots.is_contiguous]
    for attempt in (
        lambda: type(saved.checkpoint_mananager).save_checkpoint(saved.checkpoint_mananager, folder[0]),
        lambda: importlib.import_module(hooks.COPIES).copy_megatron_model_to_cpu(saved.module),
    ):
        with saved.eval_mode(), heard(said):
            attempt()
    with own_processes():
        saved.save_checkpoint(folder[0])
    wanted = [sum(engines.update(saved, number)["loss"]) for number in (1, 2)]
    moved.append(not saved.equilibra.balancer.slots.is_contiguous)
    found = [loaded(saved, folder[0])]
    plain = engines.make(verl, override_mcore_model_config=OFF)
    engines.update(plain, 3)  # Adam's fallback has no state to load into before its first step
    found.append(loaded(plain, folder[0]))
    torch.distributed.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    return {
        "planned": planned, "first": ours_of(first), "saved": [sum(first["loss"]), *wanted], "loaded": found,
        "moved": moved, "said": said,
    }  # fmt: skip


def loaded(engine: Any, folder: str) -> list[float]:
    """Losses after a checkpoint was loaded."""
    with torch.no_grad():  # in float32 the optimizer's masters are the weights
        engine.load_checkpoint(folder, del_local_after_load=False)
    return [sum(engines.update(engine, number)["loss"]) for number in (1, 2)]


def refused(verl: Any) -> dict[str, str]:
    """What is said where plans cannot be."""
    cases: dict[str, dict[str, Any]] = {
        "replay is off": {"mode": "disabled"},
        "router fusion": {"override_transformer_config": {"moe_router_fusion": True}},
        "unknown option": options(spare_slot=2),
        "verify without replay": {"mode": "disabled", **options(mode="live", verify_steps=1)},
    }
    said = {}
    for name, of_engine in cases.items():
        try:
            engines.make(verl, **of_engine)
            said[name] = "nothing"
        except Exception as error:  # noqa: BLE001 - what was raised is what is tested
            said[name] = f"{type(error).__name__}: {error}"
    engine = engines.make(verl, forward_only=True)
    said["reference model"] = repr(engine.equilibra)
    return said


def on_two_stages(chunks: int | None = None) -> dict[str, Any]:
    """Two pipeline stages of two expert-parallel ranks, with micro-batches in flight. chunks: per stage."""
    verl = absent.import_verl(PLUGIN)
    two = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": chunks}
    if chunks:
        absent.interleave()
        engines.LAYERS *= chunks
    plain = train(verl, override_mcore_model_config=OFF, **two)
    balanced = options(spare_slots=2, verify_steps=0 if chunks else 1)
    found = train(verl, **balanced, override_transformer_config=FULL, **two)
    found["weights"] = apart(plain.pop("weights"), found["weights"])
    return {"plain": plain, "balanced": found}
