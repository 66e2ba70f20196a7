"""Writing a stored trace, a sequence or a few MiB at a time, so that a recording may be larger than memory.

Symbols: L layers, K experts per token. `store.py` describes the folder. It appears at its path when it is complete; an
error before that leaves nothing behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.atomic import atomic_folder
from equilibra.core.errors import InputError
from equilibra.trace.routing import INDEX_DTYPES, Ids, PolicySegments, Recording, id_dtype, index_arrays, narrow_ids
from equilibra.trace.store import Manifest, StoredArray, StoredShard, stored_trace, to_json

__all__ = ["TraceWriter", "trace_writer", "write_trace"]

SHARD_BYTES = 1 << 30


class TraceWriter:
    """Appends sequences to a trace; made by `trace_writer`. Shards have equal numbers of tokens."""

    def __init__(self, folder: Path, *, num_layers: int, top_k: int, num_experts: int, shard_bytes: int) -> None:
        if min(num_layers, top_k, shard_bytes) < 1:
            raise InputError(f"layers {num_layers}, top-k {top_k} and shard bytes {shard_bytes} must be at least 1")
        self._folder = folder
        self._shape = {"num_layers": num_layers, "top_k": top_k, "num_experts": num_experts}
        bytes_per_token = num_layers * top_k * id_dtype(num_experts).itemsize
        self._tokens_per_shard = max(1, shard_bytes // bytes_per_token)
        self._shards: list[StoredShard] = []
        self._num_tokens = 0
        self._file: IO[bytes] | None = None
        self._parts: dict[str, list[Any]] = {name: [] for name in INDEX_DTYPES}
        self._index: dict[str, NDArray[Any]] | None = None

    def append(
        self,
        ids: NDArray[np.integer[Any]],
        *,
        recorded: NDArray[np.bool_] | None = None,
        prompt_length: int | None = None,
        group: int | None = None,
        segments: PolicySegments | None = None,
    ) -> None:
        """Add one sequence of t tokens.

        ids [t, L, K] of any integer type, all -1 for a token without recorded routing; recorded [t]; segments from 0
        to t. What is given for one sequence must be given for all, except `recorded`.
        """
        wanted = (self._shape["num_layers"], self._shape["top_k"])
        if ids.ndim != 3 or ids.shape[1:] != wanted or len(ids) == 0 or ids.dtype.kind not in "iu":
            raise InputError(
                f"a sequence must be whole numbers [tokens > 0, {wanted[0]}, {wanted[1]}], not {ids.dtype} {ids.shape}"
            )
        if recorded is not None and (recorded.shape != ids.shape[:1] or recorded.dtype != np.bool_):
            raise InputError(f"recorded must be bool [{len(ids)}], not {recorded.dtype} {recorded.shape}")
        if segments is not None and segments.offsets[-1] != len(ids):
            raise InputError(f"policy segments must cover the {len(ids)} tokens, not {segments.offsets[-1]}")
        narrow, recorded = narrow_ids(ids, self._shape["num_experts"], recorded)
        parts, first_token = self._parts, self._num_tokens
        self._write(narrow)
        parts["offsets"].append([first_token])
        parts["recorded"].append(np.ones(len(ids), dtype=np.bool_) if recorded is None else recorded)
        if prompt_length is not None:
            parts["prompt_length_of_sequence"].append([prompt_length])
        if group is not None:
            parts["group_of_sequence"].append([group])
        if segments is not None:
            parts["segment_offsets"].append(segments.offsets[:-1] + first_token)
            parts["version_of_segment"].append(segments.version_of_segment)

    def copy(self, recording: Recording) -> None:
        """Write a whole recording, instead of appending sequences."""
        for piece in recording.pieces():
            self._write(piece.ids)
        self._index = index_arrays(recording)

    def _write(self, ids: Ids) -> None:
        while len(ids):
            room = self._tokens_per_shard - self._num_tokens % self._tokens_per_shard
            if self._file is None:
                self._file = (self._folder / f"ids-{len(self._shards):05d}.bin").open("xb")
                self._digest = hashlib.sha256()
            content = np.ascontiguousarray(ids[:room]).data.cast("B")
            self._file.write(content)
            self._digest.update(content)
            self._num_tokens += len(ids[:room])
            ids = ids[room:]
            if self._num_tokens % self._tokens_per_shard == 0:
                self._end_shard()

    def _end_shard(self) -> None:
        if self._file is None:
            return
        num_bytes, name = self._file.tell(), Path(self._file.name).name
        self._close()
        first = self._shards[-1].first_token + self._shards[-1].num_tokens if self._shards else 0
        tokens, digest = self._num_tokens - first, self._digest.hexdigest()
        self._shards.append(
            StoredShard(name=name, first_token=first, num_tokens=tokens, num_bytes=num_bytes, sha256=digest)
        )

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """The index of the appended sequences."""
        num_sequences = len(self._parts["offsets"])
        if num_sequences == 0:
            raise InputError("cannot write an empty trace; append at least one sequence")
        arrays = {}
        for name, parts in self._parts.items():
            if len(parts) not in (0, num_sequences):
                raise InputError(f"{name} is given for {len(parts)} of {num_sequences} sequences; give all or none")
            if parts:
                ends = [[self._num_tokens]] if name.endswith("offsets") else []
                arrays[name] = np.concatenate([*parts, *ends]).astype(INDEX_DTYPES[name])
        if arrays["recorded"].all():
            del arrays["recorded"]
        return arrays

    def _finish(self) -> None:
        """Write the index and the manifest, and check that they form a valid trace."""
        arrays = self._arrays() if self._index is None else self._index
        self._end_shard()
        manifest = Manifest(
            num_tokens=self._num_tokens, **self._shape, shards=tuple(self._shards),
            arrays={field: self._write_array(field, array) for field, array in arrays.items()},
        )  # fmt: skip
        stored_trace(self._folder, manifest, arrays)
        (self._folder / "manifest.json").write_text(to_json(manifest), encoding="utf-8")

    def _write_array(self, field: str, array: NDArray[Any]) -> StoredArray:
        content, name = array.astype(INDEX_DTYPES[field]).tobytes(), f"{field}.bin"
        (self._folder / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        return StoredArray(name=name, length=len(array), num_bytes=len(content), sha256=digest)


@contextmanager
def trace_writer(
    path: Path | str, *, num_layers: int, top_k: int, num_experts: int,
    shard_bytes: int = SHARD_BYTES, overwrite: bool = False,
) -> Iterator[TraceWriter]:  # fmt: skip
    """Write a trace sequence by sequence; it appears at `path` when the `with` block ends without error.

    with trace_writer("step7.eqtrace", num_layers=48, top_k=8, num_experts=128) as writer:
        writer.append(ids)
    """
    path, shape = Path(path), {"num_layers": num_layers, "top_k": top_k, "num_experts": num_experts}
    if path.suffix != ".eqtrace":
        raise InputError(f"cannot write {path}: the name of a stored trace must end in .eqtrace")
    with atomic_folder(path, overwrite=overwrite) as folder:
        writer = TraceWriter(folder, **shape, shard_bytes=shard_bytes)
        try:
            yield writer
            writer._finish()  # noqa: SLF001 - one file
        finally:
            writer._close()  # noqa: SLF001


def write_trace(
    recording: Recording, path: Path | str, *, shard_bytes: int = SHARD_BYTES, overwrite: bool = False
) -> None:
    """Write any recording as a stored trace, a few MiB at a time."""
    shape = {"num_layers": recording.num_layers, "top_k": recording.top_k, "num_experts": recording.num_experts}
    with trace_writer(path, **shape, shard_bytes=shard_bytes, overwrite=overwrite) as writer:
        writer.copy(recording)
