"""A trace on disk: its folder and its manifest, read and written a few MiB at a time, whatever its size.

    NAME.eqtrace/
    manifest.json     shapes; name, size and SHA-256 of every other file; its own SHA-256
    ids-00000.bin     [t, L, K] expert ids of the first t tokens, uint8 or little-endian uint16, C order
    ids-00001.bin     the tokens after them, and so on; every shard but the last has the same number of tokens
    offsets.bin, ...  the index arrays of `routing.py`, one file each: little-endian int64; recorded: bytes 0 or 1

Symbols: T tokens, S sequences, L layers, K experts per token. Nothing is pickled, and no file outside the folder can be
named. A shard that does not match its checksum raises an error at its last token. The folder appears at its path when
it is complete; an error before that leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.atomic import atomic_folder
from equilibra.core.checks import check_whole
from equilibra.core.errors import InputError, TraceFormatError
from equilibra.trace.routing import (
    INDEX_DTYPES,
    MAX_EXPERTS,
    Ids,
    PolicySegments,
    Recording,
    RoutingPiece,
    check_ids,
    id_dtype,
    index_arrays,
    index_fields,
    narrow_ids,
    tokens_per_piece,
)

FORMAT = "equilibra-routing-trace"
VERSION = 1
MAX_TOKENS = 1 << 44
MAX_MANIFEST_BYTES = 64 << 20
FILE_NAME = re.compile(r"[a-z0-9_-]+\.bin")
SHA256 = re.compile(r"[0-9a-f]{64}")
AGAIN = "copy or write the trace again"
SHARD_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class StoredShard:
    """One file of ids; sha256 is hexadecimal."""

    name: str
    first_token: int
    """index of its first token in the recording"""
    num_tokens: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """One file with a one-dimensional array of the index; sha256 is hexadecimal."""

    name: str
    length: int
    """number of elements"""
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json."""

    num_tokens: int
    num_layers: int
    top_k: int
    num_experts: int
    shards: tuple[StoredShard, ...]
    """files of ids, in token order"""
    arrays: dict[str, StoredArray]
    """files of the index, by the name of the field"""

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.top_k * id_dtype(self.num_experts).itemsize


def to_json(manifest: Manifest) -> str:
    """The text of manifest.json."""
    body = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    return json.dumps({**body, "sha256": _digest(body)}, indent=1) + "\n"


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _parse_manifest(path: Path) -> Manifest:
    """Read and check manifest.json; any defect raises TraceFormatError."""
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise TraceFormatError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes: not a trace manifest")
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceFormatError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise TraceFormatError(f"{path} is not valid JSON ({error}); write the trace again") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise TraceFormatError(f"{path} is not the manifest of a routing trace: its format must be {FORMAT!r}")
    version = body.get("version")
    if version != VERSION:
        found = f"{path} has trace format version {version!r:.40}"
        raise TraceFormatError(f"{found}, this Equilibra reads version {VERSION}; use a newer Equilibra")
    if body.pop("sha256", None) != _digest(body):
        raise TraceFormatError(f"{path} is corrupted: its checksum does not match; write the trace again")
    try:
        return _manifest(body)
    except (ValueError, KeyError, TypeError) as error:
        raise TraceFormatError(f"{path} contradicts itself: {error}; write the trace again") from error


