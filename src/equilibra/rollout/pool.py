"""A disaggregated rollout engine: M attention processes, N expert processes, and the messages to them.

    with Pool(setting, model, timeout_s=120.0) as pool:
        pool.load_weights(weights, version=0)                    # (published name, tensor), in any order
        answers = pool.generate(requests, temperature=1.0)

Requests are dealt out as places become free, so no attention process idles while another has a queue; requests with the
same prompt stay together. Expert processes are balanced between steps: the routing of the last answers decides which
experts get copies, and each copy's share of their tokens.

`PoolOfRanks` is the engine of a training run: one pool for all ranks, started by world rank 0. Its calls are
collective. Every rank reads the stream of weights and only rank 0 forwards it; requests travel to rank 0, and each
rank gets its own answers back. An error on rank 0 is raised on every rank.
"""

from __future__ import annotations

import math
import pickle
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from multiprocessing.connection import wait
from time import monotonic
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from equilibra.core.errors import BudgetError, ExecuteError, InputError, RankLostError
from equilibra.execute.experts.weights import FlatLayout
from equilibra.execute.group import Channel, ExpertGroup
from equilibra.rl.engine import Generation, Request
from equilibra.rl.mismatch import unit_roundoff
from equilibra.rollout.attention import run_attention
from equilibra.rollout.control import Ask, Took, parcels
from equilibra.rollout.ends import Ends
from equilibra.rollout.experts import run_experts
from equilibra.rollout.instances import Instances, homes_only, plan_instances
from equilibra.rollout.m2n import MeshShape, SharedMesh
from equilibra.rollout.memory import Memory, can_signal
from equilibra.rollout.processes import Failed, Job, Worker, Workers
from equilibra.rollout.setting import PoolModel, PoolSetting, Statistics

START_S = 300.0
"""time for workers to import their libraries"""
TICK_S = 1.0
PAD_BYTES = 64
"""most alignment after each expert in transit"""


