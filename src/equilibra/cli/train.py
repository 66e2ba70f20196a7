"""`equilibra train`: a complete RL training run, balanced, on this machine or under torchrun.

`equilibra verify`: the passes of one step of a run, with and without balancing, and how far their results are apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from equilibra.cli.arguments import positive
from equilibra.core.errors import EquilibraError, InputError

if TYPE_CHECKING:
    from equilibra.rl.observe import Observer
    from equilibra.train.config import TrainConfig
    from equilibra.train.processes import Place
    from equilibra.train.run_folder import FolderLock, RunFolder

WORKER, VERIFIER = "equilibra.train.worker:run_worker", "equilibra.train.verify:run_verify"
"""module:function that a rank runs; tests replace them"""
NEEDED = ("torch", "transformers", "safetensors", "tensorboard", "rich")


def add_train(commands: Any) -> None:  # noqa: ANN401
    parser = commands.add_parser(
        "train",
        help="train a MoE model with RL and balanced experts; without options a small one, on any laptop",
        usage="equilibra train [section.key=value ...] [--config FILE] [--output DIR | --resume DIR] ...",
        description="Trains a MoE language model on verifiable problems and balances the experts of every step. Starts "
        "cluster.nodes x ranks_per_node x groups processes, or uses torchrun's. One Ctrl-C stops the run with a "
        "checkpoint.",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="options, such as run.steps=20")
    parser.add_argument("--config", metavar="FILE", help="read options from a TOML file")
    parser.add_argument("--output", metavar="DIR", help="run folder (runs/<date and time>)")
    parser.add_argument("--resume", metavar="DIR", help="continue the run in this folder from its last checkpoint")
    parser.add_argument("--planner", metavar="NAME", help="short for balance.planner=NAME; static: no balancing")
    parser.add_argument("--seed", metavar="N", help="short for run.seed=N")
    parser.add_argument("--steps", metavar="N", type=positive, help="short for run.steps=N")
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live view")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--options", action="store_true", help="print every option with its default, and exit")
    parser.set_defaults(run=train, worker=WORKER)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A run that is ready to start."""

    config: TrainConfig
    folder: RunFolder
    resume: bool
    """whether to continue from a checkpoint"""
    fresh: bool
    """whether the folder was created now"""
    place: Place | None
    """this process's rank under torchrun; None: this process starts the ranks"""
    lock: FolderLock | None
    """lock of the folder, held by world rank 0 or the process that starts the ranks"""

    @property
    def is_first(self) -> bool:
        return self.place is None or self.place.rank == 0


def train(arguments: argparse.Namespace) -> int:
    from equilibra.train.config_files import options_text

    if arguments.options:
        print(options_text(), end="")
        return 0
    asked = _prepare(arguments)
    return _end(asked, arguments, stopped=_launch(asked, arguments))