def _manifest(body: dict[str, Any]) -> Manifest:
    shape = {"num_tokens": MAX_TOKENS, "num_layers": 65_536, "top_k": MAX_EXPERTS, "num_experts": MAX_EXPERTS}
    for key, most in shape.items():
        check_whole(key, body[key], low=1, high=most)
    manifest = Manifest(
        **{key: body[key] for key in shape},
        shards=tuple(StoredShard(**_entry(shard, "first_token", "num_tokens")) for shard in body["shards"]),
        arrays={str(field): StoredArray(**_entry(array, "length")) for field, array in dict(body["arrays"]).items()},
    )
    for field, array in manifest.arrays.items():
        if field not in INDEX_DTYPES:
            raise InputError(f"unknown array {field!r}")
        if array.num_bytes != array.length * INDEX_DTYPES[field].itemsize:
            raise InputError(f"the size of {array.name} does not fit its {array.length} elements")
    token = 0
    for shard in manifest.shards:
        if shard.first_token != token or shard.num_bytes != shard.num_tokens * manifest.bytes_per_token:
            raise InputError(f"shard {shard.name} does not follow the one before, or its size does not fit its tokens")
        token += shard.num_tokens
    if token != manifest.num_tokens:
        raise InputError(f"its shards have {token} tokens, not {manifest.num_tokens}")
    names = [shard.name for shard in manifest.shards] + [array.name for array in manifest.arrays.values()]
    if len(set(names)) != len(names):
        raise InputError("two entries name the same file")
    return manifest


def _entry(entry: dict[str, Any], *counts: str) -> dict[str, Any]:
    """The checked fields of a file in the manifest: its counts, name, size and checksum."""
    for key, pattern in (("name", FILE_NAME), ("sha256", SHA256)):
        if not isinstance(entry[key], str) or not pattern.fullmatch(entry[key]):
            raise InputError(f"{key} must match {pattern.pattern}, not {entry[key]!r:.80}")
    for key in counts:
        check_whole(key, entry[key], low=0 if key == "first_token" else 1, high=MAX_TOKENS)
    check_whole("num_bytes", entry["num_bytes"], low=1, high=1 << 60)
    return {key: entry[key] for key in ("name", *counts, "num_bytes", "sha256")}


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredTrace(Recording):
    """A recording whose ids stay on disk."""

    path: Path
    """the folder"""
    manifest: Manifest
    verify: bool = True
    """compare the checksum of every shard that is read"""

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.manifest.num_tokens, self.manifest.num_layers, self.manifest.top_k

    def pieces(self) -> Iterator[RoutingPiece]:
        step = tokens_per_piece(self.manifest.bytes_per_token)
        for shard in self.manifest.shards:
            digest = hashlib.sha256()
            for first in range(0, shard.num_tokens, step):
                token = shard.first_token + first
                ids = self._window(shard, first, min(step, shard.num_tokens - first))
                if self.verify:
                    digest.update(ids.data.cast("B"))
                recorded = None if self.recorded is None else self.recorded[token : token + len(ids)]
                try:
                    check_ids(ids, self.num_experts, recorded)
                except InputError as error:
                    raise TraceFormatError(f"{self.path / shard.name}: {error}") from error
                yield RoutingPiece(first_token=token, ids=ids, recorded=recorded)
            if self.verify and digest.hexdigest() != shard.sha256:
                raise _corrupted(self.path / shard.name)

    def _window(self, shard: StoredShard, first: int, num_tokens: int) -> NDArray[np.unsignedinteger[Any]]:
        file = self.path / shard.name
        _check_size(file, shard.num_bytes)
        try:
            dtype, offset = id_dtype(self.num_experts), first * self.manifest.bytes_per_token
            return np.memmap(
                file, dtype=dtype, mode="r", offset=offset, shape=(num_tokens, self.num_layers, self.top_k)
            )
        except (OSError, ValueError) as error:
            raise TraceFormatError(f"cannot read {file}: {error}") from error


def open_trace(path: Path | str, *, verify: bool = True) -> StoredTrace:
    """Open the folder NAME.eqtrace: read and check its index; ids are read on demand."""
    path = Path(path)
    if not path.is_dir():
        raise TraceFormatError(f"cannot open {path}: no such folder")
    manifest = _parse_manifest(path / "manifest.json")
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
    """The trace in folder `path` with a known manifest and index."""
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
        raise TraceFormatError(f"{file} has {size} bytes, its manifest says {num_bytes}; {AGAIN}")


def _corrupted(file: Path) -> TraceFormatError:
    return TraceFormatError(f"{file} is corrupted: its checksum differs from its manifest; {AGAIN}")


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
