"""The live view of a run on a terminal: current stage, rewards, imbalance, and seconds per stage.

The only file that imports rich. `draw` is a pure function of the state; `LiveView` keeps the state and redraws it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from equilibra.rl.observe import Observer
from equilibra.train.metrics import STAGE, STARTING, History

REFRESHES_PER_S = 3.0
"""a redraw takes 3 to 6 ms of a core that ranks need"""
PACE_OVER = 10
"""newest steps that predict the remaining time"""
NOTES = 3
"""messages that stay in view"""
STAGES = ("rollout", "reward", "plan", "logprob", "update", "weights", "checkpoint")
COLOURS = ("cyan", "magenta", "green", "blue", "yellow", "red", "white")
BAR, SPARKS = 36, "▁▂▃▄▅▆▇█"


@dataclass(kw_only=True)
class Picture:
    """The state that is drawn."""

    title: str
    steps: int
    history: History = field(default_factory=History)
    stage: tuple[str, int, int, int] = ("start", 0, 0, 0)
    """name, step, parts done, parts in total"""
    began: float = 0.0
    """start of the view, in seconds of its clock"""
    ends: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=PACE_OVER + 1))
    """newest steps and their end times in seconds"""
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=NOTES))


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Values as small bars, scaled from lowest to highest; averaged to at most `width` bars."""
    if not values:
        return ""
    size = math.ceil(len(values) / width)
    means = [sum(part) / len(part) for part in (values[at : at + size] for at in range(0, len(values), size))]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)


def draw(picture: Picture, *, now: float, spinner: RenderableType | None = None) -> RenderableType:
    """The panel that shows the state at time `now`."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column()
    history = picture.history
    for name, series in (("reward", history.series("reward")), ("held out", history.held_out())):
        first = f"  from {series[0]:.3f}" if len(series) > 1 else ""
        rows.add_row(name, f"{format(series[-1], '.3f') if series else '-'}  {sparkline(series)}{first}")
    rows.add_row("policy", f"KL {_last(history, 'kl', '.4f')}  ·  entropy {_last(history, 'entropy', '.2f')}")
    imbalance = f"{_last(history, 'imbalance_static', '.2f')} static, {_last(history, 'imbalance', '.2f')} now"
    rows.add_row("imbalance", f"{imbalance}  ·  exposed {_last(history, 'exposed', '.1%')}")
    rows.add_row("tokens/s", _last(history, "tokens_per_s", ",.0f"))
    rows.add_row("seconds", _stage_bar(history))
    parts: list[RenderableType] = [_headline(picture, now, spinner), rows]
    parts += [Text(f"! {note}", style="yellow") for note in picture.notes]
    return Panel(Group(*parts), title=Text(picture.title), title_align="left", width=100)


def _headline(picture: Picture, now: float, spinner: RenderableType | None) -> RenderableType:
    name, step, done, total = picture.stage
    line = Table.grid(padding=(0, 1))
    bar: RenderableType = ProgressBar(total=total, completed=min(done, total), width=20) if total > 0 else ""
    count = f"{done}/{total}" if total > 0 else ""
    where = f"step {min(step + 1, picture.steps)} of {picture.steps}"
    left = _seconds_left(picture)
    times = f"{_clock(now - picture.began)} so far" + (f", {_clock(left)} left" if left is not None else "")
    if name == "start":
        where = STARTING
    line.add_row(spinner or "", Text(name, style="bold cyan"), bar, count, Text(f" {where}  ·  {times}", style="dim"))
    return line


def _seconds_left(picture: Picture) -> float | None:
    """Estimate from the pace of the newest steps."""
    if not picture.ends:
        return None
    (first, start), (last, end) = picture.ends[0], picture.ends[-1]
    pace = (end - start) / (last - first) if last > first else picture.history.last("seconds")
    remaining = max(0, picture.steps - 1 - last)
    return pace * remaining if pace is not None and math.isfinite(pace) else None


def _clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours = f"{whole // 3600}:" if whole >= 3600 else ""
    return f"{hours}{whole // 60 % 60:0{2 if hours else 1}}:{whole % 60:02}"


def _stage_bar(history: History) -> RenderableType:
    """Seconds of each stage of the newest step, as parts of one bar and as numbers."""
    seconds = {stage: history.last(STAGE + stage) or 0.0 for stage in STAGES}
    seconds = {stage: value for stage, value in seconds.items() if math.isfinite(value) and value > 0}
    total = sum(seconds.values())
    if total <= 0:
        return Text("-", style="dim")
    bar, legend, reached = Text(), Text(), 0.0
    for stage, value in seconds.items():
        colour = COLOURS[STAGES.index(stage)]
        begin, reached = round(BAR * reached / total), reached + value
        bar.append("█" * (round(BAR * reached / total) - begin), style=colour)
        legend.append(f"{stage} ", style=colour).append(f"{value:.2f}  ")
    whole = history.last("seconds")
    return Group(bar.append(f"  {whole:.2f} s a step" if whole is not None else ""), legend)


def _last(history: History, name: str, form: str) -> str:
    value = history.last(name)
    return "-" if value is None else format(value, form)


def can_draw(stream: TextIO) -> bool:
    """Whether the stream is a terminal that can show the view."""
    console = Console(file=stream)
    return console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")


class LiveView(Observer):
    """Draws a run on the terminal; the last picture stays."""

    def __init__(
        self, *, title: str, steps: int, history: History | None = None, console: Console | None = None,
        stream: TextIO | None = None, clock: Callable[[], float] = monotonic,
    ) -> None:  # fmt: skip
        """Start drawing. history: what a resumed run reported before."""
        self._clock, self._lock = clock, Lock()
        self._spinner: Spinner | None = Spinner("dots", style="cyan")
        self.picture = Picture(title=title, steps=steps, history=history or History(), began=clock())
        self._live = Live(
            get_renderable=self._draw,
            console=console or Console(file=stream),
            refresh_per_second=REFRESHES_PER_S,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def _draw(self) -> RenderableType:
        with self._lock:  # rich draws in a thread of its own
            return draw(self.picture, now=self._clock(), spinner=self._spinner)

    def stage(self, name: str, *, step: int, done: int = 0, total: int = 0) -> None:
        with self._lock:
            self.picture.stage = (name, step, done, total)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self.picture.history.add_step(step, metrics)
            self.picture.ends.append((step, self._clock()))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self.picture.history.add_evaluation(step, metrics)

    def note(self, text: str) -> None:
        with self._lock:
            self.picture.notes.append(text)
        self._live.refresh()

    def close(self) -> None:
        self._spinner = None
        self._live.stop()
