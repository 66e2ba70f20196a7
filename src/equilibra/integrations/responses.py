"""Read JSONL files of responses from vLLM's or SGLang's HTTP server, with routing.

A line is a response, or {"request": ..., "response": ...}; the request then says which prefix it left out
(`routed_experts_start_len`, `routed_experts_prompt_start`). Lines are read one at a time up to a size limit, so the
file may be of any size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from equilibra.core.atomic import cannot
from equilibra.core.errors import InputError
from equilibra.integrations import sglang, vllm
from equilibra.integrations.routing_formats import RoutedModel, RoutedSequence, count_in, located, table_in

FORMATS = ("vllm", "sglang")
MAX_LINE_BYTES = 256 << 20
START = ("routed_experts_start_len", "routed_experts_prompt_start")


def sequences_of_file(
    path: Path | str, model: RoutedModel, *, engine: str | None = None, first: int = 0,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[RoutedSequence]:  # fmt: skip
    """The sequences of a file of responses, one at a time.

    engine: vllm or sglang; None: detected per response. first: length of the prefix that requests left out, for lines
    without a request.
    """
    path = Path(path)
    if engine not in (None, *FORMATS):
        raise InputError(f"responses must be of {' or '.join(FORMATS)}, not of {engine!r}")
    try:
        with path.open("rb") as file:
            for number, line in _lines(file, path, max_line_bytes):
                with located(f"{path}, line {number}"):
                    yield from _sequences(line, model, engine, first)
    except OSError as error:
        raise cannot("read", path, error) from error


def _lines(file: IO[bytes], path: Path, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes:
            raise InputError(f"{path}, line {number}: longer than {max_bytes:,} bytes; write one response per line")
        if line.strip():
            yield number, line


def _sequences(line: bytes, model: RoutedModel, engine: str | None, first: int) -> Iterator[RoutedSequence]:
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not valid JSON ({str(error)[:120]}): a line must hold one whole response") from error
    if isinstance(body, Mapping) and "response" in body:
        first, body = _start(table_in(body, "request"), first), body["response"]
    if (engine or _engine_of(body)) == "sglang":
        yield from sglang.sequences_of_response(body, model, first=first)
    elif isinstance(body, Mapping):
        yield from vllm.sequences_of_response(body, model, first=first)
    else:
        raise InputError(f"a vLLM response must be a table, not a {type(body).__name__}")


def _start(request: Mapping[str, Any], otherwise: int) -> int:
    """Length of the prefix that the request left out, from its top level or its sampling parameters."""
    for table in (request, table_in(request, "sampling_params"), table_in(request, "extra_body")):
        for name in START:
            found = count_in(table, name)
            if found is not None:
                return found
    return otherwise


def _engine_of(body: object) -> str:
    """Which engine answered: only SGLang has meta_info, sglext or sgl_ext; vLLM has choices without them."""
    sample = body[0] if isinstance(body, list) and body else body
    if isinstance(sample, Mapping):
        if "meta_info" in sample or sample.get("sglext"):
            return "sglang"
        choices = sample.get("choices")
        if isinstance(choices, list) and choices:
            extended = any(isinstance(choice, Mapping) and choice.get("sgl_ext") for choice in choices)
            return "sglang" if extended else "vllm"
    raise InputError(
        "neither a vLLM response (choices) nor an SGLang response (meta_info): convert another program's to one of them"
    )
