"""The planner is compiled before the first step, by one process of a machine at a time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from equilibra.integrations.executor import warming

LOGGED = """
import sys, time
from equilibra.integrations.executor import warming
def warm(num_nodes):
    log.write(f"begins {sys.argv[2]}\\n")
    time.sleep(0.5)
    log.write(f"ends {sys.argv[2]}\\n")
log = open(sys.argv[1], "a", buffering=1)
warming.warm = warm
warming.warm_up(1).wait()
"""
COUNTED = """
from numba.core import event
class Compiled(event.Listener):
    count = 0
    def on_start(self, event):
        self.count += 1
    def on_end(self, event): ...
compiled = Compiled()
event.register("numba:compile", compiled)
from equilibra.integrations.executor import warming
warming.warm_up(1).wait()
print(compiled.count)
"""
SIGNATURES = """
import sys
import numpy as np
from numba.core.registry import CPUDispatcher
from equilibra.core.placement import Cluster
from equilibra.core.load import StepLoad
from equilibra.core.model import MoEModel
from equilibra.core.placement import contiguous
from equilibra.core.plan import Stage
from equilibra.integrations.executor import balancer, warming
from equilibra.integrations.planned import MegatronSetting, contiguous_slots, slot_table
from equilibra.plan.planner import StepProblem

def compiled():
    ours = [module for name, module in sys.modules.items() if name.startswith("equilibra")]
    kernels = [value for module in ours for value in vars(module).values() if isinstance(value, CPUDispatcher)]
    return {(str(kernel), str(signature)) for kernel in kernels for signature in kernel.signatures}

nodes = int(sys.argv[1])
if "cold" not in sys.argv:
    warming.warm_up(nodes).wait()
before = compiled()
cluster = Cluster(num_nodes=nodes, ranks_per_node=4)
model = MoEModel(name="m", num_layers=2, hidden=64, expert_ffn=32, num_experts=64, top_k=4, weight_bytes=2)
random = np.random.default_rng(0)
skewed = random.poisson(random.gamma(0.5, 20, size=(1, 2, 64, 1)), size=(3, 2, 64, 4 * nodes)).astype(np.int32)
scarce = skewed.copy()  # one rank has all the load: a slot elsewhere takes little of it
scarce[:, :, 64 // 4 // nodes :] = 0
for tokens, spare_slots in ((skewed, 2), (scarce, 1)):
    setting = MegatronSetting(spare_slots=spare_slots).on(None)
    problem = StepProblem(
        cluster=cluster, given_load=StepLoad(tokens_MLER=tokens), rates=setting.rates_of(model, num_nodes=nodes),
        previous=contiguous(cluster, num_layers=2, num_experts=64), **setting.limits(),
    )
    plan = setting.chosen_planner.plan(problem)
    plan.check(problem.given_load, spare_slots=spare_slots, standing_slots=2)
    slots = contiguous_slots(cluster, num_layers=2, num_experts=64)
    slot_table(plan.visit(Stage.UPDATE, 0, 0), slots.expert_of_slot[0], setting.slot_counts(cluster), 0, range(4))
print(len(compiled() - before))
"""


def start(program: str, cache: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], env=environment, stdout=subprocess.PIPE, text=True
    )


def output_of(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return said


def test_processes_take_turns(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for process in [start(LOGGED, tmp_path / "cache", str(log), str(number)) for number in range(3)]:
        output_of(process)
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [word for word, _ in lines] == ["begins", "ends"] * 3
    assert all(lines[at][1] == lines[at + 1][1] for at in (0, 2, 4))


@pytest.mark.slow
def test_the_second_process_compiles_nothing(tmp_path: Path) -> None:
    counts = sorted(int(output_of(one)) for one in [start(COUNTED, tmp_path) for _ in range(2)])
    assert counts[0] == 0 < counts[1]


@pytest.mark.parametrize("num_nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_first_plan_compiles_nothing(num_nodes: int) -> None:
    """Every kernel that a plan of an integration uses is there after the warm-up, for its types of arrays."""
    warm, cold = ([sys.executable, "-c", SIGNATURES, str(num_nodes), *more] for more in ([], ["cold"]))
    assert output_of(subprocess.Popen(warm, stdout=subprocess.PIPE, text=True)) == "0\n"
    assert int(output_of(subprocess.Popen(cold, stdout=subprocess.PIPE, text=True))) > 0, "the control"


def test_a_folder_that_cannot_be_written_means_no_lock(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with warming.one_at_a_time(tmp_path / "file" / "folder"), warming.one_at_a_time(None):
        pass


def test_failures_are_left_to_the_first_plan(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(_num_nodes: int) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(warming, "warm", fails)
    warming.WarmUp(1).wait()
    assert "could not be compiled ahead" in caplog.text
