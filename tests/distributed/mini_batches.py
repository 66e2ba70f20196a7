"""Train with several optimizer steps per plan: the mini-batches are given, and so is what each of them learns from."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from tests.distributed.training import Gaps, compare_weights, logprob, update
from tests.distributed.worlds import Batch, RandomPlanner, balanced_stack, random_batch, random_spec, reference_stack
from tests.protocol.recorded import Journal

from equilibra.core.errors import EquilibraError
from equilibra.core.placement import Cluster, contiguous
from equilibra.core.plan import GroupPlan, Stage
from equilibra.cost.rates import Rates
from equilibra.execute.copies.copies import Copies
from equilibra.execute.copies.standing import StandingStore
from equilibra.execute.copies.transfer import Path, SpareSlots
from equilibra.execute.group import join_expert_group
from equilibra.execute.runtime import CopySetting, Runtime
from equilibra.execute.steps.balancer import Balancer, BalancerSetting
from equilibra.execute.steps.step import Step


def mini_batch_cases(
    cases: list[tuple[str, Path, int]], cluster: Cluster, first_seed: int = 0, *, stale: bool = False
) -> list[Gaps]:
    """Every case is (planner, path of copies, prefetch depth)."""
    if stale:
        _keep_stale_copies()
    group = join_expert_group(cluster, timeout_s=30)
    return [_case(first_seed + number, *case, group) for number, case in enumerate(cases)]


def _case(seed: int, planner: str, path: Path, depth: int, group) -> Gaps:
    rng = np.random.default_rng(seed)
    spec, num_layers = random_spec(rng, group.num_ranks), int(rng.integers(2, 4))
    reference = reference_stack(spec, num_layers, torch.float64, seed)
    setting = CopySetting(spare_slots=2, prefetch_depth=depth, path=dict.fromkeys(Stage, path))
    placement = contiguous(group.cluster, num_layers=num_layers, num_experts=spec.num_experts)
    runtime = Runtime(group, placement, setting)
    journal = _journal_of(runtime)
    model = balanced_stack(reference, runtime, torch.float64)
    options = {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.01}
    optimizers = (
        torch.optim.AdamW(model.parameters(), **options),
        torch.optim.AdamW(reference.parameters(), **options),
    )
    chosen = RandomPlanner(seed) if planner == "random" else planner
    balancer = Balancer(
        runtime, BalancerSetting(tokens_per_rank=24, planner=chosen, rates=Rates.free()), optimizer=optimizers[0]
    )
    gaps, batches = Gaps(), [random_batch(rng, spec, num_layers, group.world_size) for _ in range(3)]
    minis = [_mini_batches(rng, batch) for batch in batches]
    ahead = False
    for number, (batch, mini) in enumerate(zip(batches, minis, strict=True)):
        step = balancer.begin() if ahead else balancer.begin(*_own(batch, mini, group.world_rank))
        _check_step(step, mini, planner, gaps)
        together = number % 2 == 0  # old log-probabilities of everything first, or of each mini-batch before its update
        if together:
            logprob(step, model, reference, batch, gaps)
        mode = str(rng.choice(["none", "full", "in flight"]))
        for epoch in range(1 + number % 2):
            for mini_batch in range(step.num_mini_batches):
                if not together and epoch == 0:
                    logprob(step, model, reference, batch, gaps, mini_batch)
                part = step.micro_batches(Stage.UPDATE, mini_batch)
                sequences = np.flatnonzero(mini == mini_batch)
                update(step, balancer, model, reference, batch, part, sequences, mode, optimizers, rng, gaps)
        ahead = number + 1 < len(batches) and bool(rng.integers(2))
        if ahead:
            balancer.prepare(*_own(batches[number + 1], minis[number + 1], group.world_rank))
        _check_way_back(step, batch)
        compare_weights(model, reference, gaps)
    balancer.close()
    gaps.asked, gaps.wanted = journal.calls, journal.wanted(runtime)
    gaps.count(stale=journal.stale)
    return gaps


def _journal_of(runtime: Runtime) -> Journal:
    """Records what the runtime asks of its engine."""
    journal, made = Journal(), Copies.__init__
    journal.watch(runtime)

    def make(self: Copies, *arguments) -> None:
        made(self, *arguments)
        if self.weights is runtime.weights:
            journal.watch_copies(self)

    Copies.__init__ = make
    return journal


def _mini_batches(rng: np.random.Generator, batch: Batch) -> np.ndarray:
    """[S] two or three, where there are as many sequences."""
    count = len(batch.tokens)
    return rng.permutation(np.arange(count) % min(int(rng.integers(2, 4)), count))


def _own(batch: Batch, mini: np.ndarray, rank: int):
    """Ranks without sequences have nothing to say, or an empty array."""
    routing = batch.routing_of(rank)
    mine = mini[np.array(batch.owner) == rank]
    return routing, None if routing is None and rank % 2 else mine


def _check_step(step: Step, mini: np.ndarray, planner: str, gaps: Gaps) -> None:
    group, schedule = step.runtime.group, step.plan.schedule
    assert step.num_mini_batches == mini.max() + 1
    assert np.array_equal(schedule.mini_batch_of_sequence, mini)
    parts = [
        [m.number for m in step.micro_batches(Stage.UPDATE, mini_batch)] for mini_batch in range(step.num_mini_batches)
    ]
    assert list(chain.from_iterable(parts)) == [m.number for m in step.micro_batches(Stage.UPDATE)]
    said = np.array([step.static_imbalance, step.planned_imbalance])
    for other in group.gather(said, what="imbalance"):
        assert np.array_equal(other, said)
    assert said.min() >= 1
    if planner == "static":
        assert np.allclose(said[0], said[1], rtol=1e-12)
    gaps.count(
        flash=step.plan.stages[Stage.UPDATE].num_copies, standing=step.plan.standing.num_copies,
        moves=step.plan.migration.num_moves, mini_batches=step.num_mini_batches, empty=sum(not p for p in parts),
    )  # fmt: skip


def _check_way_back(step: Step, batch: Batch) -> None:
    """What ran elsewhere comes back, whatever its length; booleans and single values too."""
    own = batch.data_of(step.runtime.group.world_rank)
    here = step.send(own)
    again = step.send_back([tensor * 2 for tensor in here])
    assert all(torch.equal(a, b * 2) for a, b in zip(again, own, strict=True))
    longer = step.send_back([torch.full((int(s) % 3, 2), bool(s % 2)) for s in step.sequences])
    mine = step.route.owned(step.runtime.group.world_rank).tolist()
    assert [(tuple(t.shape), bool(t.all())) for t in longer] == [((s % 3, 2), s % 3 == 0 or bool(s % 2)) for s in mine]
    numbers = step.send_back([torch.tensor([float(s)]) for s in step.sequences])
    assert [float(value) for value in numbers] == mine


def mini_batch_errors(cluster: Cluster) -> list[str]:
    """Wrong mini-batches of one rank, or of all together, are an error on both; then the step can begin."""
    group, rng = join_expert_group(cluster, timeout_s=20), np.random.default_rng(0)
    spec = random_spec(rng, group.num_ranks)
    runtime = Runtime(group, contiguous(cluster, num_layers=1, num_experts=spec.num_experts))
    balanced_stack(reference_stack(spec, 1, torch.float64, 0), runtime, torch.float64)
    balancer = Balancer(runtime, BalancerSetting(tokens_per_rank=24, rates=Rates.free()))
    batch = random_batch(rng, spec, 1, group.world_size)
    routing, count = batch.routing_of(group.rank), batch.owner.count(group.rank)
    assert count
    wrong = [
        np.zeros(count + group.rank, np.int64), np.zeros(count, [np.int64, np.float64][group.rank]),
        np.full(count, 2 * group.rank), np.full(count, -group.rank),
    ]  # fmt: skip
    errors = [_error_of(lambda mini=mini: balancer.begin(routing, mini)) for mini in wrong]
    balancer.prepare(routing, np.full(count, group.rank))
    errors.append(_error_of(lambda: balancer.begin(None, np.zeros(count, np.int64))))
    step = balancer.begin()
    errors.extend(_error_of(lambda mini=mini: step.micro_batches(Stage.UPDATE, mini)) for mini in (-1, 2))
    errors.append(_error_of(lambda: step.send_back([])) if not group.rank and step.sequences.size else "")
    assert step.num_mini_batches == 2
    balancer.close()
    return errors


def _error_of(call) -> str:
    try:
        call()
    except EquilibraError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _keep_stale_copies() -> None:
    """The negative control: copies outlive the optimizer's step, and are fetched ahead across it."""

    def after(armed: GroupPlan, _stage: Stage, micro_batch: int) -> int | None:
        at = armed.micro_batches.index(micro_batch) + 1
        return armed.micro_batches[at] if at < len(armed.micro_batches) else None

    GroupPlan.after = after
    SpareSlots.forget = StandingStore.forget = lambda _self: None
