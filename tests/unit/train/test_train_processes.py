"""Ranks are started, listened to and never left behind, whatever becomes of one of them or of us.

The workers are stand-ins without torch. Each test starts real processes.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from equilibra.core.errors import ExecuteError, InputError
from equilibra.train import processes
from equilibra.train.config import ClusterConfig, RunConfig, TaskConfig, TrainConfig
from equilibra.train.metrics import History, read_history
from equilibra.train.processes import Place, launch, place_under_torchrun
from equilibra.train.rank import REPEAT_S, Interrupts, Job, failure_of
from equilibra.train.run_folder import FolderLock, RunFolder, begin_run

REPOSITORY = Path(__file__).resolve().parents[3]
CONFIG = TrainConfig(run=RunConfig(steps=3, timeout_s=0.5), cluster=ClusterConfig(nodes=1, ranks_per_node=2))
FOUR = replace(CONFIG, cluster=ClusterConfig(nodes=2, ranks_per_node=2))


class Recorder:
    """A screen that remembers."""

    def __init__(self) -> None:
        self.history, self.stages, self.notes = History(), [], []

    def stage(self, name, *, step, done=0, total=0):
        self.stages.append((name, step, done, total))

    def step(self, step, metrics):
        self.history.add_step(step, metrics)

    def evaluated(self, step, metrics):
        self.history.add_evaluation(step, metrics)

    def note(self, text):
        self.notes.append(text)

    def close(self):
        pass


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 1.5)
    monkeypatch.setattr(processes, "TERMINATE_S", 0.5)


def start(tmp_path, worker, config=CONFIG, *, resume=False) -> tuple[RunFolder, Recorder, bool]:
    folder = RunFolder(path=tmp_path / "run")
    lock = FolderLock(folder) if resume else begin_run(folder.path, config)[1]
    screen = Recorder()
    job = Job(config=config, folder=folder, resume=resume, worker=f"tests.unit.train.stand_in:{worker}")
    try:
        return folder, screen, launch(job, screen=screen, place=None, lock=lock)
    finally:
        lock.close()
        assert_gone(folder)


def pids(folder: RunFolder) -> list[int]:
    return [int(text) for path in folder.path.glob("pid-*") if (text := path.read_text())]


def assert_gone(folder: RunFolder, within_s: float = 5.0) -> None:
    end = time.monotonic() + within_s
    for pid in pids(folder):
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < end, f"process {pid} stayed behind"
            time.sleep(0.02)


def test_all_ranks_run_and_rank_0_is_heard(tmp_path):
    folder, screen, stopped = start(tmp_path, "trains", FOUR)
    assert not stopped
    assert screen.stages == [("start", 0, 0, 0), *(("rollout", step, 1, 2) for step in range(3))]
    assert screen.history.series("reward") == [0.0, 0.1, 0.2]
    assert screen.history == read_history(folder.metrics)
    assert len(pids(folder)) == 4
    assert "step   3/3  reward 0.200" in folder.log.read_text()
    assert len(list(folder.tensorboard.iterdir())) == 1


def test_ranks_know_who_they_are_and_share_the_cores(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    folder, _, _ = start(tmp_path, "trains", FOUR)
    cores = len(os.sched_getaffinity(0))
    told = [json.loads((folder.path / f"environment-{rank}.json").read_text()) for rank in range(4)]
    for rank, one in enumerate(told):
        assert (one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) == (str(rank), str(rank), "4")
        assert one["MASTER_ADDR"] == "127.0.0.1"
        assert one["GLOO_SOCKET_IFNAME"] == "lo"
        assert one["OMP_NUM_THREADS"] == str(max(1, cores // 4))
    assert len({one["MASTER_PORT"] for one in told}) == 1
    assert "RANK" not in os.environ
    assert "OMP_NUM_THREADS" not in os.environ


def test_one_process_is_started_likewise(tmp_path):
    config = replace(CONFIG, cluster=ClusterConfig(nodes=1, ranks_per_node=1))
    folder, screen, _ = start(tmp_path, "trains", config)
    assert pids(folder) != [os.getpid()]
    assert len(screen.history.steps) == 3


def test_a_resumed_run_goes_on(tmp_path):
    start(tmp_path, "trains")
    folder, screen, _ = start(tmp_path, "trains", replace(CONFIG, run=RunConfig(steps=5)), resume=True)
    assert screen.notes == ["going on from step 3"]
    assert "going on from step 3" in folder.log.read_text()
    assert list(read_history(folder.metrics).steps) == [0, 1, 2, 3, 4]


def test_a_rank_that_raises_is_named_once(tmp_path):
    with pytest.raises(ExecuteError) as error:
        start(tmp_path, "one_raises")
    resume = f"continue with: equilibra train --resume {tmp_path / 'run'} "
    assert str(error.value).startswith(f"rank 1 of 2 failed: ValueError: boom; {resume}")
    assert "gone" not in str(error.value)
    assert "ValueError: boom" in (tmp_path / "run" / "output" / "rank-1.txt").read_text()


def test_a_rank_that_is_killed_is_named(tmp_path):
    with pytest.raises(ExecuteError, match=r"^rank 1 of 2 was killed by SIGKILL \(by hand, or out of memory\)"):
        start(tmp_path, "one_is_killed")


def test_a_rank_that_ends_is_named(tmp_path):
    with pytest.raises(ExecuteError, match=r"^rank \d of 2 ended with exit code 7 without reporting an error;"):
        start(tmp_path, "one_exits")


def test_a_rank_that_hangs_is_named_and_ended(tmp_path):
    with pytest.raises(ExecuteError, match=r"^rank 2 of 3 did not answer and was ended \(rank \d: RankLostError: "):
        start(tmp_path, "one_hangs", replace(CONFIG, cluster=ClusterConfig(nodes=1, ranks_per_node=3)))


def test_a_stopped_rank_is_named_and_not_those_that_wait_for_it(tmp_path):
    with pytest.raises(ExecuteError, match=r"^rank 2 of 3 did not answer and was ended \(rank 0: RankLostError: "):
        start(tmp_path, "one_is_stopped", replace(CONFIG, cluster=ClusterConfig(nodes=1, ranks_per_node=3)))


def test_a_stopped_rank_is_named_where_nobody_else_notices(tmp_path):
    with pytest.raises(ExecuteError, match=r"^rank 1 of 2 did not answer and was ended;"):
        start(tmp_path, "one_is_stopped_early")


def test_a_rank_that_goes_on_in_time_is_left_alone(tmp_path):
    assert not start(tmp_path, "one_is_paused")[2]


def test_a_rank_that_never_ends_is_ended(tmp_path):
    with pytest.raises(ExecuteError, match=r"^rank 1 of 2 did not answer and was ended;"):
        start(tmp_path, "one_never_ends")


def test_bad_input_is_bad_input(tmp_path):
    with pytest.raises(InputError, match=r"^task\.name: no such task$"):
        start(tmp_path, "bad_input")


def test_a_full_disk_is_one_line_that_says_how_to_go_on(tmp_path):
    with pytest.raises(InputError, match=r"^cannot write .*/file: No space left on device; continue with: equilibra "):
        start(tmp_path, "full_disk")


def test_a_rank_that_cannot_even_print_says_why(tmp_path):
    with pytest.raises(InputError, match=r"^cannot write .*: File too large; continue with: equilibra "):
        start(tmp_path, "limited")


def test_a_worker_that_is_not_there(tmp_path):
    with pytest.raises(ExecuteError, match="failed: AttributeError"):
        start(tmp_path, "nobody")


def test_too_many_processes_for_one_machine(tmp_path):
    with pytest.raises(InputError, match=r"is 129 processes, too many .* use at most 128, or .* with torchrun"):
        start(tmp_path, "trains", replace(CONFIG, cluster=ClusterConfig(nodes=129, ranks_per_node=1)))


# --- signals ---


def signal_when(ready, *numbers: signal.Signals) -> threading.Thread:
    """Send signals to this process, one after another, as soon as `ready`."""

    def send() -> None:
        end = time.monotonic() + 20
        while not ready() and time.monotonic() < end:
            time.sleep(0.02)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.4)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_after_the_step_with_a_checkpoint(tmp_path, number):
    config = replace(CONFIG, run=RunConfig(steps=1000), task=TaskConfig(options={"sleep_s": 0.05}))
    folder = RunFolder(path=tmp_path / "run")
    thread = signal_when(folder.metrics.exists, number)
    _, screen, stopped = start(tmp_path, "trains", config)
    thread.join()
    assert stopped
    assert any(note.startswith("stopping: ") for note in screen.notes)
    assert folder.has_checkpoint
    assert 0 < len(screen.history.steps) < 1000


def test_two_signals_end_at_once(tmp_path):
    folder = RunFolder(path=tmp_path / "run")
    thread = signal_when(lambda: len(pids(folder)) == 2, signal.SIGINT, signal.SIGINT)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, "all_hang")
    thread.join()
    assert time.monotonic() - began < 15


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    heard = []
    with Interrupts(heard.append) as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # the same one, passed on by somebody else
        os.kill(os.getpid(), signal.SIGINT)
    assert interrupts.count == 2
    assert heard == [1, 2]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


SCRIPT = """
import sys
from dataclasses import replace
from pathlib import Path
from equilibra.train.config import RunConfig, TaskConfig, TrainConfig
from equilibra.train.processes import launch
from equilibra.train.metrics import PlainLog
from equilibra.train.rank import Job
from equilibra.train.run_folder import begin_run
config = TrainConfig(run=RunConfig(steps=1000), task=TaskConfig(options={"sleep_s": 0.3}))
folder, lock = begin_run(Path(sys.argv[1]), config)
job = Job(config=config, folder=folder, resume=False, worker=f"tests.unit.train.stand_in:{sys.argv[2]}")
try:
    print("stopped" if launch(job, screen=PlainLog(print, steps=1), place=None, lock=lock) else "done")
