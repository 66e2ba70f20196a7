"""The timeline of a step, slow and obvious: copies are jobs with a release and a deadline, links walk from gap to gap.

Written from the descriptions in `simulate/timeline.py` and of `RunSetting`, not from their code: there are no cumulated
sums, no queues of two numbers, and the order of passes comes from its own rule. What is modelled:

* A visit is one pass of one micro-batch through one layer. Forward: attention, dispatch, experts, combine. Backward:
  the same from the end, attention last. Under activation recompute every backward visit follows a forward one.
* An all-to-all starts when the last rank arrives (online planners count and plan first, forward only; planners ahead
  must have planned the layer) and holds the links from then on: latency, then what each link has to move. It ends for
  all when the busiest rank is through.
* A copy of visit v may be fetched from the begin of visit v - depth on, and its experts wait for it. A gradient leaves
  at the begin of the next visit, and the slot it leaves is needed depth visits later. Links serve first what is due
  first, in the gaps that all-to-alls leave.
* An optimizer step waits for everything on the links.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from equilibra.simulate.times import RunSetting, Times

NEVER = 10**9


@dataclass
class Job:
    due: int
    release: int
    chunk: int
    left_us: float


@dataclass
class Link:
    """One resource that copies run on; `clock_us` is up to when its past is settled."""

    clock_us: float
    jobs: list[Job] = field(default_factory=list)

    def add(self, us: float, *, release: int, due: int, chunk: int) -> None:
        if us > 0:
            self.jobs.append(Job(due, release, chunk, us))
            self.jobs.sort(key=lambda job: (job.due, job.release))

    def serve(self, until_us: float, visit: int) -> None:
        """Work on what visit `visit` has released until a time."""
        while self.clock_us < until_us:
            job = next((job for job in self.jobs if job.release <= visit), None)
            if job is None:
                break
            piece = min(job.left_us, until_us - self.clock_us)
            job.left_us -= piece
            self.clock_us += piece
            if job.left_us <= 1e-9:
                self.jobs.remove(job)
        self.clock_us = max(self.clock_us, until_us)

    def hold(self, until_us: float) -> None:
        """An all-to-all has the link."""
        self.clock_us = max(self.clock_us, until_us)

    def finish(self, due: int) -> float:
        """When everything due by then would be through, with nothing else in the way."""
        return self.clock_us + sum(job.left_us for job in self.jobs if job.due <= due)


@dataclass(frozen=True)
class Visit:
    stage: int
    backward: bool
    again: bool
    layer: int
    micro_batch: int
    chunk: int


def one_forward_one_backward(part: range, stages: int, number: int) -> list[tuple[str, int]]:
    """Warm up with a forward pass for every later stage, then alternate, then drain."""
    warm = min(stages - 1 - number, len(part))
    order = [("F", m) for m in part[:warm]]
    for i, m in enumerate(part):
        if warm + i < len(part):
            order.append(("F", part[warm + i]))
        order.append(("B", m))
    return order


class Stage:
    """One pipeline stage: its ranks and links."""

    def __init__(self, times: Times, setting: RunSetting, number: int, *, copies_yield: bool = True) -> None:
        num_layers, num_micro_batches, num_ranks, num_nodes = times.shape
        self.times, self.setting, self.copies_yield = times, setting, copies_yield
        self.group = num_ranks // num_nodes
        stages = setting.pipeline_stages
        self.layers = list(range(num_layers * number // stages, num_layers * (number + 1) // stages))
        self.is_last = number == stages - 1
        self.passes: list[tuple[int, str, int, int]] = []  # stage, F or B, micro-batch, optimizer step
        if setting.logprob_stage:
            self.passes += [(0, "F", m, 0) for m in range(num_micro_batches)]
        edges = [num_micro_batches * i // setting.optimizer_steps for i in range(setting.optimizer_steps + 1)]
        parts = [range(a, b) for a, b in pairwise(edges) if b > a]
        for chunk, part in enumerate(parts):
            self.passes += [(1, kind, m, chunk) for kind, m in one_forward_one_backward(part, stages, number)]
        self.visits = [visit for one in self.passes for visit in self.visits_of(*one)]
        self.at = self.passes_done = 0
        self.free = np.zeros(num_ranks)
        known = float(times.plan_ready_us[self.layers[0]])
        self.inside = [Link(known) for _ in range(num_nodes)]
        self.host = [Link(known) for _ in range(num_nodes)]
        self.net = Link(known)
        self.spans: list[tuple[Visit, float, float]] = []
        self.columns: list[np.ndarray] = []
        self.queue_copies()

    def visits_of(self, stage: int, kind: str, m: int, chunk: int) -> list[Visit]:
        if kind == "F":
            return [Visit(stage, False, False, layer, m, chunk) for layer in self.layers]
        found = []
        for layer in reversed(self.layers):
            if self.setting.activation_recompute:
                found.append(Visit(stage, False, True, layer, m, chunk))
            found.append(Visit(stage, True, False, layer, m, chunk))
        return found

    def queue_copies(self) -> None:
        """Every copy and gradient of the step as a job."""
        times, depth = self.times, self.setting.prefetch_depth
        first_of: dict[tuple[int, int], int] = {}
        last_of: dict[tuple[int, int], int] = {}
        begin_of: dict[int, int] = {}
        for v, one in enumerate(self.visits):
            begin_of.setdefault(one.chunk, v)
            first_of.setdefault((one.chunk, one.layer), v)
            last_of[one.chunk, one.layer] = v
        for v, one in enumerate(self.visits):
            begin, later = begin_of[one.chunk], int(one.chunk > 0)
            fetched = {"release": max(v - depth, begin), "due": v, "chunk": one.chunk}
            returned = {"release": v + 1, "due": v + 1 + depth, "chunk": one.chunk}
            is_first = first_of[one.chunk, one.layer] == v
            is_last = last_of[one.chunk, one.layer] == v
            fetches = not one.backward or not self.setting.activation_recompute
            if times.exposed_copies and not one.backward and not one.again:
                fetches = False  # online planners fetch after the router
            for n, inside in enumerate(self.inside):
                if fetches:
                    link = self.host[n] if times.host_path[one.stage] else inside
                    link.add(float(times.flash_us[one.stage, one.layer, one.micro_batch, n]), **fetched)
                if is_first:
                    inside.add(float(times.setup_inside_us[later, one.layer]), **fetched)
                if one.backward:
                    inside.add(float(times.flash_return_us[one.layer, one.micro_batch, n]), **returned)
                if is_last:
                    inside.add(float(times.return_inside_us[one.layer]), **returned)
            if is_first:
                self.net.add(float(times.setup_across_us[later, one.layer]), release=begin, due=v, chunk=one.chunk)
            if is_last:
                gradients = float(times.return_across_us[one.layer]) + times.reduce_us
                self.net.add(gradients, release=v + 1, due=NEVER, chunk=one.chunk)

    def run_pass(self, ready: float) -> float:
        stage, kind, m, chunk = self.passes[self.passes_done]
        self.passes_done += 1
        self.free = np.maximum(self.free, ready)
        if self.is_last and kind == "B":
            self.free = self.free + self.times.outer_us[1, m]
        for _ in self.visits_of(stage, kind, m, chunk):
            self.visit(self.at)
            self.at += 1
        if self.is_last and kind == "F":
            self.free = self.free + self.times.outer_us[0, m]
        through = float(self.free.max())
        is_end = self.at == len(self.visits) or self.visits[self.at].chunk > chunk
        if stage == 1 and is_end:
            self.optimizer_step()
        return through

    def serve(self, until: float, visit: int) -> None:
        for link in (*self.inside, *self.host, self.net):
            link.serve(until, visit)

    def visit(self, v: int) -> None:
        times, one = self.times, self.visits[v]
        where = (one.stage, one.layer, one.micro_batch)
        column = np.zeros((self.free.size, 6))
        begin = float(self.free.max())
        self.serve(begin, max(v - 1, 0))
        arrived = self.free if one.backward else self.free + times.attention_us[0, one.micro_batch]
        column[:, 0], column[:, 1] = self.free, arrived
        together = float(arrived.max())
        if not one.backward and not one.again:
            together += times.counts_us
        together = max(together, float(times.plan_ready_us[one.layer]))
        self.serve(together, v)
        end = self.all_to_all(together, where)
        starts = np.empty(self.free.size)
        for n, link in enumerate(self.inside):
            starts[n * self.group : (n + 1) * self.group] = self.experts_start(v, n, link, end)
        column[:, 2], column[:, 3] = end, starts
        number = 0 if one.stage == 0 else 2 if one.backward else 1
        rest = number, one.layer, one.micro_batch
        done = starts + times.experts_us[rest] + times.slowed_us[rest]
        column[:, 4] = done
        together = float(done.max())
        self.serve(together, v)
        end = self.all_to_all(together, where)
        column[:, 5] = end
        self.free = np.full(self.free.size, end)
        if one.backward:
            column[:, 0] = self.free
            self.free = self.free + times.attention_us[1, one.micro_batch]
            column[:, 1] = self.free
        self.spans.append((one, begin, float(self.free.max())))
        self.columns.append(column)

    def all_to_all(self, begin: float, where: tuple[int, int, int]) -> float:
        """Hold the links; returns when everybody has what it needs."""
        begin += self.times.latency_us
        inside, across = self.times.inside_us[where], self.times.across_us[where]
        if self.copies_yield:
            for n, link in enumerate(self.inside):
                link.hold(begin + float(inside[n * self.group : (n + 1) * self.group].max()))
            self.net.hold(begin + float(across.max()))
        return begin + float(max(inside.max(), across.max()))

    def experts_start(self, v: int, n: int, link: Link, got: float) -> float:
        """When the ranks of node n have tokens and weights."""
        one = self.visits[v]
        queues = [queue for queue in (link, self.host[n], self.net) if any(job.due <= v for job in queue.jobs)]
        found = [got, *(queue.finish(v) for queue in queues)]
        if self.times.exposed_copies and not one.backward and not one.again:
            link.hold(link.clock_us + float(self.times.flash_us[one.stage, one.layer, one.micro_batch, n]))
            found.append(link.clock_us)
        return max(found)

    def optimizer_step(self) -> None:
        """Everything that this optimizer step has put on a link goes through first."""
        end, chunk = float(self.free.max()), self.visits[self.at - 1].chunk
        for link in (*self.inside, *self.host, self.net):
            end = max(end, link.clock_us + sum(job.left_us for job in link.jobs if job.chunk == chunk))
        end += self.times.optimizer_us
        for link in (*self.inside, *self.host, self.net):
            link.jobs = [job for job in link.jobs if job.chunk != chunk]
            link.clock_us = end
        self.free = np.full(self.free.size, end)


def reference_step(times: Times, setting: RunSetting, *, copies_yield: bool = True) -> tuple[float, list[Stage]]:
    """(microseconds of the step, pipeline stages with everything that happened)."""
    stages = [Stage(times, setting, number, copies_yield=copies_yield) for number in range(setting.pipeline_stages)]
    done: dict[tuple[int, int, str, int], float] = {}
    progress = True
    while progress:
        progress = False
        for number, stage in enumerate(stages):
            if stage.passes_done == len(stage.passes):
                continue
            kind, m = stage.passes[stage.passes_done][1:3]
            before = number - 1 if kind == "F" else number + 1
            key = (before, stage.passes[stage.passes_done][0], kind, m)
            if 0 <= before < len(stages) and key not in done:
                continue
            ready = done[key] + float(times.hop_us[m]) if 0 <= before < len(stages) else 0.0
            mine = (number, *stage.passes[stage.passes_done][:3])
            done[mine] = stage.run_pass(ready)
            progress = True
    assert all(stage.passes_done == len(stage.passes) for stage in stages), "the passes wait for each other"
    return max(float(stage.free.max()) for stage in stages), stages
