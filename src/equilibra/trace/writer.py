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


class _ShardWriter:
    """Writes ids as shards of equal numbers of tokens, then the index and the manifest."""

    def __init__(self, folder: Path, *, num_layers: int, top_k: int, num_experts: int, shard_bytes: int) -> None:
        if min(num_layers, top_k, shard_bytes) < 1:
            raise InputError(f"layers {num_layers}, top-k {top_k} and shard bytes {shard_bytes} must be at least 1")
        self.folder = folder
        self.num_layers, self.top_k, self.num_experts = num_layers, top_k, num_experts
        bytes_per_token = num_layers * top_k * id_dtype(num_experts).itemsize
        self.tokens_per_shard = max(1, shard_bytes // bytes_per_token)
        self.shards: list[StoredShard] = []
        self.num_tokens = 0
        self.file: IO[bytes] | None = None

    def write(self, ids: Ids) -> None:
        """Append tokens; ids [t, L, K]."""
        while len(ids):
            room = self.tokens_per_shard - self.num_tokens % self.tokens_per_shard
            if self.file is None:
                self.file = (self.folder / f"ids-{len(self.shards):05d}.bin").open("xb")
                self.digest = hashlib.sha256()
            content = np.ascontiguousarray(ids[:room]).data.cast("B")
            self.file.write(content)
            self.digest.update(content)
            self.num_tokens += len(ids[:room])
            ids = ids[room:]
            if self.num_tokens % self.tokens_per_shard == 0:
                self._end_shard()

    def _end_shard(self) -> None:
        if self.file is None:
            return
        num_bytes, name = self.file.tell(), Path(self.file.name).name
        self.close()
        first = self.shards[-1].first_token + self.shards[-1].num_tokens if self.shards else 0
        tokens, digest = self.num_tokens - first, self.digest.hexdigest()
        self.shards.append(
            StoredShard(name=name, first_token=first, num_tokens=tokens, num_bytes=num_bytes, sha256=digest)
        )

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def finish(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Write the index and the manifest, and check that they form a valid trace."""
        self._end_shard()
        manifest = Manifest(
            num_tokens=self.num_tokens,
            num_layers=self.num_layers,
            top_k=self.top_k,
            num_experts=self.num_experts,
            shards=tuple(self.shards),
            arrays={field: self._write_array(field, array) for field, array in arrays.items()},
        )
        stored_trace(self.folder, manifest, arrays)
        (self.folder / "manifest.json").write_text(to_json(manifest), encoding="utf-8")

    def _write_array(self, field: str, array: NDArray[Any]) -> StoredArray:
        content, name = array.astype(INDEX_DTYPES[field]).tobytes(), f"{field}.bin"
        (self.folder / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        return StoredArray(name=name, length=len(array), num_bytes=len(content), sha256=digest)


class TraceWriter:
    """Appends sequences to a trace; made by `trace_writer`."""

    def __init__(self, shards: _ShardWriter) -> None:
        self._shards = shards
        self._parts: dict[str, list[Any]] = {name: [] for name in INDEX_DTYPES}

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
        wanted = (self._shards.num_layers, self._shards.top_k)
        if ids.ndim != 3 or ids.shape[1:] != wanted or len(ids) == 0 or ids.dtype.kind not in "iu":
            raise InputError(
                f"a sequence must be whole numbers [tokens > 0, {wanted[0]}, {wanted[1]}], not {ids.dtype} {ids.shape}"
            )
        if recorded is not None and (recorded.shape != ids.shape[:1] or recorded.dtype != np.bool_):
            raise InputError(f"recorded must be bool [{len(ids)}], not {recorded.dtype} {recorded.shape}")
        if segments is not None and segments.offsets[-1] != len(ids):
            raise InputError(f"policy segments must cover the {len(ids)} tokens, not {segments.offsets[-1]}")
        narrow, recorded = narrow_ids(ids, self._shards.num_experts, recorded)
        parts, first_token = self._parts, self._shards.num_tokens
        self._shards.write(narrow)
        parts["offsets"].append([first_token])
        parts["recorded"].append(np.ones(len(ids), dtype=np.bool_) if recorded is None else recorded)
        if prompt_length is not None:
            parts["prompt_length_of_sequence"].append([prompt_length])
        if group is not None:
            parts["group_of_sequence"].append([group])
        if segments is not None:
            parts["segment_offsets"].append(segments.offsets[:-1] + first_token)
            parts["version_of_segment"].append(segments.version_of_segment)

    def _arrays(self) -> dict[str, NDArray[Any]]:
        num_sequences = len(self._parts["offsets"])
        if num_sequences == 0:
            raise InputError("cannot write an empty trace; append at least one sequence")
        arrays = {}
        for name, parts in self._parts.items():
            if len(parts) not in (0, num_sequences):
                raise InputError(f"{name} is given for {len(parts)} of {num_sequences} sequences; give all or none")
            if parts:
                ends = [[self._shards.num_tokens]] if name.endswith("offsets") else []
                arrays[name] = np.concatenate([*parts, *ends]).astype(INDEX_DTYPES[name])
        if arrays["recorded"].all():
            del arrays["recorded"]
        return arrays


@contextmanager
def _shard_writer(
    path: Path, *, num_layers: int, top_k: int, num_experts: int, shard_bytes: int, overwrite: bool
) -> Iterator[_ShardWriter]:
    if path.suffix != ".eqtrace":
        raise InputError(f"cannot write {path}: the name of a stored trace must end in .eqtrace")
    with atomic_folder(path, overwrite=overwrite) as folder:
        shards = _ShardWriter(
            folder, num_layers=num_layers, top_k=top_k, num_experts=num_experts, shard_bytes=shard_bytes
        )
        try:
            yield shards
        finally:
            shards.close()


@contextmanager
def trace_writer(
    path: Path | str, *, num_layers: int, top_k: int, num_experts: int,
    shard_bytes: int = SHARD_BYTES, overwrite: bool = False,
) -> Iterator[TraceWriter]:  # fmt: skip
    """Write a trace sequence by sequence; it appears at `path` when the `with` block ends without error.

    with trace_writer("step7.eqtrace", num_layers=48, top_k=8, num_experts=128) as writer:
        writer.append(ids)
    """
    shape = {"num_layers": num_layers, "top_k": top_k, "num_experts": num_experts}
    with _shard_writer(Path(path), **shape, shard_bytes=shard_bytes, overwrite=overwrite) as shards:
        writer = TraceWriter(shards)
        yield writer
        shards.finish(writer._arrays())  # noqa: SLF001 - one file


def write_trace(
    recording: Recording, path: Path | str, *, shard_bytes: int = SHARD_BYTES, overwrite: bool = False
) -> None:
    """Write any recording as a stored trace, a few MiB at a time."""
    shape = {"num_layers": recording.num_layers, "top_k": recording.top_k, "num_experts": recording.num_experts}
    with _shard_writer(Path(path), **shape, shard_bytes=shard_bytes, overwrite=overwrite) as shards:
        for piece in recording.pieces():
            shards.write(piece.ids)
        shards.finish(index_arrays(recording))
