"""`equilibra doctor` checks and measures this machine; `equilibra calibrate` fits a hardware file to measurements.

Both write a hardware file for `simulate` and `train`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import equilibra
from equilibra.cli.arguments import Progress, check_target, named_like, number, positive
from equilibra.core.errors import InputError

if TYPE_CHECKING:
    from equilibra.cost.prices import Prices


def _write(prices: Prices, path: Path, *, overwrite: bool) -> None:
    from equilibra.core.atomic import atomic_file
    from equilibra.cost.presets import prices_toml

    with atomic_file(path, overwrite=overwrite) as part:
        part.write_text(prices_toml(prices))


# --- doctor ---


def add_doctor(commands: Any) -> None:  # noqa: ANN401
    parser = commands.add_parser(
        "doctor",
        help="check and measure this machine, and say which transfer paths work on it",
        description="Checks software, GPUs, links and memory, measures them, and says which transfer paths work. Exit "
        "code 0 if at least one works, 1 if none, 2 for bad input.",
    )
    parser.add_argument("--model", metavar="NAME", help="preset, .toml or config.json: is /dev/shm enough for it?")
    number(parser, "--spare-slots", 2, "S", "flash copies a rank can hold")
    parser.add_argument("--ranks-per-node", type=positive, metavar="G", help="ranks on this machine (its GPUs)")
    parser.add_argument("--no-measure", action="store_true", help="only check, which saves a few seconds")
    parser.add_argument("--write", metavar="FILE.toml", help="write its prices, for --hardware and balance.hardware")
    parser.add_argument("--force", "--overwrite", action="store_true", help="replace --write's file if it exists")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=doctor)


def doctor(arguments: argparse.Namespace) -> int:
    from equilibra.doctor.finding import Ask, PathState, as_table, as_text
    from equilibra.doctor.measure import preset_of
    from equilibra.doctor.node import examine

    _check(arguments)
    ask = Ask(**named_like(Ask, arguments))
    progress = Progress()
    tell = progress.step if sys.stderr.isatty() else lambda *_: None  # a line for each short job would be noise
    try:
        found = examine(ask, measure=not arguments.no_measure, tell=tell)
    finally:
        progress.close()
    if arguments.json:
        about = {"command": "equilibra " + shlex.join(sys.argv[1:]), "version": equilibra.__version__,
                 "date": datetime.now(UTC).isoformat(timespec="seconds")}  # fmt: skip
        print(json.dumps({**about, **as_table(found)}))
    else:
        print(as_text(found))
    sys.stdout.flush()
    if path := arguments.write:  # last: a full disk must not cost the answer
        preset = preset_of(found.findings, found.measured, name=Path(path).stem.lower())
        _write(preset.hardware, Path(path), overwrite=arguments.force)
        print(
            f"wrote {path}: {', '.join(preset.measured)} from this machine, the rest from {preset.base}\n"
            f"use it with: equilibra simulate --hardware {path}, or equilibra train balance.hardware={path}",
            file=sys.stderr,
        )
    return 0 if any(one.state is PathState.WORKS for one in found.verdicts) else 1


def _check(arguments: argparse.Namespace) -> None:
    """Refuse early what would fail after the measurements."""
    if arguments.model is not None:
        from equilibra.cost.presets import load_model

        load_model(arguments.model)
    if arguments.write is None:
        if arguments.force:
            raise InputError("--force goes with --write: it replaces that file")
        return
    if arguments.no_measure:
        raise InputError("--write needs measurements: leave out --no-measure")
    if Path(arguments.write).suffix != ".toml":
        raise InputError(f"cannot write {arguments.write}: hardware files end in .toml")
    check_target(arguments.write, overwrite=arguments.force, option="--force")


# --- calibrate ---


def add_calibrate(commands: Any) -> None:  # noqa: ANN401
    parser = commands.add_parser(
        "calibrate",
        help="fit the cost model to measurements of your machine",
        description="Reads measurement files and folders of measured runs. Constants without a measurement stay as in "
        "--base, or as measured here with --measure: products, memory and links. In a clone of the repository, "
        "benchmarks/probes/measure_device.py measures experts and attention.",
    )
    parser.add_argument("source", nargs="*", metavar="FILE|RUN", help="measurements (.json) or measured runs")
    base = parser.add_mutually_exclusive_group()
    base.add_argument("--base", default="h200", metavar="NAME", help="hardware to start from (h200)")
    base.add_argument("--measure", action="store_true", help="start from this machine, measured as by `doctor`")
    parser.add_argument("--name", default="mine", help="name of the result (mine)")
    parser.add_argument("--output", metavar="FILE.toml", help="write the hardware to this file")
    parser.add_argument("--overwrite", action="store_true", help="replace --output if it exists")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=calibrate)


def calibrate(arguments: argparse.Namespace) -> int:
    from equilibra.cost import calibrate as fit
    from equilibra.cost.presets import load_prices, prices_toml

    if not arguments.source and not arguments.measure:
        raise InputError("nothing to fit: name measurements or runs, or measure this machine with --measure")
    measurements = [one for source in arguments.source for one in _measurements(Path(source))]
    base = _this_machine(arguments.name) if arguments.measure else load_prices(arguments.base)
    fitted = fit.Calibration(hardware=base, errors={})
    if arguments.source:
        files = ", ".join(Path(name).name for name in arguments.source)
        rest = f"from {base.source}" if arguments.measure else f"as {base.name}"
        fitted = fit.calibrate(measurements, base, name=arguments.name, source=f"fitted to {files}; the rest {rest}")
    if arguments.output is not None:
        _write(fitted.hardware, Path(arguments.output), overwrite=arguments.overwrite)
        print(f"wrote {arguments.output}; use it with --hardware {arguments.output}", file=sys.stderr)
    if arguments.json:
        errors = {
            name: {"cases": cases, "mean_error": mean, "largest_error": most}
            for name, (cases, mean, most) in fitted.errors.items()
        }
        print(json.dumps({"name": arguments.name, "measurements": len(measurements), "errors": errors}))
        return 0
    if fitted.errors:
        print(f"{'fitted':28}{'cases':>7}{'mean error':>13}{'largest':>10}")
    for name, (cases, mean, most) in fitted.errors.items():
        print(f"{name:28}{cases:>7}{mean:>13.1%}{most:>10.1%}")
    if arguments.output is None:
        print("\n" * bool(fitted.errors) + prices_toml(fitted.hardware), end="")
    return 0


def _this_machine(name: str) -> Prices:
    """The prices that `equilibra doctor --write` would write."""
    from equilibra.doctor.finding import Ask
    from equilibra.doctor.measure import preset_of
    from equilibra.doctor.node import examine

    found = examine(Ask())
    preset = preset_of(found.findings, found.measured, name=name)
    print(f"measured here: {', '.join(preset.measured)}; the rest from {preset.base}", file=sys.stderr)
    return preset.hardware


def _measurements(path: Path) -> list[dict[str, Any]]:
    from equilibra.core.model import MoEModel
    from equilibra.core.placement import Cluster
    from equilibra.cost.calibrate import measurements_of_run
    from equilibra.cost.presets import read_table
    from equilibra.events.run import load_run

    if not path.is_dir():
        found = read_table(path).get("measurements")
        if not isinstance(found, list):
            raise InputError(f'{path} has no list "measurements": give a file that a measurement program wrote')
        return found
    loaded = load_run(path)
    if loaded.about.get("kind") != "measured":
        raise InputError(f"{path} is {loaded.about.get('kind', 'of unknown kind')}: only measured runs can be fitted")
    try:
        model = MoEModel(**loaded.about["model"])
        cluster = Cluster(**loaded.about["cluster"])
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: run.json does not say which model ran on which cluster ({error})") from error
    experts = cluster.experts_per_rank(model.num_experts)
    return [
        one
        for record in loaded.planners.values()
        for one in measurements_of_run(model, record.events, experts_per_rank=experts)
    ]
