"""`manifest.json` of a stored trace: what the folder holds, and the checks that make a lying one an error.

A trace on disk is a folder `NAME.eqtrace/`:

    manifest.json     this file: shapes, and name, size and SHA-256 of every other file, and of itself
    ids-00000.bin     [t, L, K] expert ids of the first t tokens, uint8 or little-endian uint16, C order
    ids-00001.bin     the tokens after them, and so on; every shard but the last has the same number of tokens
    offsets.bin, ...  the arrays of `index.py`, one file each: little-endian int64; recorded: bytes 0, 1

Symbols: T tokens, S sequences, L layers, K experts per token. Nothing is pickled, and a name in a manifest
never leaves the folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from equilibra.core.checks import check_whole
from equilibra.core.errors import InputError, TraceFormatError
from equilibra.trace.index import INDEX_DTYPES
from equilibra.trace.routing import MAX_EXPERTS, id_dtype

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FORMAT", "VERSION", "Manifest", "StoredArray", "StoredShard", "parse_manifest", "to_json"]

FORMAT = "equilibra-routing-trace"
VERSION = 1
MAX_TOKENS = 1 << 44
MAX_MANIFEST_BYTES = 64 << 20
FILE_NAME = re.compile(r"[a-z0-9_-]+\.bin")
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class StoredShard:
    """One file of ids."""

    name: str
    """file name in the folder"""
    first_token: int
    """number of its first token in the recording"""
    num_tokens: int
    """tokens it holds"""
    num_bytes: int
    """size of the file"""
    sha256: str
    """of the file, in hexadecimal"""


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """One file with a one-dimensional array of the recording's index."""

    name: str
    """file name in the folder"""
    length: int
    """elements of it"""
    num_bytes: int
    """size of the file"""
    sha256: str
    """of the file, in hexadecimal"""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a stored trace holds."""

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
        """Bytes of ids of one token."""
        return self.num_layers * self.top_k * id_dtype(self.num_experts).itemsize


def to_json(manifest: Manifest) -> str:
    """The text of manifest.json."""
    body = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    return json.dumps({**body, "sha256": _digest(body)}, indent=1) + "\n"


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def parse_manifest(path: Path) -> Manifest:
    """Read and check manifest.json; every way in which it can be wrong is a TraceFormatError."""
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise TraceFormatError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes: it is no trace manifest")
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceFormatError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise TraceFormatError(f"{path} is not valid JSON ({error}); write the trace again") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise TraceFormatError(f"{path} is not the manifest of a routing trace: its format must be {FORMAT!r}")
    version = body.get("version")
    if version != VERSION:
        raise TraceFormatError(
            f"{path} is of trace format version {version!r:.40}, and this Equilibra reads version {VERSION}; "
            "use a newer Equilibra"
        )
    if body.pop("sha256", None) != _digest(body):
        raise TraceFormatError(f"{path} is corrupted: its own checksum does not match; write the trace again")
    try:
        return _manifest(body)
    except (InputError, KeyError, TypeError) as error:
        raise TraceFormatError(f"{path} contradicts itself: {error}; write the trace again") from error


def _manifest(body: dict[str, Any]) -> Manifest:
    manifest = Manifest(
        num_tokens=_whole(body, "num_tokens", MAX_TOKENS),
        num_layers=_whole(body, "num_layers", 65_536),
        top_k=_whole(body, "top_k", MAX_EXPERTS),
        num_experts=_whole(body, "num_experts", MAX_EXPERTS),
        shards=tuple(_shard(entry) for entry in body["shards"]),
        arrays={str(field): _array(str(field), entry) for field, entry in dict(body["arrays"]).items()},
    )
    token = 0
    for shard in manifest.shards:
        if shard.first_token != token or shard.num_bytes != shard.num_tokens * manifest.bytes_per_token:
            raise InputError(
                f"shard {shard.name} does not follow the one before it, or its size does not fit its tokens"
            )
        token += shard.num_tokens
    if token != manifest.num_tokens:
        raise InputError(f"its shards hold {token} tokens, not {manifest.num_tokens}")
    names = [shard.name for shard in manifest.shards] + [array.name for array in manifest.arrays.values()]
    if len(set(names)) != len(names):
        raise InputError("two entries name the same file")
    return manifest


def _shard(entry: dict[str, Any]) -> StoredShard:
    return StoredShard(
        name=_text(entry, "name", FILE_NAME),
        first_token=_whole(entry, "first_token", MAX_TOKENS, least=0),
        num_tokens=_whole(entry, "num_tokens", MAX_TOKENS),
        num_bytes=_whole(entry, "num_bytes", 1 << 60),
        sha256=_text(entry, "sha256", SHA256),
    )


def _array(field: str, entry: dict[str, Any]) -> StoredArray:
    if field not in INDEX_DTYPES:
        raise InputError(f"unknown array {field!r}")
    array = StoredArray(
        name=_text(entry, "name", FILE_NAME),
        length=_whole(entry, "length", MAX_TOKENS),
        num_bytes=_whole(entry, "num_bytes", 1 << 60),
        sha256=_text(entry, "sha256", SHA256),
    )
    if array.num_bytes != array.length * INDEX_DTYPES[field].itemsize:
        raise InputError(f"the size of {array.name} does not fit its {array.length} elements")
    return array


def _whole(entry: dict[str, Any], key: str, most: int, *, least: int = 1) -> int:
    check_whole(key, entry[key], low=least, high=most)
    return int(entry[key])


def _text(entry: dict[str, Any], key: str, pattern: re.Pattern[str]) -> str:
    value = entry[key]
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise InputError(f"{key} must match {pattern.pattern}, not {value!r:.80}")
    return value