class Pool:
    """An engine; `close` it, or use it in a `with` block."""

    def __init__(self, setting: PoolSetting, model: PoolModel, *, timeout_s: float = 120.0) -> None:
        """Start the processes. timeout_s: they count as lost after this long without progress."""
        if not can_signal():
            raise InputError("the disaggregated engine needs Linux on x86-64: use another rollout engine")
        on_device = setting.device_of(0, model).type == "cuda"
        if setting.transport == "gloo" and on_device:
            raise InputError("transport gloo is for CPUs: use shared on GPUs")
        self.setting, self.model, self.timeout_s = setting, model, timeout_s
        self.instances = homes_only(model.num_layers, model.spec.num_experts, setting.experts)
        self.version: int | None = None
        self._statistics = Statistics.none(self.instances)
        self._broken: str | None = None
        shape = MeshShape(
            senders=setting.attention, receivers=setting.experts, slots=setting.micro_batches,
            tokens=max(setting.prefill_tokens, -(-setting.places // setting.micro_batches)), top_k=model.spec.top_k,
            width=model.spec.hidden, dtype=model.dtype,
        )  # fmt: skip
        self._memory = Memory.create(
            SharedMesh.num_bytes(shape, on_device=on_device), instead="lower prefill_tokens or places"
        )
        self._mesh = SharedMesh(self._memory, shape)
        self._words = [self._mesh.word(number, shape.processes) for number in range(shape.processes)]
        address = f"tcp://127.0.0.1:{_free_port()}" if setting.transport == "gloo" else ""
        jobs = self._jobs(Ends(shape, self._memory.where, address))
        self._workers = Workers(jobs, load=["equilibra.rollout.experts", *model.load], start_s=START_S)
        self._attention = self._workers.every[: setting.attention]
        self._experts = self._workers.every[setting.attention :]
        handles = [self._hear(worker, START_S) for worker in self._workers.every]
        self._ask(self._workers.every, Ask.CONNECT, handles)

    def _jobs(self, ends: Ends) -> list[Job]:
        setting, jobs = self.setting, list[Job]()
        runs = [("attention", run_attention, n) for n in range(setting.attention)]
        runs += [("expert", run_experts, n) for n in range(setting.experts)]
        for kind, run, number in runs:
            model = replace(self.model, device=setting.device_of(len(jobs), self.model))
            jobs.append(Job(f"{kind} process {number}", run, (number, setting, model, ends, self.instances)))
        return jobs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes; may be called again."""
        self._broken = self._broken or "it is closed"
        self._workers.close()

    @property
    def roundoff(self) -> float:
        return unit_roundoff(self.model.dtype, self.setting.device_of(0, self.model).type)

    # --- talking to workers ---

    def _tell(self, worker: Worker, what: Ask, value: object) -> None:
        if self._broken is not None:
            raise ExecuteError(f"the rollout engine cannot be used any more: {self._broken}; start a new one")
        worker.outbox.send((what, value))
        self._words[self._workers.every.index(worker)].wake()

    def _pump(self, timeout_s: float) -> bool:
        """Receive messages into the workers' inboxes; returns whether there were any. Raises if a worker is gone."""
        ready = wait([worker.pipe for worker in self._workers.every], timeout_s)
        for worker in self._workers.every:
            if worker.pipe in ready:
                try:
                    said = worker.pipe.recv()
                except (EOFError, OSError):
                    raise self._failed(ExecuteError(f"{worker.name} {self._workers.ending_of(worker)}")) from None
                if isinstance(said, Failed):
                    raise self._failed(ExecuteError(f"{worker.name} failed with {said.kind}: {said.text}"))
                worker.inbox.append(said)
        return bool(ready)

    def _hear(self, worker: Worker, timeout_s: float) -> Any:  # noqa: ANN401
        """The worker's next message, or an error after the timeout."""
        end = monotonic() + timeout_s
        while not worker.inbox:
            if not self._pump(max(0.0, end - monotonic())) and monotonic() >= end:
                raise self._failed(RankLostError(f"{worker.name} has not answered for {timeout_s:g} s"))
        return worker.inbox.popleft()

    def _ask(self, workers: Sequence[Worker], what: Ask, value: object) -> list[Any]:
        for worker in workers:
            self._tell(worker, what, value)
        return [self._hear(worker, self.timeout_s) for worker in workers]

    def _failed(self, error: ExecuteError) -> ExecuteError:
        """End all workers; without every process no answer can finish."""
        self._broken = self._broken or str(error)
        self._workers.close()
        return type(error)(f"the rollout engine lost its answers: {error}; start it again, or resume the run")

    # --- weights and instances ---

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int = 0) -> None:
        """Load new weights, and choose instances by the routing since the last call."""
        self._collect()
        self.version = None  # until all have arrived
        if self._statistics.tokens_LE.any():
            self._assign(self._planned())
        for worker in self._workers.every:
            self._tell(worker, Ask.LOAD_BEGIN, version)
        refused = ""
        for where, sent in parcels(weights):  # read to the end: the stream is collective
            if refused:
                continue
            said: list[Took] = self._ask(self._workers.every, Ask.LOAD, (where, sent))
            refused = next((took.refused for took in said if took.refused), "")
            unknown = {one.name for one in sent}.difference(*(took.names for took in said))
            if unknown and not refused:
                refused = f"weight {min(unknown)} came, but the engine has no such weight"
        if refused:
            raise InputError(refused)
        missing = {name for names in self._ask(self._workers.every, Ask.LOAD_END, None) for name in names}
        if missing:
            raise InputError(f"{len(missing)} weights are missing, among them {min(missing)}: all must come")
        self.version = version

    def rebalance(self) -> None:
        """Choose instances by the routing since the last choice, and copy experts between processes."""
        self._collect()
        version, self.version = self.version, None
        new = self._assign(self._planned())
        row_bytes = FlatLayout(self.model.spec.part_shapes()).size * self.model.dtype.itemsize + PAD_BYTES
        for home, process in enumerate(self._experts):
            taken = [[one for one in copies if self.instances.home_LE[one] == home] for copies in new]
            wanted = sorted({one for copies in taken for one in copies})
            if wanted:
                memory = Memory.create(len(wanted) * row_bytes)
                (offsets,) = self._ask([process], Ask.EXPORT, (memory.where, wanted))
                at = dict(zip(wanted, offsets, strict=True))
                for target, copies in zip(self._experts, taken, strict=True):
                    self._ask([target], Ask.IMPORT, (memory.where, [(one, at[one]) for one in copies]))
        self.version = version

    def _planned(self) -> Instances:
        return plan_instances(self._statistics.tokens_LE, self.setting.experts, spare_slots=self.setting.spare_slots)

    def _assign(self, instances: Instances) -> list[list[tuple[int, int]]]:
        """Send instances to all workers; returns the copies that are new to each expert process."""
        self.instances = instances
        self._statistics = Statistics.none(instances)
        for worker in self._attention:
            self._tell(worker, Ask.INSTANCES, instances)
        return self._ask(self._experts, Ask.INSTANCES, instances)

    def _collect(self) -> None:
        self._statistics = sum(self._ask(self._attention, Ask.STATISTICS, None), self._statistics)

    def statistics(self) -> Statistics:
        """Statistics since the instances were last chosen."""
        self._collect()
        return self._statistics

    # --- answers ---

    def generate(self, requests: Sequence[Request], *, temperature: float) -> list[Generation]:
        """Answer all requests; temperature 0 is greedy. Interrupting it ends the engine."""
        if not 0 <= temperature < math.inf:
            raise InputError(f"temperature = {temperature:g}: it must be at least 0")
        if self.version is None:
            raise InputError("the rollout engine has no whole set of weights: call load_weights first")
        answers = self._without_work(requests)
        try:
            self._answer(requests, temperature, answers)
        except BaseException as error:  # later answers would be mistaken for those of the next call
            self._broken = self._broken or f"a call of generate ended with {type(error).__name__}"
            self._workers.close()
            raise
        return [answers[number] for number in range(len(requests))]

    def _answer(self, requests: Sequence[Request], temperature: float, answers: dict[int, Generation]) -> None:
        """Add the missing answers to `answers`."""
        queue = deque(self._bundles([n for n in range(len(requests)) if n not in answers], requests))
        open_of = {worker: set[int]() for worker in self._attention}
        last, seen = monotonic(), self._mesh.progress.copy()
        while queue or any(open_of.values()):
            self._deal(queue, open_of, requests, temperature)
            said = self._pump(TICK_S)
            for worker in self._attention:
                while worker.inbox:
                    number, answers[number] = worker.inbox.popleft()
                    open_of[worker].remove(number)
            if said or not np.array_equal(seen, self._mesh.progress):
                last, seen = monotonic(), self._mesh.progress.copy()
            elif monotonic() - last > self.timeout_s:
                raise self._failed(RankLostError(self._stuck(open_of)))

    def _without_work(self, requests: Sequence[Request]) -> dict[int, Generation]:
        """Answers to requests for no tokens; BudgetError or InputError for requests that can never be answered."""
        pages = self.setting.num_pages
        answers = {}
        for number, request in enumerate(requests):
            tokens = request.tokens.size + max(request.max_new - 1, 0)
            if request.tokens.size == 0:
                raise InputError(f"request {number} has no tokens: give it at least one")
            if request.tokens.min() < 0 or request.tokens.max() >= self.model.vocabulary:
                raise InputError(
                    f"request {number} has tokens {request.tokens.min()} to {request.tokens.max()}, but the model "
                    f"knows 0 to {self.model.vocabulary - 1}"
                )
            if request.max_new == 0:
                empty = request.unanswered((self.model.num_layers, self.model.spec.top_k))
                answers[number] = replace(empty, version=self.version)
            elif -(-tokens // self.setting.page) > pages:
                raise BudgetError(
                    f"request {number} needs {tokens} tokens of KV cache ({request.tokens.size} of its prompt and at "
                    f"most {request.max_new} new ones), but an attention process has {pages * self.setting.page}: "
                    "raise kv_tokens, or ask for less"
                )
        return answers

    def _bundles(self, numbers: Sequence[int], requests: Sequence[Request]) -> list[list[int]]:
        """Group requests by prompt, each group at most an attention process's share."""
        most = max(1, min(self.setting.places, -(-len(numbers) // self.setting.attention)))
        found: dict[bytes, list[list[int]]] = {}
        bundles = []
        for number in numbers:
            of_prompt = found.setdefault(requests[number].tokens.tobytes(), [])
            if not of_prompt or len(of_prompt[-1]) >= most:
                of_prompt.append([])
                bundles.append(of_prompt[-1])
            of_prompt[-1].append(number)
        return bundles

    def _deal(
        self, queue: deque[list[int]], open_of: dict[Worker, set[int]], requests: Sequence[Request], temperature: float
    ) -> None:
        """Give bundles to the process with the fewest open answers, until all have some in reserve."""
        reserve = self.setting.places + self.setting.micro_batches
        while queue:
            worker = min(self._attention, key=lambda one: len(open_of[one]))
            if len(open_of[worker]) >= reserve:
                return
            bundle = queue.popleft()
            open_of[worker].update(bundle)
            self._tell(worker, Ask.GENERATE, (temperature, [(number, requests[number]) for number in bundle]))

    def _stuck(self, open_of: dict[Worker, set[int]]) -> str:
        waiting = [f"{worker.name} ({len(some)} answers open)" for worker, some in open_of.items() if some]
        owing_N = (self._mesh.announced != self._mesh.answered).any(axis=(0, 2))
        waiting += [f"{self._experts[n].name} (rows not answered)" for n in np.flatnonzero(owing_N)]
        return f"no process has made progress for {self.timeout_s:g} s; waiting for {', '.join(waiting)}"


class PoolOfRanks:
    """An `Engine` whose pool is on world rank 0."""

    def __init__(self, group: ExpertGroup, start: Callable[[], Pool], *, roundoff: float) -> None:
        """Collective. group: with a timeout long enough for rollouts. start: starts the pool; called on rank 0."""
        self.group, self.roundoff = group, roundoff
        self.pool = group.all_succeed(
            lambda: start() if group.world_rank == 0 else None, what="starting the rollout engine"
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        def load() -> None:
            stream = iter(weights)
            try:
                if self.pool is not None:
                    self.pool.load_weights(stream, version=version)
            finally:
                for _ in stream:  # the stream is collective: read it to the end
                    pass

        self.group.all_succeed(load, what="loading weights into the rollout engine")

    def generate(self, requests: Sequence[Request], *, temperature: float) -> list[Generation]:
        """Collective: answer this rank's requests."""
        nothing = [b""] * (self.group.world_size - 1)
        raw = self._exchange([pickle.dumps(requests), *nothing])

        def answers() -> list[bytes]:
            if self.pool is None:
                return [b"", *nothing]
            every: list[list[Request]] = [pickle.loads(one) for one in raw]  # noqa: S301 - of this run's ranks
            said = self.pool.generate([one for some in every for one in some], temperature=temperature)
            ends = accumulate(map(len, every), initial=0)
            return [pickle.dumps(said[first:last]) for first, last in pairwise(ends)]

        mine = self._exchange(self.group.all_succeed(answers, what="generating answers"))[0]
        return list[Generation](pickle.loads(mine))  # noqa: S301 - of this run's rank 0

    def close(self) -> None:
        """End the processes; not collective."""
        if self.pool is not None:
            self.pool.close()

    def _exchange(self, parts: list[bytes]) -> list[bytes]:
        """Send one part to every rank; returns the parts that every rank sent to this one."""
        what, sent = "exchanging requests and answers", [len(part) for part in parts]
        sizes = self.group.gather(np.array(sent), what=what)
        received = [int(one[self.group.world_rank]) for one in sizes]
        outgoing = torch.from_numpy(np.frombuffer(b"".join(parts), np.uint8).copy())
        incoming = torch.empty(sum(received), dtype=torch.uint8)
        self.group.all_to_all(Channel.CONTROL, outgoing, sent, incoming, received, what=what).wait()
        raw = incoming.numpy().tobytes()
        return [raw[first:last] for first, last in pairwise(accumulate(received, initial=0))]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
