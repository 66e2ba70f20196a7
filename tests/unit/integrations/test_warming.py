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
