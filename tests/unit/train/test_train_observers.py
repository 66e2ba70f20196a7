"""Who watches a run: the metrics file, plain lines, TensorBoard, the live view, and several at once."""

import io
import json
import math
from functools import partial

import pytest
from rich.console import Console

from equilibra.core.errors import InputError
from equilibra.integrations.tensorboard import TensorBoard
from equilibra.rl.observe import Observer, several
from equilibra.train.metrics import (
    EXPLAINED,
    History,
    MetricsFile,
    PlainLog,
    append_line,
    read_history,
    step_line,
    summary,
    summary_table,
)
from equilibra.train.run_folder import RunFolder
from equilibra.train.view import LiveView, Picture, can_draw, draw, sparkline

FULL = {
    "reward": 0.4123, "kl": 0.00123, "entropy": 1.312, "loss": 0.1, "tokens_per_s": 12345.6, "imbalance_static": 1.839,
    "imbalance": 1.021, "exposed": 0.0123, "seconds": 3.12, "seconds_rollout": 1.5, "seconds_plan": 0.02,
    "seconds_logprob": 0.5, "seconds_update": 1.0,
}  # fmt: skip


# --- the metrics file ---


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_are_lines_in_order(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.stage("rollout", step=0)
    assert not file.path.exists()
    file.evaluated(0, {"reward_held_out": 0.1})
    file.step(0, {"reward": 0.5, "loss": math.nan, "kl": math.inf, "step": 7})
    assert rows(file.path) == [
        {"kind": "evaluation", "step": 0, "reward_held_out": 0.1},
        {"kind": "step", "step": 0, "reward": 0.5, "loss": None, "kl": None},
    ]
    history = read_history(file.path)
    assert history.evaluations == {0: {"reward_held_out": 0.1}}
    assert history.steps[0]["reward"] == 0.5
    assert math.isnan(history.steps[0]["loss"])
    assert history.series("loss") == []


def test_a_resumed_run_cuts_off_what_it_does_again(tmp_path):
    file, other = (MetricsFile(tmp_path / "metrics.jsonl") for _ in range(2))
    for step in range(4):
        file.evaluated(step, {"reward_held_out": step})
        file.step(step, {"reward": step})
    with file.path.open("a") as torn:
        torn.write('{"kind": "step", "step": 1, "rew')
    other.cut(2)
    assert [(row["kind"], row["step"]) for row in rows(file.path)] == [
        ("evaluation", 0), ("step", 0), ("evaluation", 1), ("step", 1),
    ]  # fmt: skip
    file.step(2, {"reward": 9})  # the observer goes on with the file that was cut
    assert rows(file.path)[-1] == {"kind": "step", "step": 2, "reward": 9.0}
    file.cut(0)
    assert rows(file.path) == []


def test_cutting_what_is_not_there_is_nothing(tmp_path):
    MetricsFile(tmp_path / "none").cut(3)
    assert not (tmp_path / "none").exists()
    assert read_history(tmp_path / "none") == History()


def test_a_torn_line_is_not_read_and_does_not_take_the_next_one(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.path.write_bytes(
        b'{"kind": "step", "step": 0}\n[1]\n{"step": 1}\n{"kind": "step", "step": true}\n{"kind": "st'
    )
    assert list(read_history(file.path).steps) == [0]
    file.step(1, {})
    assert list(read_history(file.path).steps) == [0, 1]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    for observer in (
        MetricsFile(tmp_path / "no" / "file"),
        PlainLog(partial(append_line, tmp_path / "no" / "log"), steps=1),
    ):
        with pytest.raises(InputError, match=r"cannot write .*: No such file or directory"):
            observer.step(0, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*file"):
        TensorBoard(tmp_path / "file").step(0, {"a": 1})


def test_history_forgets_what_came_before_a_restart():
    history = History()
    for step in range(4):
        history.add_evaluation(step, {"reward_held_out": step})
        history.add_step(step, {"reward": step})
    history.add_step(1, {"reward": 7})
    assert history.series("reward") == [0, 7]
    assert history.held_out() == [0, 1]
    assert history.last("reward") == 7
    assert history.last("none") is None
    assert History().last("reward") is None


# --- plain lines ---


def test_lines_are_short_and_aligned():
    first = step_line(0, 60, {**FULL, "tokens_per_s": 9.0, "exposed": 0.5, "entropy": 10.0})
    last = step_line(59, 60, FULL)
    assert last == (
        "step  60/60  reward 0.412  kl 0.0012  entropy  1.31  imbalance 1.84 > 1.02  exposed  1.2%    12,346 tokens/s"
        "    3.1 s"
    )
    assert len(first) == len(last)
    assert [at for at, sign in enumerate(first) if sign == ">"] == [at for at, sign in enumerate(last) if sign == ">"]


def test_lines_without_some_metrics():
    assert step_line(0, 9, {}) == "step   1/9"
    assert step_line(0, 9, {"imbalance": 1.0, "reward": math.nan}) == "step   1/9  reward nan"


def test_plain_log_tells_steps_evaluations_and_what_takes_long():
    stream = io.StringIO()
    log = PlainLog(partial(print, file=stream), steps=60)
    log.stage("start", step=0)
    log.stage("start", step=0)
    for done in range(201):
        log.stage("warm-up", step=0, done=done, total=200)
    log.evaluated(0, {"reward_held_out": 0.125})
    log.evaluated(0, {})
    for stage in ("rollout", "update"):
        log.stage(stage, step=0)
    log.step(0, {"reward": 0.25})
    log.note("stopping")
    log.close()
    assert stream.getvalue().splitlines() == [
        EXPLAINED["start"], "warm-up 0/200", "warm-up 50/200", "warm-up 100/200", "warm-up 150/200", "warm-up 200/200",
        "held out     reward 0.125 after 0 steps", "step   1/60  reward 0.250", "stopping",
    ]  # fmt: skip


def test_log_file_appends(tmp_path):
    for text in ("a", "b"):
        append_line(tmp_path / "log.txt", text)
    assert (tmp_path / "log.txt").read_text() == "a\nb\n"


# --- TensorBoard ---


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_one_curve_of_a_resumed_run(tmp_path):
    first = TensorBoard(tmp_path / "tb")
    first.close()
    assert not (tmp_path / "tb").exists()
    for step in range(3):
        first.step(step, {"reward": step, "imbalance": 2.0, "seconds_plan": 0.5})
    first.evaluated(0, {"reward_held_out": 0.25})
    first.close()
    second = TensorBoard(tmp_path / "tb")
    second.stage("rollout", step=1)
    second.step(1, {"reward": 7.0})
    second.close()
    found = read_events(tmp_path / "tb")
    assert found["train/reward"] == [(0, 0.0), (1, 7.0)]
    assert found["evaluation/reward_held_out"] == [(0, 0.25)]
    assert set(found) == {"train/reward", "balance/imbalance", "time/seconds_plan", "evaluation/reward_held_out"}


# --- several ---


def test_several_tell_and_close_all():
    said: list[str] = []

    class Closed(PlainLog):
        def close(self) -> None:
            said.append("closed")

    observer = several(PlainLog(said.append, steps=2), several(Closed(said.append, steps=2)), Observer())
    observer.stage("start", step=0)
    observer.step(0, {"reward": 1.0})
    observer.evaluated(1, {"reward_held_out": 0.5})
    observer.close()
    line, held_out = "step   1/2  reward 1.000", "held out    reward 0.500 after 1 steps"
    assert said == [EXPLAINED["start"], EXPLAINED["start"], line, line, held_out, held_out, "closed"]


# --- the live view ---


def drawn(picture: Picture, *, now: float = 0.0, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(draw(picture, now=now))
    return console.file.getvalue()


def test_sparklines():
    assert sparkline([]) == ""
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(list(range(1000)), width=40)) == 40


def test_the_picture_of_nothing_is_drawn():
    text = drawn(Picture(title="runs/x", steps=60))
    assert "start" in text
    assert "compiles" in text
    assert "nan" not in text


def test_the_picture_has_what_was_promised():
    picture = Picture(title="runs/[x]", steps=60)
    for step in range(12):
        picture.history.add_step(step, {**FULL, "reward": step / 20})
        picture.ends.append((step, 3.0 * step))
    picture.history.add_evaluation(0, {"reward_held_out": 0.125})
    picture.history.add_evaluation(10, {"reward_held_out": 0.5})
    picture.stage = ("rollout", 12, 4, 16)
    picture.notes.append("stopping: [bold]")
    text = drawn(picture, now=33.0)
    for part in (
        "runs/[x]", "rollout", "4/16", "step 13 of 60", "0:33 so far", "2:24 left",
        f"0.550  {sparkline(range(12))}  from 0.000",
        "0.500  ▁█  from 0.125", "KL 0.0012", "entropy 1.31", "1.84 static, 1.02 now", "exposed 1.2%", "12,346",
        "rollout 1.50", "plan 0.02", "update 1.00", "3.12 s a step", "stopping: [bold]",
    ):  # fmt: skip
        assert part in text, part


@pytest.mark.parametrize("width", [20, 60, 200])
@pytest.mark.parametrize("missing", sorted(FULL))
def test_no_metric_and_no_width_breaks_the_picture(missing, width):
    picture = Picture(title="x" * 300, steps=2, stage=("update", 5, 9, 3))
    for value in (math.nan, math.inf, -1.0, 1e300, 0.0):
        picture.history.add_step(0, {**{k: v for k, v in FULL.items() if k != missing}, "seconds_update": value})
        picture.ends.append((0, 1.0))
        assert max(len(line) for line in drawn(picture, now=1e6, width=width).splitlines()) <= width
    picture.history.add_step(0, dict.fromkeys(FULL, math.nan))
    drawn(picture)


def test_the_live_view_shows_what_it_is_told_and_gives_the_cursor_back():
    now = [0.0]
    console = Console(file=io.StringIO(), width=100, height=30, force_terminal=True, color_system=None)
    past = History(steps={0: {"reward": 0.1}, 1: {"reward": 0.9}})
    view = LiveView(title="runs/x", steps=3, history=past, console=console, clock=lambda: now[0])
    view.stage("update", step=1, done=1, total=2)
    view.evaluated(1, {"reward_held_out": 0.25})
    view.step(1, {**FULL, "reward": 0.3})
    now[0] = 5.0
    view.step(2, {**FULL, "reward": 0.4})
    view.note("hello")
    view.close()
    text = console.file.getvalue()
    last = text[text.rindex("╭") :]
    for part in ("update", "1/2", "0.400  ▁▆█  from 0.100", "0.250", "hello", "0:05 so far, 0:00 left"):
        assert part in last, part
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_only_terminals_are_drawn_on(monkeypatch):
    assert not can_draw(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not can_draw(io.StringIO())


# --- the end ---


def history_of_a_run() -> History:
    history = History()
    history.add_evaluation(0, {"reward_held_out": 0.125})
    for step in range(3):
        history.add_step(step, {**FULL, "reward": 0.1 * step, "loss": math.nan})
    history.add_evaluation(3, {"reward_held_out": 0.75})
    return history


def test_the_table_has_first_and_last():
    lines = [line.split() for line in summary_table(history_of_a_run()).splitlines()]
    assert ["first", "last"] in lines
    for row in (
        "held-out reward 0.125 0.750", "reward 0.000 0.200", "imbalance, static 1.84 1.84", "imbalance, now 1.02 1.02",
        "tokens per second 12,346 12,346", "update 1.00 1.00",
    ):  # fmt: skip
        assert row.split() in lines, row
    assert [line[0] for line in lines[-4:]] == ["rollout", "plan", "logprob", "update"]
    assert ["held-out", "reward", "-", "-"] in [line.split() for line in summary_table(History()).splitlines()]


def test_the_summary_is_strict_json(tmp_path):
    folder = RunFolder(path=tmp_path)
    found = summary(history_of_a_run(), folder, steps=60, stopped=True, report=None)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["steps"] == 3
    assert found["metrics"]["loss"] is None
    assert found["metrics"]["reward"] == pytest.approx(0.2)
    assert (found["reward_held_out_first"], found["reward_held_out_last"]) == (0.125, 0.75)
    assert summary(History(), folder, steps=60, stopped=False, report="x")["steps"] == 0
