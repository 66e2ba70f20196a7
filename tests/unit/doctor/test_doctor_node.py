"""The process that tries things may hang, crash or talk nonsense: the others go on."""

import sys
import time
from pathlib import Path

import pytest

from equilibra.doctor.finding import Ask, State
from equilibra.doctor.node import CHECKS, LostError, Worker, examine

ECHO = "import json, sys\nfor line in sys.stdin:\n    job = json.loads(line)['job']\n"
FINE = "    print(json.dumps({'findings': [{'name': job, 'state': 'ok', 'text': 'fine'}]}), flush=True)\n"


def worker(code: str) -> Worker:
    return Worker([sys.executable, "-c", ECHO + code + FINE])


def states(found) -> dict[str, State]:
    return {finding.name: finding.state for finding in found.findings}


def test_all_checks_are_asked_in_order():
    told = []
    with_all = examine(Ask(), measure=False, tell=lambda *step: told.append(step), worker=worker(""))
    assert [finding.name for finding in with_all.findings] == list(CHECKS)
    assert told == [(name, number, len(CHECKS)) for number, name in enumerate(CHECKS)]


def test_a_crash_costs_one_check():
    code = "    if job == 'cuda ipc':\n        import os, signal; os.kill(os.getpid(), signal.SIGSEGV)\n"
    found = examine(Ask(), measure=False, worker=worker(code))
    assert states(found) == {name: State.MISSING if name == "cuda ipc" else State.OK for name in CHECKS}
    assert "signal 11" in next(finding.text for finding in found.findings if finding.name == "cuda ipc")


def test_after_a_stuck_stream_there_is_a_new_worker(tmp_path):
    log = tmp_path / "pids"
    code = f"    print(job, __import__('os').getpid(), file=open({str(log)!r}, 'a'), flush=True)\n"
    stuck = "    if job == 'stream values':\n        print(json.dumps({'findings': [{'name': job, 'state': 'missing', "
    stuck += "'text': 'stuck'}]}), flush=True); continue\n"
    examine(Ask(), measure=False, worker=worker(code + stuck))
    pids = dict(line.rsplit(" ", 1) for line in log.read_text().splitlines())
    assert pids["python"] == pids["stream values"] != pids["transfer paths"]


def test_the_last_words_of_a_worker_are_kept():
    with (
        worker("    sys.exit('no module named luck')\n") as hands,
        pytest.raises(LostError, match=r"code 1: no module"),
    ):
        hands.do("torch", Ask())


def test_a_hang_is_cut_off_with_all_it_started(tmp_path):
    child = f"echo $$ > {tmp_path / 'pid'}; exec sleep 60"
    code = f"    if job == 'cuda ipc':\n        import subprocess; subprocess.run(['sh', '-c', {child!r}])\n"
    with worker(code) as hands:
        assert hands.do("python", Ask())  # it is up
        begin = time.monotonic()
        with pytest.raises(LostError, match="did not finish within 2 s"):
            hands.do("cuda ipc", Ask(), limit_s=2.0)
        assert time.monotonic() - begin < 20
        pid = int((tmp_path / "pid").read_text())
        for _ in range(200):
            if not _runs(pid):
                break
            time.sleep(0.02)
        assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_nonsense_is_an_error_and_the_next_job_gets_a_new_worker():
    code = "    if job == 'gloo':\n        print('libfoo: hello', flush=True); continue\n"
    with worker(code) as hands:
        with pytest.raises(LostError):
            hands.do("gloo", Ask())
        assert hands.do("nccl", Ask())["findings"][0]["text"] == "fine"


def test_a_program_that_is_not_there():
    with Worker(["/nonexistent/python"]) as hands, pytest.raises(LostError, match="nonexistent"):
        hands.do("python", Ask())


def test_a_lost_measurement_is_said_and_not_counted():
    code = "    if '/' in job: sys.exit(3)\n"
    found = examine(Ask(), worker=worker(code))
    lost = [finding for finding in found.findings if finding.name.startswith("measuring ")]
    assert found.measured == []
    assert {finding.state for finding in lost} == {State.NOT_TESTED}
    assert len(lost) == 2
