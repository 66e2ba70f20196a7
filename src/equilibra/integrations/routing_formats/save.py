"""Sequences to a trace, one at a time: no more than one sequence is in memory, however many come."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.integrations.routing_formats.model import RoutedModel
from equilibra.integrations.routing_formats.sequence import RoutedSequence
from equilibra.trace.open import write_npz
from equilibra.trace.routing import RoutingTrace
from equilibra.trace.store import open_trace
from equilibra.trace.writer import trace_writer

__all__ = ["NOTHING", "save_sequences", "trace_of_sequences"]

NOTHING = "no token has routing: start the engine with enable_return_routed_experts, and ask for it in every request"


def save_sequences(
    sequences: Iterable[RoutedSequence], path: Path | str, model: RoutedModel, *, overwrite: bool = False
) -> tuple[int, int]:
    """Write NAME.eqtrace or NAME.npz, which appears when it is complete; returns the numbers of tokens and sequences.

    An .npz goes through a stored trace beside it, which is removed.
    """
    path = Path(path)
    if path.suffix == ".eqtrace":
        return _store(sequences, path, model, overwrite=overwrite)
    if path.suffix != ".npz":
        raise InputError(f"cannot write {path}: its name must end in .npz or .eqtrace")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        stored = Path(folder) / "sequences.eqtrace"
        found = _store(sequences, stored, model, overwrite=False)
        write_npz(open_trace(stored, verify=False), path, overwrite=overwrite)
    return found


def _store(
    sequences: Iterable[RoutedSequence], path: Path, model: RoutedModel, *, overwrite: bool
) -> tuple[int, int]:  # fmt: skip
    tokens = number = recorded = 0
    with trace_writer(
        path, num_layers=len(model.moe_layers), top_k=model.top_k, num_experts=model.num_experts, overwrite=overwrite
    ) as writer:
        for sequence in sequences:
            writer.append(
                sequence.ids, recorded=sequence.recorded, prompt_length=sequence.prompt_length, group=sequence.group
            )
            tokens, number = tokens + sequence.num_tokens, number + 1
            recorded += int(np.count_nonzero(sequence.recorded))
        if tokens and not recorded:
            raise InputError(NOTHING)
    return tokens, number


def trace_of_sequences(sequences: Iterable[RoutedSequence], model: RoutedModel) -> RoutingTrace:
    """The sequences as a trace in memory."""
    kept = list(sequences)
    if not kept:
        raise InputError("cannot make a trace of no sequences: it has no load")
    recorded = np.concatenate([sequence.recorded for sequence in kept])
    if not recorded.any():
        raise InputError(NOTHING)
    return RoutingTrace(
        ids=np.concatenate([sequence.ids for sequence in kept]),
        num_experts=model.num_experts,
        offsets=np.cumsum([0, *(sequence.num_tokens for sequence in kept)]),
        recorded=None if recorded.all() else recorded,
        prompt_length_of_sequence=_of_all("prompt lengths", [sequence.prompt_length for sequence in kept]),
        group_of_sequence=_of_all("groups", [sequence.group for sequence in kept]),
    )


def _of_all(what: str, values: list[int | None]) -> NDArray[np.int64] | None:
    """One number per sequence, or None where none is known."""
    known = [value for value in values if value is not None]
    if len(known) not in (0, len(values)):
        raise InputError(f"{what} are known of {len(known)} of {len(values)} sequences: give them for all or none")
    return np.array(known, np.int64) if known else None
