"""Recorded rollouts as routing traces, which `equilibra simulate` and `equilibra trace` read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.rl.recording.rollouts import load_rollout, read_about
from equilibra.rl.sample import Sample
from equilibra.trace.open import save_trace
from equilibra.trace.routing import PolicySegments, RoutingTrace, narrow_ids

__all__ = ["convert_rollout", "to_trace"]


def to_trace(samples: Iterable[Sample], num_experts: int) -> RoutingTrace:
    """The routing that training replays, of all tokens but each sample's last, which training does not process.

    A policy version is that of the weights which generated a token, for the prompt that of the first window. A token
    with an unknown expert in any layer counts as not recorded. Samples without answers are left out.
    """
    samples = [sample for sample in samples if sample.segments and sample.num_rows]
    if not samples:
        raise InputError("cannot make a trace of a rollout without routing: no sample has an answer")
    experts = np.concatenate([sample.experts for sample in samples])
    recorded: NDArray[np.bool_] = np.asarray((experts >= 0).all(axis=(1, 2)))
    ids, _ = narrow_ids(experts, num_experts, recorded)
    lengths = np.array([sample.num_rows for sample in samples], np.int64)
    runs = [run for sample in samples for run in _runs(sample)]
    return RoutingTrace(
        ids=ids,
        num_experts=num_experts,
        offsets=np.cumsum([0, *lengths]),
        recorded=None if recorded.all() else recorded,
        prompt_length_of_sequence=np.minimum([sample.prompt.size for sample in samples], lengths),
        group_of_sequence=np.array([sample.group for sample in samples], np.int64),
        segments=PolicySegments(
            offsets=np.cumsum([0, *(rows for rows, _ in runs)]),
            version_of_segment=np.array([version for _, version in runs], np.int64),
        ),
    )


def convert_rollout(folder: Path | str, step: int, path: Path | str, *, overwrite: bool = False) -> None:
    """Write a recorded step as NAME.npz or NAME.eqtrace, for `equilibra simulate --trace`."""
    model = read_about(folder).model
    save_trace(to_trace(load_rollout(folder, step, model=model), model.num_experts), path, overwrite=overwrite)


def _runs(sample: Sample) -> Iterator[tuple[int, int]]:
    """(rows, version) of each segment that has any, the prompt with the first."""
    first = 0
    for segment in sample.segments:
        end = min(sample.prompt.size + segment.end, sample.num_rows)
        if end > first:
            yield end - first, segment.version
            first = end