def _prepare(arguments: argparse.Namespace, *, default: Path | None = None) -> _Asked:
    """Read the configuration, and create or open the run folder. default: the folder if --output is not given."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise InputError(f"equilibra {arguments.command} needs {', '.join(missing)}: pip install 'equilibra[train]'")
    from equilibra.train.config_files import load_config
    from equilibra.train.processes import place_under_torchrun
    from equilibra.train.run_folder import FolderLock, RunFolder, begin_run, default_output

    config, folder = _config(arguments)
    place = place_under_torchrun(config.cluster)
    if place is not None and folder is None:
        if arguments.output is None:
            raise InputError("under torchrun every rank must know the run folder: give --output DIR")
        given = RunFolder(path=Path(arguments.output))
        if place.rank != 0 or (place.restarts > 0 and given.config.is_file()):
            folder = given  # rank 0 created it, or torchrun restarts the run
    if folder is None:
        now = datetime.now().astimezone()
        output = Path(arguments.output) if arguments.output is not None else default or default_output(now)
        folder, lock = begin_run(output, config)
        return _Asked(config=config, folder=folder, resume=False, fresh=True, place=place, lock=lock)
    own = FolderLock(folder) if place is None or place.rank == 0 else None
    if own is not None and load_config(folder.config) != config:
        folder.write_config(config)
    resume = arguments.resume is not None or (place is not None and place.restarts > 0)
    resume = resume and folder.has_checkpoint
    return _Asked(config=config, folder=folder, resume=resume, fresh=False, place=place, lock=own)


def _config(arguments: argparse.Namespace) -> tuple[TrainConfig, RunFolder | None]:
    """The checked configuration, and the folder of a resumed run."""
    from equilibra.plan.planner import planner_named
    from equilibra.train.config import TrainConfig
    from equilibra.train.config_files import check_resumable, load_config, with_absolute_paths, with_overrides
    from equilibra.train.run_folder import reopen_run

    short = {"balance.planner": arguments.planner, "run.seed": arguments.seed, "run.steps": arguments.steps}
    overrides = [*arguments.overrides, *(f"{name}={value}" for name, value in short.items() if value is not None)]
    folder: RunFolder | None = None
    if arguments.resume is not None:
        if arguments.config is not None or arguments.output is not None:
            raise InputError("--resume takes configuration and folder from the run: remove --config and --output")
        folder, before = reopen_run(Path(arguments.resume))
        config = with_overrides(before, overrides)
        check_resumable(before, config)
    else:
        base = load_config(arguments.config) if arguments.config is not None else TrainConfig()
        config = with_absolute_paths(with_overrides(base, overrides))
    planner_named(config.balance.planner)  # fail now, not after the warm-up
    return config, folder


def _launch(asked: _Asked, arguments: argparse.Namespace) -> bool:
    """Run all steps; returns whether the run was told to stop earlier."""
    from equilibra.train.metrics import append_line
    from equilibra.train.processes import launch
    from equilibra.train.rank import Job

    job = Job(config=asked.config, folder=asked.folder, resume=asked.resume, worker=arguments.worker)
    locked = nullcontext() if asked.lock is None else closing(asked.lock)
    with locked, closing(_screen(asked, arguments)) as screen:
        try:
            return launch(job, screen=screen, place=asked.place, lock=asked.lock)
        except InputError:
            if asked.fresh:
                asked.folder.discard_if_worthless()
            raise
        except EquilibraError as error:
            if asked.is_first:
                append_line(asked.folder.log, f"{type(error).__name__}: {error}")
            raise
        except KeyboardInterrupt:
            if asked.folder.has_checkpoint:
                print(f"continue with: equilibra train --resume {asked.folder.path}", file=sys.stderr)
            raise


def _screen(asked: _Asked, arguments: argparse.Namespace) -> Observer:
    """The live view on a terminal, plain lines elsewhere; with --json on stderr."""
    from equilibra.train.metrics import PlainLog, read_history

    steps, stream = asked.config.run.steps, sys.stderr if arguments.json else sys.stdout
    if not asked.is_first:
        return PlainLog(lambda _line: None, steps=steps)
    cluster = asked.config.cluster
    what = "continuing" if asked.resume else "starting"
    print(
        f"{what} {asked.folder.path}: {cluster.num_processes} ranks ({cluster.nodes} nodes x {cluster.ranks_per_node}"
        f"{f' x {cluster.groups} groups' if cluster.groups > 1 else ''}), planner {asked.config.balance.planner}",
        file=stream,
        flush=True,
    )
    if not arguments.plain:
        from equilibra.train.view import LiveView, can_draw

        if can_draw(stream):
            history = read_history(asked.folder.metrics)
            return LiveView(title=f"equilibra train · {asked.folder.path}", steps=steps, history=history, stream=stream)
    return PlainLog(partial(print, file=stream, flush=True), steps=steps)


def _end(asked: _Asked, arguments: argparse.Namespace, *, stopped: bool) -> int:
    """Print the summary as a table or JSON, and how to continue a stopped run."""
    from equilibra.train.metrics import read_history, summary, summary_table

    folder, steps = asked.folder, asked.config.run.steps
    history = read_history(folder.metrics)
    done = max(history.steps, default=-1) + 1
    stopped = stopped and done < steps
    if asked.is_first:
        report = finish(folder.path)
        if arguments.json:
            print(json.dumps(summary(history, folder, steps=steps, stopped=stopped, report=report)))
        else:
            print(f"\n{summary_table(history)}\n\nrun: {folder.path}" + (f"\nreport: {report}" if report else ""))
        if stopped:
            print(f"stopped after {done} of {steps} steps; continue with: equilibra train --resume {folder.path}",
                  file=sys.stderr)  # fmt: skip
    return 130 if stopped else 0


def finish(folder: Path) -> str | None:
    """Write the report of the run's last step; None if the run has no record of it, or with a note if that fails."""
    from equilibra.events.run import load_run
    from equilibra.report.page import write_report

    step, report = folder / "step.run", folder / "report.html"
    if not step.is_dir():
        return None
    try:
        write_report(load_run(step), report, overwrite=True)
    except EquilibraError as error:
        print(f"note: no report: {error}", file=sys.stderr)
        return None
    return str(report)


def add_verify(commands: Any) -> None:  # noqa: ANN401
    parser = commands.add_parser(
        "verify",
        help="compare log-probabilities and gradients of a training run with and without balancing",
        usage="equilibra verify [section.key=value ...] [--config FILE] ...",
        description="Takes the options of equilibra train, generates the answers of one step, and runs its passes "
        "twice: as planned, and with static placement. Prints the differences beside what rounding in the run's dtype "
        "explains. Trains nothing. Exit code 1: they differ by more.",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="options of equilibra train")
    parser.add_argument("--config", metavar="FILE", help="read options from a TOML file")
    parser.add_argument("--output", metavar="DIR", help="keep the run folder here; needed under torchrun")
    parser.add_argument("--planner", metavar="NAME", help="short for balance.planner=NAME")
    parser.add_argument("--seed", metavar="N", help="short for run.seed=N")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=verify, worker=VERIFIER, resume=None, steps=1, plain=True)


def verify(arguments: argparse.Namespace) -> int:
    with TemporaryDirectory(prefix="equilibra-verify-") as folder:
        asked = _prepare(arguments, default=Path(folder) / "run")
        _launch(asked, arguments)
        if not asked.is_first:
            return 0
        from equilibra.integrations.differences import check, table
        from equilibra.train.verify import read_differences

        differences, about = read_differences(asked.folder.path)
    if arguments.json:
        same = all(one.is_rounding for one in differences)
        rows = [asdict(one) for one in differences]
        print(json.dumps({**about, "differences": rows, "same": same}))
    else:
        print(
            f"\n{about['sequences']} sequences on {about['ranks']} ranks in {about['dtype']}: {about['planner']} "
            f"(slowest rank {about['imbalance']:.3f} times the mean) against static ({about['imbalance_static']:.3f})\n"
        )
        print(table(differences))
    check(differences)
    if not arguments.json:
        print("\nbalancing changes nothing but rounding")
    return 0
