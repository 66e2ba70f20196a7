"""`equilibra calibrate`: fit a hardware file for `simulate` to measurements, measured runs or this machine."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equilibra.core.errors import InputError

if TYPE_CHECKING:
    from equilibra.cost.prices import Prices

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:  # noqa: ANN401
    """Add the subcommand."""
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
    base.add_argument(
        "--measure", action="store_true", help="start from this machine, measured as by `equilibra doctor`"
    )
    parser.add_argument("--name", default="mine", help="name of the result (mine)")
    parser.add_argument("--output", metavar="FILE.toml", help="write the hardware to this file")
    parser.add_argument("--overwrite", action="store_true", help="replace --output if it exists")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Fit, print the errors of the fit, and write the file."""
    from equilibra.core.atomic import atomic_file
    from equilibra.cost.calibrate import Calibration, calibrate
    from equilibra.cost.presets import load_prices, prices_toml

    if not arguments.source and not arguments.measure:
        raise InputError("nothing to fit: name measurements or runs, or measure this machine with --measure")
    measurements = [one for source in arguments.source for one in _measurements(Path(source))]
    base = _this_machine(arguments.name) if arguments.measure else load_prices(arguments.base)
    fitted = Calibration(hardware=base, errors={})
    if arguments.source:
        files = ", ".join(Path(name).name for name in arguments.source)
        rest = f"from {base.source}" if arguments.measure else f"as {base.name}"
        fitted = calibrate(measurements, base, name=arguments.name, source=f"fitted to {files}; the rest {rest}")
    text = prices_toml(fitted.hardware)
    if arguments.output:
        with atomic_file(Path(arguments.output), overwrite=arguments.overwrite) as part:
            part.write_text(text)
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
    if not arguments.output:
        print("\n" * bool(fitted.errors) + text, end="")
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
            raise InputError(f"{path} has no list of measurements")
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
