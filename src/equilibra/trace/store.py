"""A trace on disk: its folder, its manifest, and reading it a few MiB at a time, whatever its size.

    NAME.eqtrace/
    manifest.json     shapes; name, size and SHA-256 of every other file; its own SHA-256
    ids-00000.bin     [t, L, K] expert ids of the first t tokens, uint8 or little-endian uint16, C order
    ids-00001.bin     the tokens after them, and so on; every shard but the last has the same number of tokens
    offsets.bin, ...  the index arrays of `routing.py`, one file each: little-endian int64; recorded: bytes 0 or 1

Symbols: T tokens, S sequences, L layers, K experts per token. Nothing is pickled, and no file outside the folder can be
named. A shard that does not match its checksum raises an error at its last token.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import check_whole
from equilibra.core.errors import InputError, TraceFormatError
from equilibra.trace.routing import (
    INDEX_DTYPES,
    MAX_EXPERTS,
    Recording,
    RoutingPiece,
    check_ids,
    id_dtype,
    index_fields,
    tokens_per_piece,
)

__all__ = ["Manifest", "StoredArray", "StoredShard", "StoredTrace", "open_trace", "stored_trace", "to_json"]

FORMAT = "equilibra-routing-trace"
VERSION = 1
MAX_TOKENS = 1 << 44
MAX_MANIFEST_BYTES = 64 << 20
FILE_NAME = re.compile(r"[a-z0-9_-]+\.bin")
SHA256 = re.compile(r"[0-9a-f]{64}")
AGAIN = "copy or write the trace again"


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
    """T"""
    num_layers: int
    """L"""
    top_k: int
    """K"""
    num_experts: int
    """E"""
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
    except (InputError, KeyError, TypeError) as error:
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
