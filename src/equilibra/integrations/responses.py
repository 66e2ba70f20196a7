"""Files of responses: one JSON response of vLLM's or SGLang's HTTP server per line, routing and all.

A line is what the server answered, or {"request": ..., "response": ...}: then what the request left out
(`routed_experts_start_len`, `routed_experts_prompt_start`) is known. Lines are read one at a time and have a limit, so
a file of any size can be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from equilibra.core.atomic import cannot
from equilibra.core.errors import InputError
from equilibra.integrations import sglang, vllm
from equilibra.integrations.routing_formats.decode import count_in, located, table_in
from equilibra.integrations.routing_formats.model import RoutedModel
from equilibra.integrations.routing_formats.sequence import RoutedSequence

__all__ = ["FORMATS", "sequences_of_file"]

FORMATS = ("vllm", "sglang")
MAX_LINE_BYTES = 256 << 20
START = ("routed_experts_start_len", "routed_experts_prompt_start")


def sequences_of_file(
    path: Path | str, model: RoutedModel, *, engine: str | None = None, first: int = 0,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[RoutedSequence]:  # fmt: skip
    """The sequences of a file of responses.

    engine: vllm or sglang; None: by what a response looks like. first: tokens that requests left out, where a line
    does not say it.
    """
    path = Path(path)
    if engine not in (None, *FORMATS):
        raise InputError(f"responses are of {' or '.join(FORMATS)}, not of {engine!r}")
    try:
        with path.open("rb") as file:
            for number, line in _lines(file, path, max_line_bytes):
                with located(f"{path}, line {number}"):
                    yield from _sequences(_parsed(line), model, engine, first)
    except OSError as error:
        raise cannot("read", path, error) from error


def _lines(file: IO[bytes], path: Path, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes:
            raise InputError(
                f"{path}, line {number}: it is longer than {max_bytes:,} bytes; a line holds one response, split it"
            )
        if line.strip():
            yield number, line


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        raise InputError(f"it is no JSON: byte {error.start} is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is no JSON ({str(error)[:120]}): a line holds one whole response") from error


def _sequences(body: object, model: RoutedModel, engine: str | None, first: int) -> Iterator[RoutedSequence]:
    if isinstance(body, Mapping) and "response" in body:
        first = _start(table_in(body, "request"), first)
        body = body["response"]
    engine = engine or _engine_of(body)
    if engine == "sglang":
        yield from sglang.sequences_of_response(body, model, first=first)
    elif not isinstance(body, Mapping):
        raise InputError(f"a response of vLLM is a table, not a {type(body).__name__}")
    else:
        yield from vllm.sequences_of_response(body, model, first=first)


def _start(request: Mapping[str, Any], otherwise: int) -> int:
    """What the request left out, at its top or among its sampling parameters."""
    for table in (request, table_in(request, "sampling_params"), table_in(request, "extra_body")):
        for name in START:
            found = count_in(table, name)
            if found is not None:
                return found
    return otherwise


def _engine_of(body: object) -> str:
    """Who answered: SGLang has meta_info or sgl_ext, vLLM choices without it."""
    sample = body[0] if isinstance(body, list) and body else body
    if isinstance(sample, Mapping):
        if "meta_info" in sample:
            return "sglang"
        choices = sample.get("choices")
        if isinstance(choices, list) and choices:
            extended = any(isinstance(choice, Mapping) and choice.get("sgl_ext") for choice in choices)
            return "sglang" if extended else "vllm"
    raise InputError(
        "this is no response of vLLM (choices) or SGLang (meta_info): if it is another program's, bring it to one of "
        "these forms"
    )