except KeyboardInterrupt:
    print("ended at once")
"""


def started(folder, worker):
    """A run in a process group of its own, once all four ranks are at work."""
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"}
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder.path), worker], env=environment, cwd=REPOSITORY,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    end = time.monotonic() + 20
    while len(pids(folder)) < 4:
        assert time.monotonic() < end, parent.stdout.read()
        time.sleep(0.02)
    return parent


def test_ranks_end_when_the_process_that_started_them_is_killed(tmp_path):
    folder = RunFolder(path=tmp_path / "run")
    parent = started(folder, "all_hang")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    FolderLock(folder).close()  # waits for the ranks: they hold it too
    assert_gone(folder)


def test_a_signal_to_the_whole_process_group_ends_with_a_checkpoint(tmp_path):
    """As Slurm, systemd and `timeout` send it, some of them twice: to ranks and to the server that forks them too."""
    folder = RunFolder(path=tmp_path / "run")
    parent = started(folder, "trains")
    for _ in range(2):
        os.killpg(parent.pid, signal.SIGTERM)
        time.sleep(0.1)
    said = parent.communicate(timeout=30)[0]
    assert said.splitlines()[-1] == "stopped", said
    assert sum("stopping: " in line for line in said.splitlines()) == 1
    assert folder.has_checkpoint
    assert_gone(folder)


def test_a_second_signal_to_the_whole_process_group_ends_at_once(tmp_path):
    folder = RunFolder(path=tmp_path / "run")
    parent = started(folder, "all_hang")
    os.killpg(parent.pid, signal.SIGTERM)
    time.sleep(REPEAT_S + 0.2)
    os.killpg(parent.pid, signal.SIGTERM)
    said = parent.communicate(timeout=10)[0]
    assert said.splitlines()[-1] == "ended at once", said
    assert_gone(folder)


# --- torchrun ---


def test_without_torchrun_there_is_no_place():
    assert place_under_torchrun(ClusterConfig(), {}) is None


def test_the_place_under_torchrun():
    environment = {"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert place_under_torchrun(ClusterConfig(), environment) == Place(rank=3, restarts=1)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "8"}, r"torchrun started 8 .* x .* is 4: set cluster\.groups=2, or start 4 "),
        ({"RANK": "0", "WORLD_SIZE": "6"}, r"change cluster\.\*, or start 4 processes"),
        ({"RANK": "0"}, "use torchrun, or unset RANK"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, "use torchrun, or unset RANK"),
    ],
)  # fmt: skip
def test_another_number_of_processes_says_what_to_change(environment, said):
    with pytest.raises(InputError, match=said):
        place_under_torchrun(ClusterConfig(), environment)


def under_torchrun(tmp_path, monkeypatch, worker, rank, config=CONFIG):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "4")
    folder, lock = begin_run(tmp_path / f"run-{rank}", config)
    screen = Recorder()
    job = Job(config=config, folder=folder, resume=False, worker=f"tests.unit.train.stand_in:{worker}")
    try:
        return screen, launch(job, screen=screen, place=Place(rank=rank), lock=lock), folder
    finally:
        lock.close()


def test_under_torchrun_this_process_is_the_rank(tmp_path, monkeypatch):
    screen, stopped, folder = under_torchrun(tmp_path, monkeypatch, "trains", 0)
    assert not stopped
    assert screen.history == read_history(folder.metrics)
    assert pids(folder) == [os.getpid()]
    silent, _, folder = under_torchrun(tmp_path, monkeypatch, "trains", 1)
    assert silent.history == History()
    assert not folder.metrics.exists()


def test_under_torchrun_a_signal_is_the_flag(tmp_path, monkeypatch):
    config = replace(CONFIG, run=RunConfig(steps=1000), task=TaskConfig(options={"sleep_s": 0.02}))
    thread = signal_when((tmp_path / "run-0" / "metrics.jsonl").exists, signal.SIGTERM)
    screen, stopped, folder = under_torchrun(tmp_path, monkeypatch, "trains", 0, config)
    thread.join()
    assert stopped
    assert folder.has_checkpoint
    assert any(note.startswith("stopping: ") for note in screen.notes)


def test_under_torchrun_a_full_disk_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="No space left on device"):
        under_torchrun(tmp_path, monkeypatch, "full_disk", 0)


def test_what_is_said_of_errors():
    assert failure_of(ValueError("x")).text == "ValueError: x"
    assert failure_of(RuntimeError("[/pytorch/third_party/gloo/gloo/transport] Connection closed")).is_echo
    assert failure_of(MemoryError()).is_input
    assert not failure_of(OSError(5, "Input/output error")).is_input
