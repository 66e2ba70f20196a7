"""`equilibra trace convert`: between the two formats of recordings, and from responses of inference servers to them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from equilibra.cli.progress import announced
from equilibra.core.errors import InputError, TraceFormatError

if TYPE_CHECKING:
    from equilibra.integrations.routing_formats import RoutedModel

__all__ = ["add_convert"]

RESPONSES = ("vllm", "sglang")
LINES = (".jsonl", ".ndjson")
PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin")
MODEL = "give --model FOLDER (with its config.json), or --layers, --top-k and --experts"


def add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    convert = commands.add_parser(
        "convert",
        help="from .npz to .eqtrace and back, or from responses of vLLM or SGLang, by the suffix of DST",
        description="SRC is a recording (NAME.npz, NAME.eqtrace), or a file with one response of vLLM's or SGLang's "
        'HTTP server per line (NAME.jsonl), as it came or as {"request": ..., "response": ...}.',
    )
    convert.add_argument("source", metavar="SRC", help="NAME.npz, NAME.eqtrace or NAME.jsonl")
    convert.add_argument("target", metavar="DST", help="NAME.npz or NAME.eqtrace")
    convert.add_argument(
        "--format",
        choices=("auto", *RESPONSES),
        default="auto",
        help="who wrote the responses; auto (default): by what is in them",
    )
    convert.add_argument("--experts", type=int, metavar="E", help="experts of a layer, where SRC does not say")
    convert.add_argument("--model", metavar="FOLDER", help="of responses: folder with the model's config.json")
    convert.add_argument("--layers", type=int, metavar="L", help="of responses: decoder layers, dense ones too")
    convert.add_argument("--top-k", type=int, metavar="K", help="of responses: experts per token")
    convert.add_argument("--dense", type=_numbers, metavar="0,1,...", help="of responses: layers without experts")
    convert.add_argument(
        "--start-len",
        type=int,
        metavar="N",
        help="of responses: tokens at the start that requests left out (routed_experts_start_len; default 0)",
    )
    convert.add_argument("--overwrite", action="store_true", help="replace DST if it is there")
    convert.add_argument("--json", action="store_true", help="print one JSON object")
    convert.set_defaults(run=_convert)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers of layers with commas, as in 0,1,2, not {text!r}") from None


def _convert(arguments: argparse.Namespace) -> int:
    suffix = Path(arguments.source).suffix
    if suffix in PICKLES:
        raise TraceFormatError(
            f"cannot open {arguments.source}: {suffix} files are pickles, which run code when they are opened, and so "
            "never are; convert where it was made: equilibra.integrations has functions for the objects inside"
        )
    with announced(f"converting {arguments.source}"):
        responses = arguments.format in RESPONSES or suffix in LINES
        tokens, sequences = _convert_responses(arguments) if responses else _convert_recording(arguments)
    made = {"target": arguments.target, "tokens": tokens, "sequences": sequences}
    text = json.dumps(made) if arguments.json else f"wrote {arguments.target}: {tokens} tokens, {sequences} sequences"
    sys.stdout.write(text + "\n")
    return 0


def _convert_recording(arguments: argparse.Namespace) -> tuple[int, int]:
    from equilibra.trace.open import load_trace, save_trace

    given = [
        name for name in ("model", "layers", "top_k", "dense", "start_len") if getattr(arguments, name) is not None
    ]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InputError(f"{names} are about responses, and {arguments.source} is none: its name must end in .jsonl")
    recording = load_trace(arguments.source, num_experts=arguments.experts)
    save_trace(recording, arguments.target, overwrite=arguments.overwrite)
    return recording.num_tokens, recording.num_sequences


def _convert_responses(arguments: argparse.Namespace) -> tuple[int, int]:
    from equilibra.integrations.responses import sequences_of_file
    from equilibra.integrations.routing_formats import save_sequences

    model = _model(arguments)
    engine = None if arguments.format == "auto" else arguments.format
    sequences = sequences_of_file(arguments.source, model, engine=engine, first=arguments.start_len or 0)
    return save_sequences(sequences, arguments.target, model, overwrite=arguments.overwrite)


def _model(arguments: argparse.Namespace) -> RoutedModel:
    """What the responses are about: from config.json, from options, or from both where options say more."""
    from dataclasses import replace

    from equilibra.integrations.routing_formats import RoutedModel, model_from_folder

    said = {"num_layers": arguments.layers, "top_k": arguments.top_k, "num_experts": arguments.experts}
    said["dense_layers"] = arguments.dense
    given = {name: value for name, value in said.items() if value is not None}
    if arguments.model is not None:
        return replace(model_from_folder(arguments.model), **given)
    if missing := [name for name in ("num_layers", "top_k", "num_experts") if name not in given]:
        raise InputError(f"responses do not say the model's {', '.join(missing)}: {MODEL}")
    return RoutedModel(**given)
