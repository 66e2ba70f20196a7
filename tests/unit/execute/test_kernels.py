"""The Triton kernels against `expert_math`, in Triton's interpreter: no GPU is needed, so every change is tested."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytest.importorskip("torch")
if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

PROGRAM = """
import json, sys
import numpy as np
import torch
from benchmarks.gpu.copying import copy_beside, read_beside
from equilibra.execute.kernels import grouped, rows
from equilibra.execute import moe as laden_module
from equilibra.execute.moe import Laden
from equilibra.execute.experts import expert_math
from equilibra.execute.kernels import ExpertGradients, ExpertParts, RowWeights
from equilibra.execute.experts import Activation

broken, quick = sys.argv[1] == "broken", sys.argv[1] == "a few"
laden_module.on_gpu = lambda rows: True  # it is for kernels to do, on a GPU or not
grouped.HALF_COST = 0.1  # some tiles of dx are computed in halves then
generator = torch.Generator().manual_seed(0)
random = lambda *shape: torch.randn(*shape, generator=generator) * 0.3
worst = {}


def see(name, found, wanted):
    gap = (found - wanted).abs().nan_to_num(1e9).max() / (wanted.abs().max() + 1e-6)
    worst[name] = max(worst.get(name, 0.0), float(gap))


SWIGLU, CLAMPED = Activation.SWIGLU, Activation.CLAMPED_SWIGLU
SMALL, LARGE = (48, 40, (130, 0, 7, 35, 0)), (200, 136, (300, 0, 700, 7))
EVERY, NO_DOWN, BIASES = (1, 1, 1, 1), (1, 0, 1, 1), (0, 0, 1, 1)  # gate_up, down and their biases: which are learned
cases = (
    (SMALL, SWIGLU, False, EVERY, 0, 2, True), (SMALL, CLAMPED, True, EVERY, 2, 2, True),
    (SMALL, CLAMPED, True, EVERY, 0, 0, False), (SMALL, SWIGLU, True, NO_DOWN, 0, 1, True),
    (SMALL, SWIGLU, True, BIASES, 5, 0, True), (LARGE, SWIGLU, False, EVERY, 2, 1, False),
)
chosen = cases[:1] if broken else cases[1:2] + cases[-1:] if quick else cases
for (D, F, sizes), kind, bias, learned, num_first, num_last, weigh in chosen:
    parts = lambda: ExpertParts(random(2 * F, D), random(D, F), *((random(2 * F), random(D)) if bias else ()))
    instances = [parts() for _ in sizes]
    x, dy = random(sum(sizes), D) * 4, random(sum(sizes), D)
    groups = grouped.Groups.of(sizes, torch.device("cpu"))
    y, h = grouped.forward(kind, x, groups, instances)
    wanted_y, wanted_h = expert_math.forward(kind, x, sizes, instances)
    see("y", y, wanted_y), see("h", h, wanted_h)
    filled = lambda: [
        ExpertGradients(*(torch.ones_like(p) if p is not None and l else None for p, l in zip(i, learned)))
        for i in instances
    ]
    found, wanted, dx, wanted_dx = filled(), filled(), torch.full_like(x, torch.nan), torch.empty_like(x)
    if broken:
        groups = grouped.Groups.of((*sizes[:1], sizes[2], 0, *sizes[3:]), torch.device("cpu"))
    told = []
    tell, ends = lambda: told.append(1), {"num_first": num_first, "num_last": num_last}
    of_rows = torch.rand(len(x), generator=generator)
    mine, theirs = (RowWeights(of_rows, torch.full_like(of_rows, torch.nan)) if weigh else None for _ in range(2))
    saved = x, wanted_h, dy
    grouped.backward(kind, saved, groups, instances, found, dx, weighted=mine, **ends, after_last=tell)
    expert_math.backward(kind, saved, sizes, instances, wanted, wanted_dx, weighted=theirs, **ends)
    see("dx", dx, wanted_dx)
    if weigh:
        see("weights of rows", mine.gradients_N, theirs.gradients_N)
    for mine, theirs in zip(found, wanted):
        for a, b in zip(mine, theirs):
            if a is not None:
                see("gradients", a, b)
    assert told == [1]
if not broken:
    launches = grouped.Shares.of(grouped._share_task(groups, x, F, learned=(True, True)), torch.device("cpu"))
    first, second = (launch.shares.view(-1, 10) for launch in launches)
    assert first[:, 1].sum() > 0 and second[:, 9].sum() > 0, "both launches, dx before weights, and halves"
T, K = 9, 3
values = random(T * K, D)
row_of_pair = torch.randperm(T * K, generator=generator).view(T, K).to(torch.int32)
weights, dout = torch.rand(T, K, generator=generator), random(T, D)
chosen = values[row_of_pair.long()]
see("sum", rows.weighted_sum(values, row_of_pair, weights), (chosen * weights[..., None]).sum(1))
for travels in (False, True):
    laden = Laden.empty(T * K, D, values, travels=travels)
    laden.fill(dout, None, row_of_pair, weights)
    see("spread", laden.rows_ND[row_of_pair.long()], dout[:, None].expand(T, K, D))
    see("numbers", laden.numbers_N[row_of_pair.long()], weights)
    laden.rows_ND.copy_(values)
    pairs = torch.empty_like(weights)
    see("plain sum", laden.sum_of_choices(row_of_pair, pairs), chosen.sum(1))
    see("numbers", pairs, weights)
for count in (1, 3, 6):
    given, total = [random(7001) for _ in range(count)], random(7001)
    wanted = total.clone()
    for row in given:
        wanted += row
    rows.add_in_order(total, given[::-1] if broken else given)
    worst["added to the bit"] = max(worst.get("added to the bit", 0.0), float((total != wanted).sum()))
copied = torch.zeros(3, 5000)
copy_beside(copied[1:], values := random(2, 5000))
see("copied", copied[1:], values), see("copied", copied[:1] + 1, torch.ones(1, 5000))
words, seen = torch.arange(7001, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
read_beside(words, seen)
assert seen.sum() == words.sum() and (seen > 0).all(), "every word, by every program"
print(json.dumps(worst))
"""


def worst_of(how: str) -> dict[str, float]:
    """In a process of its own: whether Triton interprets is decided when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("cases", ["a few", pytest.param("all", marks=pytest.mark.slow)])
def test_kernels_equal_the_definition(cases):
    worst = worst_of(cases)
    assert set(worst) == {
        "y", "h", "dx", "gradients", "weights of rows", "sum", "plain sum", "numbers", "spread", "added to the bit",
        "copied",
    }  # fmt: skip
    assert max(worst.values()) < 1e-5, worst


def test_rows_of_another_instance_are_noticed():
    worst = worst_of("broken")
    assert worst["dx"] > 1e-2
    assert worst["gradients"] > 1e-2
    assert worst["added to the bit"] > 0
