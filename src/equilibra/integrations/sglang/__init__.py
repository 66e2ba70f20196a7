"""SGLang: its routing as sequences, and the engine over HTTP. SGLang itself is never imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from equilibra.core.errors import InputError
from equilibra.integrations.routing_formats.decode import as_rows, count_in, flat_int32, from_base64, located, table_in
from equilibra.integrations.routing_formats.model import RoutedModel
from equilibra.integrations.routing_formats.sequence import RoutedSequence, Rows, align, unrecorded

__all__ = ["sequence_of_result", "sequences_of_response"]

# Routing that SGLang reports.
#
# A server with `--enable-return-routed-experts` answers a request with `return_routed_experts` by the base64 of bare
# int32 numbers, [prompt + answer - 1 - start, layers, k], where `start` is what the request's
# `routed_experts_start_len`
# was (0). `/generate` has it in `meta_info["routed_experts"]` (a tensor with skip_tokenizer_init), the endpoints in
# OpenAI's style in every choice's `sgl_ext`. The numbers have no header: layers and k come from the model.


def sequences_of_response(response: object, model: RoutedModel, *, first: int = 0) -> Iterator[RoutedSequence]:
    """The sequences of one response: of `/generate` for one prompt or a list of them, of completions or of chat."""
    if isinstance(response, Mapping) and "choices" in response:
        yield from _of_choices(response, model, first)
        return
    results = response if isinstance(response, list) else [response]
    for number, result in enumerate(results):
        with located(f"result {number}"):
            yield sequence_of_result(result, model, first=first)


def sequence_of_result(result: object, model: RoutedModel, *, first: int = 0) -> RoutedSequence:
    """The sequence of one result of `/generate`. first: what `routed_experts_start_len` was."""
    if not isinstance(result, Mapping) or not isinstance(result.get("meta_info"), Mapping):
        raise InputError("a result of SGLang has a table meta_info, and this has none")
    meta = result["meta_info"]
    prompt, answer = count_in(meta, "prompt_tokens"), count_in(meta, "completion_tokens")
    if prompt is None or answer is None:
        raise InputError("meta_info must say prompt_tokens and completion_tokens, which tell how long the sequence is")
    return _sequence(meta.get("routed_experts"), model, prompt, prompt + answer, first)


def _of_choices(response: Mapping[str, Any], model: RoutedModel, first: int) -> Iterator[RoutedSequence]:
    choices, usage = response["choices"], table_in(response, "usage")
    if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
        raise InputError("choices must be a list of tables")
    prompt, answer = count_in(usage, "prompt_tokens"), count_in(usage, "completion_tokens")
    known = prompt is not None and answer is not None and len(choices) == 1
    for number, choice in enumerate(choices):
        with located(f"choice {number}"):
            said = table_in(choice, "sgl_ext").get("routed_experts", choice.get("routed_experts"))
            yield _sequence(said, model, prompt, (prompt or 0) + (answer or 0) if known else None, first)


def _sequence(
    said: object, model: RoutedModel, prompt: int | None, num_tokens: int | None, first: int
) -> RoutedSequence:  # fmt: skip
    if said is None:
        if num_tokens is None:
            raise InputError("there is no routing, and usage does not say how many tokens this choice has")
        return unrecorded(num_tokens, model, prompt_length=prompt)
    if isinstance(said, str | bytes):
        values = flat_int32(from_base64(said), num_layers=model.num_layers, top_k=model.top_k)
    else:
        values = as_rows(said).astype("int32", copy=False)
    return align(Rows(values=values, num_tokens=num_tokens, first=first, prompt_length=prompt), model)
