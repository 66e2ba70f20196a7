"""From the rows that an engine reports to the tokens of a sequence.

Symbols: T tokens of a sequence, R rows that were reported, C columns, L MoE layers, K experts per token.

    tokens     0 ........ first ................ T - 2   T - 1
    rows                  0 .................... R - 1
    routing    none       reported               ...     none: the last token is never processed

R must be T - 1 - first: a record that is shorter was truncated, and nobody can say at which end. A row of -1 throughout
has no routing (the engine forgot it). Fillers of padded batches are recognised only where they cannot be routing: zeros
throughout, with more than one expert per token.

Columns are all decoder layers or the MoE layers alone. Dense columns must never have been written: 0, or -1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.integrations.routing_formats.model import RoutedModel
from equilibra.trace.npz import write_npz
from equilibra.trace.routing import Ids, RoutingTrace, narrow_ids
from equilibra.trace.store import open_trace
from equilibra.trace.writer import trace_writer

__all__ = ["NOTHING", "RoutedSequence", "Rows", "align", "save_sequences", "trace_of_sequences", "unrecorded"]

# Sequences to a trace, one at a time: no more than one sequence is in memory, however many come.


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


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutedSequence:
    """The tokens of one sequence, and which experts they went to."""

    ids: Ids
    """[T, L, K] experts of the MoE layers, in order; of no meaning where they are not recorded"""
    recorded: NDArray[np.bool_]
    """[T] which tokens have routing"""
    prompt_length: int | None = None
    """tokens of the prompt, at the start; None: not known"""
    group: int | None = None
    """answers to one prompt share it; None: not known"""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.recorded)

    def experts(self) -> NDArray[np.int32]:
        """[T - 1, L, K] as rollout engines report it here: -1 where there is no routing, nothing of the last token."""
        experts = self.ids[:-1].astype(np.int32)
        experts[~self.recorded[:-1]] = -1
        return experts


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """What an engine reported of one sequence."""

    values: NDArray[np.integer[Any]]
    """[R, C, K]"""
    num_tokens: int | None = None
    """T, prompt and answer; None: as many as the rows say"""
    first: int = 0
    """tokens at the start that the engine was asked to leave out"""
    prompt_length: int | None = None
    """tokens of the prompt"""
    group: int | None = None
    """answers to one prompt share it"""
    zeros_are_fillers: bool = False
    """whether a row of zeros means that nothing was written"""


def align(rows: Rows, model: RoutedModel) -> RoutedSequence:
    """The sequence that the rows are of, checked."""
    num_rows = len(rows.values)
    num_tokens = rows.first + num_rows + 1 if rows.num_tokens is None else rows.num_tokens
    _check_lengths(rows, num_tokens)
    values = _moe_columns(rows.values, model)
    recorded = np.zeros(num_tokens, np.bool_)
    there = slice(rows.first, rows.first + num_rows)
    recorded[there] = True
    if rows.zeros_are_fillers and model.top_k > 1:
        recorded[there] = values.any(axis=(1, 2))
    ids = np.zeros((num_tokens, *values.shape[1:]), values.dtype)
    ids[there] = values
    narrow, known = narrow_ids(ids, model.num_experts, recorded)
    return RoutedSequence(
        ids=narrow, recorded=recorded if known is None else known, prompt_length=rows.prompt_length, group=rows.group
    )  # fmt: skip


def unrecorded(
    num_tokens: int, model: RoutedModel, *, prompt_length: int | None = None, group: int | None = None
) -> RoutedSequence:
    """A sequence whose routing the engine has forgotten (preempted requests): all of its tokens are routed live."""
    nothing = np.zeros((0, model.num_layers, model.top_k), np.int32)
    rows = Rows(
        values=nothing, num_tokens=num_tokens, first=num_tokens - 1, prompt_length=prompt_length, group=group
    )  # fmt: skip
    return align(rows, model)


def _check_lengths(rows: Rows, num_tokens: int) -> None:
    first, num_rows, prompt = rows.first, len(rows.values), rows.prompt_length
    if num_tokens < 1 or first < 0:
        raise InputError(f"a sequence has at least one token and no negative start, not {num_tokens} and {first}")
    if first + num_rows != num_tokens - 1:
        skipped = f", less the {first} that were left out," if first else ""
        raise InputError(
            f"routing of {num_rows} tokens came, a sequence of {num_tokens} has that of all but the last{skipped} "
            f"{max(num_tokens - 1 - first, 0)}: the record was truncated or is of another sequence; if the engine was "
            "asked to leave out a prefix, say how long it was"
        )
    if prompt is not None and not 0 <= prompt <= num_tokens:
        raise InputError(f"a prompt of {prompt} tokens does not fit a sequence of {num_tokens}")


def _moe_columns(values: NDArray[np.integer[Any]], model: RoutedModel) -> NDArray[np.integer[Any]]:
    """[R, L, K] without the columns of dense layers."""
    layers, (num_rows, columns, top_k) = model.moe_layers, values.shape
    if num_rows == 0:
        return np.zeros((0, len(layers), model.top_k), np.int32)
    if top_k != model.top_k or columns not in (model.num_layers, len(layers)):
        raise InputError(
            f"routing of {columns} layers and {top_k} experts per token came, the model has {model.num_layers} layers, "
            f"{len(layers)} of them with experts, and {model.top_k} experts per token"
        )
    if columns == len(layers):
        _check_written(values, model)
        return values
    dense = values[:, model.dense_layers]
    written = (dense != 0) & (dense != -1) if dense.dtype.kind == "i" else dense != 0
    if written.any():
        row, column, _ = np.argwhere(written)[0]
        raise InputError(
            f"layer {model.dense_layers[column]} is said to be dense, and token {row} of the report has experts "
            f"{dense[row, column].tolist()} there: check which layers are dense"
        )
    kept = values[:, layers]
    _check_written(kept, model)
    return kept


def _check_written(values: NDArray[np.integer[Any]], model: RoutedModel) -> None:
    """A layer of zeros throughout, in tokens that have routing, is a dense one: no token has an expert twice."""
    if model.top_k > 1:
        tokens = values.any(axis=(1, 2))
        written = np.asarray(values[tokens].any(axis=(0, 2)))
        layers = [layer for layer, is_written in zip(model.moe_layers, written.tolist(), strict=True) if not is_written]
        if tokens.any() and layers:
            raise InputError(
                f"layers {', '.join(map(str, layers[:8]))} are zeros throughout, which is no routing: if they have no "
                "experts, say that they are dense"
            )
