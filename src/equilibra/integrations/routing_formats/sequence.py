"""Align the rows that an engine reports with the tokens of a sequence, and write sequences to a trace.

Symbols: T tokens of a sequence, R reported rows, C columns, L MoE layers, K experts per token.

    tokens     0 ........ first ................ T - 2   T - 1
    rows                  0 .................... R - 1
    routing    none       reported               ...     none: the last token is never processed

R must be T - 1 - first: a shorter record was truncated, at an unknown end. A row of -1 has no routing (the engine
dropped it). Padding rows of zeros are recognised only with K > 1, where zeros cannot be routing.

Columns are all decoder layers or only the MoE layers. Columns of dense layers must be unwritten: 0 or -1.
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
from equilibra.trace.open import write_npz
from equilibra.trace.routing import Ids, narrow_ids
from equilibra.trace.store import open_trace, trace_writer

__all__ = ["NOTHING", "RoutedSequence", "Rows", "align", "save_sequences", "unrecorded"]

NOTHING = "no token has routing: start the engine with enable_return_routed_experts, and ask for it in every request"


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutedSequence:
    """One sequence and the experts of its tokens."""

    ids: Ids
    """[T, L, K] experts; meaningless where not recorded"""
    recorded: NDArray[np.bool_]
    """[T] which tokens have routing"""
    prompt_length: int | None = None
    """tokens of the prompt; None: unknown"""
    group: int | None = None
    """shared by all answers to one prompt; None: unknown"""

    @property
    def num_tokens(self) -> int:
        return len(self.recorded)

    def experts(self) -> NDArray[np.int32]:
        """[T - 1, L, K] as `Generation` wants it: -1 without routing, no row for the last token."""
        experts = self.ids[:-1].astype(np.int32)
        experts[~self.recorded[:-1]] = -1
        return experts


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """An engine's report about one sequence."""

    values: NDArray[np.integer[Any]]
    """[R, C, K] experts"""
    num_tokens: int | None = None
    """T, prompt and answer; None: derived from the rows"""
    first: int = 0
    """tokens at the start that the request left out of the report"""
    prompt_length: int | None = None
    """tokens of the prompt; None: unknown"""
    group: int | None = None
    """shared by all answers to one prompt; None: unknown"""
    zeros_are_fillers: bool = False
    """whether a row of zeros means that nothing was written"""


def align(rows: Rows, model: RoutedModel) -> RoutedSequence:
    """The checked sequence that the rows belong to."""
    num_rows = len(rows.values)
    num_tokens = rows.first + num_rows + 1 if rows.num_tokens is None else rows.num_tokens
    _check_lengths(rows, num_tokens)
    values = _moe_columns(rows.values, model)
    recorded = np.zeros(num_tokens, np.bool_)
    there = slice(rows.first, rows.first + num_rows)
    recorded[there] = values.any(axis=(1, 2)) if rows.zeros_are_fillers and model.top_k > 1 else True
    ids = np.zeros((num_tokens, *values.shape[1:]), values.dtype)
    ids[there] = values
    narrow, known = narrow_ids(ids, model.num_experts, recorded)
    return RoutedSequence(
        ids=narrow, recorded=recorded if known is None else known, prompt_length=rows.prompt_length, group=rows.group
    )  # fmt: skip


def unrecorded(
    num_tokens: int, model: RoutedModel, *, prompt_length: int | None = None, group: int | None = None
) -> RoutedSequence:
    """A sequence whose routing the engine dropped (preempted requests): all its tokens are routed live."""
    nothing = np.zeros((0, model.num_layers, model.top_k), np.int32)
    rows = Rows(
        values=nothing, num_tokens=num_tokens, first=num_tokens - 1, prompt_length=prompt_length, group=group
    )  # fmt: skip
    return align(rows, model)


def _check_lengths(rows: Rows, num_tokens: int) -> None:
    first, num_rows, prompt = rows.first, len(rows.values), rows.prompt_length
    if num_tokens < 1 or first < 0:
        raise InputError(f"a sequence needs at least one token and a start from 0 on, not {num_tokens} and {first}")
    if first + num_rows != num_tokens - 1:
        raise InputError(
            f"routing of {num_rows} tokens came, but a sequence of {num_tokens} tokens whose first {first} are left "
            f"out has {max(num_tokens - 1 - first, 0)} rows (the last token has none): the record was truncated or "
            "belongs to another sequence; if the request left out a prefix, give its length"
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
            f"routing of {columns} layers and {top_k} experts per token came, but the model has {model.num_layers} "
            f"layers, {len(layers)} of them with experts, and {model.top_k} experts per token"
        )
    if columns != len(layers):
        dense = values[:, model.dense_layers]
        written = (dense != 0) & (dense != -1) if dense.dtype.kind == "i" else dense != 0
        if written.any():
            row, column, _ = np.argwhere(written)[0]
            raise InputError(
                f"layer {model.dense_layers[column]} is said to be dense, but row {row} has experts "
                f"{dense[row, column].tolist()} there: check which layers are dense"
            )
        values = values[:, layers]
    _check_written(values, model)
    return values


def _check_written(values: NDArray[np.integer[Any]], model: RoutedModel) -> None:
    """Refuse a layer of zeros in tokens that have routing: it is dense, since no token has an expert twice."""
    if model.top_k > 1:
        tokens = values.any(axis=(1, 2))
        written = np.asarray(values[tokens].any(axis=(0, 2)))
        layers = [layer for layer, is_written in zip(model.moe_layers, written.tolist(), strict=True) if not is_written]
        if tokens.any() and layers:
            raise InputError(
                f"layers {', '.join(map(str, layers[:8]))} are zeros throughout, which is not routing: if they have no "
                "experts, declare them dense"
            )


def save_sequences(
    sequences: Iterable[RoutedSequence], path: Path | str, model: RoutedModel, *, overwrite: bool = False
) -> tuple[int, int]:
    """Write NAME.eqtrace or NAME.npz atomically; returns the numbers of tokens and sequences.

    Holds one sequence in memory at a time. An .npz is made from a temporary stored trace beside it.
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
    num_tokens = num_sequences = num_recorded = 0
    with trace_writer(
        path, num_layers=len(model.moe_layers), top_k=model.top_k, num_experts=model.num_experts, overwrite=overwrite
    ) as writer:
        for sequence in sequences:
            writer.append(
                sequence.ids, recorded=sequence.recorded, prompt_length=sequence.prompt_length, group=sequence.group
            )
            num_tokens, num_sequences = num_tokens + sequence.num_tokens, num_sequences + 1
            num_recorded += int(np.count_nonzero(sequence.recorded))
        if num_tokens and not num_recorded:
            raise InputError(NOTHING)
    return num_tokens, num_sequences
