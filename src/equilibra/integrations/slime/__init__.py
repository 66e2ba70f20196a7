"""slime: the routing of its samples as sequences. slime itself is not needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from equilibra.core.errors import InputError
from equilibra.integrations.routing_formats.decode import as_rows, located
from equilibra.integrations.routing_formats.model import RoutedModel
from equilibra.integrations.routing_formats.sequence import RoutedSequence, Rows, align, unrecorded

__all__ = ["sequences_of_samples"]

# Routing in slime's samples, as `--use-rollout-routing-replay` fills them.
#
#     sample.tokens                   prompt and response
#     sample.response_length          tokens of the response
#     sample.rollout_routed_experts   [tokens - 1, layers, k] int32, or None
#     sample.group_index              answers to one prompt share it, or None
#
# A dictionary with these keys will do as well (`Sample.to_dict()`).


def sequences_of_samples(samples: Iterable[Any], model: RoutedModel) -> Iterator[RoutedSequence]:
    """The sequences of slime's samples, as they come; groups of samples may be lists, as rollouts return them."""
    number = 0
    for entry in samples:
        for sample in entry if isinstance(entry, list | tuple) else (entry,):
            with located(f"sample {number}"):
                yield _sequence(sample, model)
            number += 1


def _sequence(sample: Any, model: RoutedModel) -> RoutedSequence:  # noqa: ANN401 - slime has the type
    tokens, response = _field(sample, "tokens"), _field(sample, "response_length")
    if tokens is None or len(tokens) == 0:
        raise InputError("it has no tokens")
    num_tokens = len(tokens)
    if response is not None and not 0 <= response <= num_tokens:
        raise InputError(f"a response of {response} tokens does not fit {num_tokens}")
    prompt, group = None if response is None else num_tokens - int(response), _field(sample, "group_index")
    routed = _field(sample, "rollout_routed_experts")
    if routed is None:
        return unrecorded(num_tokens, model, prompt_length=prompt, group=group)
    return align(Rows(values=as_rows(routed), num_tokens=num_tokens, prompt_length=prompt, group=group), model)


def _field(sample: Any, name: str) -> Any:  # noqa: ANN401
    return sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)
