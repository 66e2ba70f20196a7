"""One rank of the training bench: build, a checked warm-up round, then timed rounds.

A round is one rollout, and a training step of every contender on its samples, each time in another order. Homes stay
where a step left them, as in training; before a step runs again they are restored. The first round starts from
contiguous homes and is reported apart, because it compiles kernels. In every round planned contenders also begin the
step twice more: planned while rewards are computed, and from contiguous homes, so that every possible home moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from benchmarks.runtime.case import CLUSTER, Case, Shape
from benchmarks.runtime.clock import Clock
from benchmarks.runtime.contenders import balanced_routing, counted
from benchmarks.runtime.layers import RankLayers
from benchmarks.runtime.rank import measured_rates
from benchmarks.train.contenders import Contender, contenders
from benchmarks.train.model import config_of
from benchmarks.train.setting import NAMES, PLANNED, STATIC, TrainSetting
from benchmarks.train.step import Answers, Bench, Trained
from equilibra.core.errors import ExecuteError
from equilibra.core.plan import Stage
from equilibra.cost.rates import Rates
from equilibra.execute.group import ExpertGroup
from equilibra.execute.state.published import logical_weights
from equilibra.train.build import build_parts, build_rollout

TOLERANCE = 1e-3
"""largest difference of log-probabilities, and relative one of gradient norms: float32 sums in another order"""
CARRIED = 3
"""tensors that move with a home: weights and two moments"""


def measure(setting: TrainSetting, folder: Path, group: ExpertGroup, tell: Callable[[str], None]) -> dict[str, Any]:
    """All rounds; the same on every rank."""
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    parts = build_parts(config_of(setting, folder), group, torch.device("cpu"))
    rates = measured_prices(setting, group)
    every = {contender.name: contender for contender in contenders(parts, setting, rates)}
    bench = Bench(
        rollout=build_rollout(parts, folder), algorithm=parts.algorithm, group=group, mini_batches=setting.mini_batches,
        seed=setting.seed,
    )  # fmt: skip
    model = every[STATIC].model
    bench.rollout.engine.load_weights(logical_weights(model.runtime, model.naming, model.dense()), version=0)
    clock = Clock(
        prepare=lambda: None, largest=lambda value: bench.largest({"value": value})["value"],
        patience_s=setting.patience,
    )  # fmt: skip
    rounds = _Rounds(bench, clock, every)
    first = rounds.warm_up()
    tell(f"log-probabilities and gradients agree to {first['largest_difference']:.0e}")
    for repeat in range(setting.repeats):
        rounds.add(repeat)
        tell(f"repeat {repeat + 1} of {setting.repeats}: {rounds.last()}")
    for contender in every.values():
        contender.learner.balancer.close()
    prices = {
        "row_us": rates.step_row_us, "copy_us": rates.flash_copy_us[Stage.LOGPROB], "move_us": rates.move_inside_us
    }  # fmt: skip
    return {"first_round": first, "prices": prices, **rounds.about()}


class _Rounds:
    """Timed rounds."""

    def __init__(self, bench: Bench, clock: Clock, every: dict[str, Contender]) -> None:
        self.bench, self.clock, self.every = bench, clock, every
        self.rows: list[dict[str, Any]] = []
        """rows by repeat"""

    def warm_up(self) -> dict[str, Any]:
        """The first round runs everything once; contenders with the same routing must agree."""
        answers = self.bench.answers(0)
        done = {name: self.bench.train(contender, answers) for name, contender in self.every.items()}
        difference = max(self._difference(done[STATIC], done[name]) for name in PLANNED)
        if not difference <= TOLERANCE:
            raise ExecuteError(
                f"log-probabilities or gradients of balanced steps differ from those of {STATIC} by {difference:.1e}, "
                f"{TOLERANCE:.0e} is allowed; nothing was timed"
            )
        for contender in self.every.values():
            contender.keep_homes()
        about = {name: {"seconds": one.seconds, **one.about} for name, one in done.items()}
        return {"largest_difference": difference, "contenders": about}

    def _difference(self, one: Trained, other: Trained) -> float:
        """Collective: the difference between the results of two contenders."""
        apart = [float(np.abs(a - b).max(initial=0.0)) for a, b in zip(one.logprobs, other.logprobs, strict=True)]
        norms = abs(one.gradient_norm - other.gradient_norm) / max(one.gradient_norm, 1e-12)
        return self.clock.largest(float(np.nan_to_num(np.max([norms, *apart]), nan=np.inf)))

    def add(self, repeat: int) -> None:
        rolled = self.clock.time(partial(self.bench.answers, repeat + 1))
        others, row = [rolled.others_share], {}
        at = repeat % len(NAMES)
        for name in (NAMES[at:] + NAMES[:at])[:: 1 if repeat % 2 == 0 else -1]:
            contender = self.every[name]
            trained = self.clock.time(partial(self.bench.train, contender, rolled.result), prepare=contender.rewind)
            others.append(trained.others_share)
            row[name] = {
                "seconds": {**rolled.result.seconds, **trained.result.seconds}, "parts": trained.result.parts,
                **trained.result.about,
            }  # fmt: skip
            if name in PLANNED:
                row[name] |= self._begun(contender, rolled.result)
            contender.keep_homes()
        self.rows.append({"contenders": row, "others_share": max(others)})

    def _begun(self, contender: Contender, answers: Answers) -> dict[str, Any]:
        """Begin the step again from contiguous homes, and prepared; homes end as after the step."""
        after = contender.model.runtime.placement
        anew = self.clock.time(
            partial(self.bench.begun, contender, answers), prepare=partial(contender.rewind, contender.contiguous)
        ).result
        found = self.clock.time(partial(self.bench.prepared, contender, answers), prepare=contender.rewind).result
        contender.rewind(after)
        return {"from_contiguous": anew, "prepared": {**asdict(found), "exposed": found.exposed}}

    def last(self) -> str:
        every = self.rows[-1]["contenders"]
        return ", ".join(f"{name} {sum(every[name]['seconds'].values()):.2f} s" for name in NAMES)

    def about(self) -> dict[str, Any]:
        return {"repeats": self.rows, "steps_run_again": self.clock.run_again}


def measured_prices(setting: TrainSetting, group: ExpertGroup) -> Rates:
    """Collective: measured prices of rows, copies and moves for the planner.

    The runtime bench measures a layer of the same experts with as many rows (in processor time). A move carries an
    expert with two moments of Adam: three times the values of a copy.
    """
    nothing_TLK = np.zeros((setting.tokens_per_rank, 1, setting.top_k), np.int64)
    routing = balanced_routing([[nothing_TLK] * CLUSTER.num_ranks], setting.experts)
    case = Case(
        name="prices", experts_MR=routing, load=counted(routing, setting.experts), top_k=setting.top_k, layers=[0],
        notes=[],
    )  # fmt: skip
    shape = Shape(hidden=setting.hidden, ffn=setting.ffn, spare_slots=setting.spare_slots, path=setting.path, repeats=1)
    rates = measured_rates(RankLayers(case, shape, group), case)
    move_us = CARRIED * rates.flash_copy_us[Stage.LOGPROB]
    return replace(rates, move_us=move_us, move_inside_us=move_us)
