"""Read routing from slime's samples, as `--use-rollout-routing-replay` fills them. slime is not needed.

    sample.tokens                   prompt and response
    sample.response_length          tokens of the response
    sample.rollout_routed_experts   [tokens - 1, layers, k] int32, or None
    sample.group_index              shared by all answers to one prompt, or None

A dictionary with these keys (`Sample.to_dict()`) works as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from equilibra.core.errors import InputError
from equilibra.integrations.routing_formats import RoutedModel, RoutedSequence, align, as_rows, located

__all__ = ["sequences_of_samples"]


def sequences_of_samples(samples: Iterable[Any], model: RoutedModel) -> Iterator[RoutedSequence]:
    """The sequences of slime's samples, one at a time; an entry may be a list of samples, as rollouts return them."""
    number = 0
    for entry in samples:
        for sample in entry if isinstance(entry, list | tuple) else (entry,):
            with located(f"sample {number}"):
                yield _sequence(sample, model)
            number += 1


def _sequence(sample: Any, model: RoutedModel) -> RoutedSequence:  # noqa: ANN401 - slime's type, or a dictionary
    names = ("tokens", "response_length", "group_index", "rollout_routed_experts")
    tokens, response, group, routed = (
        sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None) for name in names
    )
    if tokens is None or len(tokens) == 0:
        raise InputError("it has no tokens")
    num_tokens = len(tokens)
    if response is not None and not 0 <= response <= num_tokens:
        raise InputError(f"a response of {response} tokens does not fit {num_tokens} tokens")
    prompt = None if response is None else num_tokens - int(response)
    rows = None if routed is None else as_rows(routed)
    return align(rows, model, num_tokens=num_tokens, prompt_length=prompt, group=group)
