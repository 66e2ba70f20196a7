"""Decode what engines send (base64, .npy, nested lists, tensors) into integer arrays. Nothing is unpickled.

Sizes are checked before memory is allocated: base64 against `max_bytes`, an .npy header against the bytes that follow.
So decoding never allocates more than a small multiple of what was received.
"""

from __future__ import annotations

import binascii
import io
import warnings
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError

__all__ = ["MAX_BYTES", "as_rows", "count_in", "flat_int32", "from_base64", "from_npy", "located", "table_in"]

MAX_BYTES = 1 << 32
"""most bytes of one sequence's routing: twice a million tokens of 60 layers, 8 experts and 4 bytes"""
MAX_HEADER = 4096
MAX_TOKENS = 1 << 31
SHOWN = 40


@contextmanager
def located(where: str) -> Iterator[None]:
    """Prefix every `InputError` with the place of the input that caused it."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def table_in(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The JSON object under a key; empty if the key is missing."""
    value = table.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise InputError(f"{name} must be a table, not {value!r:.60}")
    return value or {}


def count_in(table: Mapping[str, Any], name: str) -> int | None:
    """The number of tokens under a key of a JSON object; None if the key is missing."""
    value = table.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_TOKENS):
        raise InputError(f"{name} must be a number of tokens, not {value!r:.60}")
    return value


def from_base64(text: object, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Decode base64 text of at most `max_bytes` bytes."""
    if not isinstance(text, str | bytes):
        raise InputError(f"routed experts must be base64 text, not {type(text).__name__}")
    if len(text) > 4 * (max_bytes // 3 + 1):
        raise InputError(f"{len(text)} base64 characters are more than the {max_bytes} bytes of routed experts allowed")
    try:
        content = b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(
            f"routed experts are not valid base64 ({error}): truncated or damaged; they begin with {text[:SHOWN]!r}"
        ) from error
    if len(content) > max_bytes:
        raise InputError(f"routed experts decode to {len(content)} bytes; at most {max_bytes} are allowed")
    return content


def from_npy(content: bytes) -> NDArray[np.integer[Any]]:
    """The integer array of an .npy file whose header matches the size of its data."""
    file = io.BytesIO(content)
    shape, fortran_order, dtype = _npy_header(file)
    if dtype.hasobject:
        raise InputError("the .npy holds Python objects (a pickle), which are never loaded; send integers")
    if dtype.kind not in "iu":
        raise InputError(f"routed experts must be integers, not {dtype}")
    claimed, there = prod(int(size) for size in shape) * dtype.itemsize, len(content) - file.tell()
    if min((0, *shape)) < 0 or claimed != there:
        raise InputError(f"the .npy header says {dtype} {_short(shape)}, {claimed} bytes, but {there} bytes follow")
    values = np.frombuffer(content, dtype=dtype, offset=file.tell())
    return values.reshape(shape, order="F" if fortran_order else "C")


def _npy_header(file: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns about odd headers
            version = np.lib.format.read_magic(file)
            if version == (1, 0):
                return np.lib.format.read_array_header_1_0(file, max_header_size=MAX_HEADER)
            if version == (2, 0):
                return np.lib.format.read_array_header_2_0(file, max_header_size=MAX_HEADER)
    except Exception as error:  # numpy raises anything on damaged headers
        raise InputError(
            f"routed experts are not a readable .npy ({type(error).__name__}: {str(error)[:200]})"
        ) from error
    raise InputError(f"routed experts are an .npy of version {version}; use version 1.0 or 2.0")


def flat_int32(content: bytes, *, num_layers: int, top_k: int) -> NDArray[np.int32]:
    """[rows, num_layers, top_k] from the headerless little-endian int32 values that SGLang sends."""
    row_bytes = 4 * num_layers * top_k
    if len(content) % row_bytes:
        raise InputError(
            f"{len(content)} bytes of routed experts are not a whole number of tokens: {num_layers} layers of {top_k} "
            f"experts take {row_bytes} bytes per token; check both numbers, or the record was truncated"
        )
    return np.frombuffer(content, dtype="<i4").astype(np.int32, copy=False).reshape(-1, num_layers, top_k)


def as_rows(values: object) -> NDArray[np.integer[Any]]:
    """[rows, layers, k] integers from an array, a torch tensor on any device, or nested lists."""
    if isinstance(values, list | tuple):
        try:
            values = np.array(values) if values else np.zeros((0, 0, 0), np.int32)
        except (ValueError, OverflowError) as error:
            raise InputError(f"routed experts must be lists of equal length ({str(error)[:120]})") from error
    elif all(hasattr(values, method) for method in ("detach", "cpu", "numpy")):
        tensor: Any = values  # torch is not imported for it
        values = tensor.detach().cpu().numpy()
    if not isinstance(values, np.ndarray):
        raise InputError(f"routed experts must be an array, a tensor or lists, not {type(values).__name__}")
    if values.dtype.kind not in "iu":
        raise InputError(f"routed experts must be integers, not {values.dtype}")
    if values.ndim != 3:
        raise InputError(f"routed experts must be [tokens, layers, k], not of shape {_short(values.shape)}")
    return values


def _short(shape: tuple[int, ...]) -> str:
    text = str(tuple(shape))
    return text if len(text) <= 2 * SHOWN else text[: 2 * SHOWN] + "..."
