"""Reading a stored trace, a few MiB at a time, so that a recording of any size can be summarised.

Symbols: T tokens, S sequences, L layers, K experts per token. `manifest.py` describes the folder. Ids are
memory-mapped in windows that are dropped as soon as they are used, and their checksums are computed on the
way: a shard that does not match is an error at its last token, before anything is made of what was read.
`verify=False` leaves that out.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from equilibra.core.errors import InputError, TraceFormatError
from equilibra.trace.index import INDEX_DTYPES, index_arrays, index_fields
from equilibra.trace.manifest import Manifest, StoredArray, StoredShard, parse_manifest
from equilibra.trace.routing import (
    Recording,
    RoutingPiece,
    RoutingTrace,
    check_ids,
    id_dtype,
    tokens_per_piece,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["StoredTrace", "open_trace", "stored_trace"]

AGAIN = "copy or write the trace again"


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTrace(Recording):
    """A recording whose ids stay on disk."""

    path: Path
    """the folder"""
    manifest: Manifest
    """what it holds"""
    verify: bool = True
    """compare the checksum of every shard that is read"""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(T, L, K)."""
        return self.manifest.num_tokens, self.manifest.num_layers, self.manifest.top_k

    def pieces(self) -> Iterator[RoutingPiece]:
        """All tokens in order, each piece a window of a memory-mapped shard."""
        step = tokens_per_piece(self.manifest.bytes_per_token)
        for shard in self.manifest.shards:
            digest = hashlib.sha256()
            for first in range(0, shard.num_tokens, step):
                token = shard.first_token + first
                ids = self._window(shard, first, min(step, shard.num_tokens - first))
                if self.verify:
                    digest.update(ids.data.cast("B"))
                recorded = None if self.recorded is None else self.recorded[token : token + len(ids)]
                _check_piece(self.path / shard.name, ids, self.num_experts, recorded)
                yield RoutingPiece(first_token=token, ids=ids, recorded=recorded)
            if self.verify and digest.hexdigest() != shard.sha256:
                raise _corrupted(self.path / shard.name)

    def _window(self, shard: StoredShard, first: int, num_tokens: int) -> NDArray[np.unsignedinteger[Any]]:
        file = self.path / shard.name
        _check_size(file, shard.num_bytes)
        try:
            return np.memmap(
                file,
                dtype=id_dtype(self.num_experts),
                mode="r",
                offset=first * self.manifest.bytes_per_token,
                shape=(num_tokens, self.num_layers, self.top_k),
            )
        except (OSError, ValueError) as error:
            raise TraceFormatError(f"cannot read {file}: {error}") from error

    def load(self) -> RoutingTrace:
        """The whole recording in memory."""
        ids = np.empty(self.shape, dtype=id_dtype(self.num_experts))
        for piece in self.pieces():
            ids[piece.first_token : piece.first_token + len(piece.ids)] = piece.ids
        return RoutingTrace(ids=ids, num_experts=self.num_experts, **index_fields(index_arrays(self)))


def open_trace(path: Path | str, *, verify: bool = True) -> StoredTrace:
    """Open the folder NAME.eqtrace; its index is read and checked now, its ids when they are asked for."""
    path = Path(path)
    if not path.is_dir():
        raise TraceFormatError(f"cannot open {path}: there is no such folder")
    manifest = parse_manifest(path / "manifest.json")
    for shard in manifest.shards:
        _check_size(path / shard.name, shard.num_bytes)
    arrays = {field: _read_array(path, field, stored) for field, stored in manifest.arrays.items()}
    try:
        return stored_trace(path, manifest, arrays, verify=verify)
    except InputError as error:
        raise TraceFormatError(f"{path} contradicts itself: {error}") from error


def stored_trace(
    path: Path, manifest: Manifest, arrays: dict[str, NDArray[Any]], *, verify: bool = True
) -> StoredTrace:
    """The trace in folder `path`, whose manifest and index arrays are already known."""
    fields = index_fields(arrays)
    return StoredTrace(path=path, manifest=manifest, verify=verify, num_experts=manifest.num_experts, **fields)


def _read_array(folder: Path, field: str, stored: StoredArray) -> NDArray[Any]:
    file = folder / stored.name
    _check_size(file, stored.num_bytes)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise TraceFormatError(f"cannot read {file}: {error.strerror or error}") from error
    if hashlib.sha256(content).hexdigest() != stored.sha256:
        raise _corrupted(file)
    if INDEX_DTYPES[field].kind == "b":
        return np.frombuffer(content, dtype=np.uint8).astype(np.bool_)
    return np.frombuffer(content, dtype=INDEX_DTYPES[field]).astype(np.int64, copy=False)


def _check_size(file: Path, num_bytes: int) -> None:
    try:
        size = file.stat().st_size
    except OSError as error:
        raise TraceFormatError(f"cannot read {file}: {error.strerror or error}; {AGAIN}") from error
    if size != num_bytes or not file.is_file():
        raise TraceFormatError(f"{file} has {size} bytes where its manifest says {num_bytes}: truncated; {AGAIN}")


def _check_piece(
    file: Path, ids: NDArray[np.unsignedinteger[Any]], num_experts: int, recorded: NDArray[np.bool_] | None
) -> None:
    try:
        check_ids(ids, num_experts, recorded)
    except InputError as error:
        raise TraceFormatError(f"{file}: {error}") from error


def _corrupted(file: Path) -> TraceFormatError:
    return TraceFormatError(f"{file} is corrupted: its checksum is not the one in its manifest; {AGAIN}")
