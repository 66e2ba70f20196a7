"""Scoring with a time limit: a stalled, dead or broken scorer costs one answer its reward, and leaves no process."""

import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from tests.distributed.rl_runs import ALONE, run, small
from tests.references import scorers
from tests.references.hf_models import small_config
from tests.references.scorers import STALLS, Hostile, broken

from equilibra.core.errors import InputError
from equilibra.integrations.reasoning_gym import reasoning_gym_task
from equilibra.rl.tasks import Problem, TimedTask

PROBLEM = Problem(number=7, prompt="a question", answer="1")


def status(process_id):
    try:
        text = Path(f"/proc/{process_id}/stat").read_text()
    except FileNotFoundError:
        return "gone"
    return text.rpartition(")")[2].split()[0]


def rewards(pipe=None):
    """A stalled answer between good ones, and one that ends the process."""
    task = TimedTask(None, partial(Hostile, 0.5), limit_s=2.0)
    task.task = type("Named", (), {"name": "a task"})()
    first = task._running.process.pid
    found = [task.reward(PROBLEM, answer) for answer in ("1", STALLS, "1", "exit", "1")]
    last = task._running.process.pid
    counts = task.take_unscored(), task.take_unscored()
    running = status(last)
    task.close()
    said = found, counts, [status(first), running, status(last)]
    return said if pipe is None else pipe.send(said)


EXPECTED = [0.5, 0.0, 0.5, 0.0, 0.5], (2, 0)


def test_an_answer_that_stalls_or_ends_the_scorer_gets_no_reward(capsys):
    found, counts, states = rewards()
    assert (found, counts) == EXPECTED
    assert (states[0], states[2]) == ("gone", "gone")  # no zombies
    assert states[1] in "SR"
    printed = capsys.readouterr().out
    assert f"an answer to problem 7 of a task was not scored within 2 s, no reward: {STALLS!r}" in printed
    assert "ended the scorer's process, no reward: 'exit'" in printed


def test_signals_to_the_whole_process_group_do_not_change_rewards():
    """Ctrl-C, and SIGTERM from a scheduler, reach every process of a job: the step under way is still finished."""
    task = TimedTask(type("Named", (), {"name": "a task"})(), partial(Hostile, 0.5), limit_s=2.0)
    try:
        for number in (signal.SIGTERM, signal.SIGINT):  # the first one while it starts
            os.kill(task._running.process.pid, number)
            assert task.reward(PROBLEM, "1") == 0.5
        assert task.take_unscored() == 0
    finally:
        task.close()


def test_in_a_daemonic_rank():
    """Ranks are daemonic and may not have children of multiprocessing's."""
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe()
    process = context.Process(target=rewards, args=(theirs,), daemon=True)
    process.start()
    assert mine.poll(120)
    found, counts, states = mine.recv()
    process.join()
    assert (found, counts, states[0], states[2]) == (*EXPECTED, "gone", "gone")


def test_a_real_scorer_that_does_not_end():
    """An antiderivative of 117 letters: sympy goes on clearing its denominator of eleven roots."""
    make = partial(reasoning_gym_task, "simple_integration")
    task = TimedTask(make(), make, limit_s=5.0)
    problem = task.problem(0)
    variable = problem.metadata["metadata"]["variable"]
    answer = f"1/({'+'.join(f'sqrt({variable}+{n})' for n in range(1, 12))})"
    assert task.reward(problem, answer) == 0.0
    assert task.take_unscored() == 1
    assert task.reward(problem, problem.answer) == 1.0
    assert task.take_unscored() == 0


def test_errors_of_the_user_stay_errors():
    task = TimedTask(reasoning_gym_task("chain_sum"), Hostile, limit_s=10.0)
    with pytest.raises(InputError, match="the reward of problem 7 is nan"):
        task.reward(PROBLEM, "refused")
    task = TimedTask(reasoning_gym_task("chain_sum"), broken, limit_s=10.0)
    with pytest.raises(InputError, match="no such dataset"):
        task.reward(PROBLEM, "1")


def test_a_run_goes_on_and_counts_them(tmp_path):
    """The whole loop: some answers stall the user's reward."""
    config = small_config("qwen3_moe")
    config.initializer_range = 0.08
    config.save_pretrained(tmp_path / "model")
    settings = small(
        tmp_path / "model", cluster=ALONE, run__steps=1, run__evaluate_problems=2, rollout__prompts=3,
        task__reward=f"{scorers.__file__}:stalls_on_some", task__score_timeout_s=1.0,
    )  # fmt: skip
    (tmp_path / "run").mkdir()
    start = time.monotonic()
    notes = run(settings, tmp_path / "run")
    stalled = notes.steps[0]["rewards_timed_out"]
    assert 1 <= stalled <= 10
    assert stalled <= time.monotonic() - start
