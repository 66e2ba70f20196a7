"""Read routing that SGLang reports. SGLang itself is never imported.

A server with `--enable-return-routed-experts` answers a request with `return_routed_experts` by the base64 of int32
values, [prompt + answer - 1 - start, layers, k], where `start` is the request's `routed_experts_start_len` (0).
`/generate` puts them into `meta_info["routed_experts"]` (a tensor with skip_tokenizer_init). The OpenAI-style endpoints
put them into `sglext` of the response, for its first choice alone; before 0.5.9 into `sgl_ext` of every choice. They
have no header: layers and k come from the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from equilibra.core.errors import InputError
from equilibra.integrations import routing_formats as formats
from equilibra.integrations.routing_formats import RoutedModel, RoutedSequence, count_in, located, table_in

__all__ = ["meta_info", "sequence_of_result", "sequences_of_response"]


def sequences_of_response(response: object, model: RoutedModel, *, first: int = 0) -> Iterator[RoutedSequence]:
    """The sequences of a response: of `/generate` for one prompt or a list, of a completion or of a chat.

    first: the request's `routed_experts_start_len`.
    """
    if isinstance(response, Mapping) and "choices" in response:
        yield from _of_choices(response, model, first)
        return
    results = response if isinstance(response, list) else [response]
    for number, result in enumerate(results):
        with located(f"result {number}"):
            yield sequence_of_result(result, model, first=first)


def sequence_of_result(result: object, model: RoutedModel, *, first: int = 0) -> RoutedSequence:
    """The sequence of one result of `/generate`. first: the request's `routed_experts_start_len`."""
    meta = meta_info(result)
    prompt, answer = count_in(meta, "prompt_tokens"), count_in(meta, "completion_tokens")
    if prompt is None or answer is None:
        raise InputError("meta_info must have prompt_tokens and completion_tokens: they give the sequence's length")
    return _sequence(meta.get("routed_experts"), model, prompt, prompt + answer, first)


def meta_info(result: object) -> Mapping[str, Any]:
    """The table `meta_info` of one result of `/generate`."""
    meta = result.get("meta_info") if isinstance(result, Mapping) else None
    if not isinstance(meta, Mapping):
        raise InputError(f"an SGLang result must have a table meta_info, and this is {result!r:.80}")
    return meta


def _of_choices(response: Mapping[str, Any], model: RoutedModel, first: int) -> Iterator[RoutedSequence]:
    choices, usage = response["choices"], table_in(response, "usage")
    if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
        raise InputError(f"choices must be a list of tables, not {choices!r:.60}")
    prompt, answer = count_in(usage, "prompt_tokens"), count_in(usage, "completion_tokens")
    num_tokens = prompt + answer if prompt is not None and answer is not None and len(choices) == 1 else None
    shared = table_in(response, "sglext").get("routed_experts")
    for number, choice in enumerate(choices):
        with located(f"choice {number}"):
            routed = table_in(choice, "sgl_ext").get("routed_experts", choice.get("routed_experts"))
            if shared is not None and number:
                raise InputError("SGLang returns the routing of the first choice alone: ask with n = 1, or /generate")
            routed = routed if shared is None else shared
            yield _sequence(routed, model, prompt, num_tokens, first)


def _sequence(
    routed: object, model: RoutedModel, prompt: int | None, num_tokens: int | None, first: int
) -> RoutedSequence:  # fmt: skip
    if routed is None:
        if num_tokens is None:
            raise InputError("there is no routing, and usage does not give the number of tokens of this choice")
        return formats.align(None, model, num_tokens=num_tokens, prompt_length=prompt)
    if isinstance(routed, str | bytes):
        rows = formats.flat_int32(formats.from_base64(routed), num_layers=model.num_layers, top_k=model.top_k)
    else:
        rows = formats.as_rows(routed).astype("int32", copy=False)
    return formats.align(rows, model, num_tokens=num_tokens, first=first, prompt_length=prompt)
