"""From what engines send to arrays of whole numbers: base64, .npy, nested lists, tensors. Nothing is unpickled.

Sizes are compared before memory is taken: base64 with the bytes that may come, the header of an .npy with the bytes
that did come. So nothing here allocates more than a small multiple of what was received.
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
"""of one sequence's routing: a million tokens of 60 layers of 8 experts, four bytes each, are half of it"""
MAX_HEADER = 4096
MAX_TOKENS = 1 << 31
SHOWN = 40


@contextmanager
def located(where: str) -> Iterator[None]:
    """Say in every error where the input is that caused it."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def table_in(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table inside a table of JSON; empty where there is none."""
    value = table.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise InputError(f"{name} must be a table, not {value!r:.60}")
    return value or {}


def count_in(table: Mapping[str, Any], name: str) -> int | None:
    """A number of tokens in a table of JSON; None where there is none."""
    value = table.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_TOKENS):
        raise InputError(f"{name} must be a number of tokens, not {value!r:.60}")
    return value


def from_base64(text: object, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a base64 text, at most `max_bytes`."""
    if not isinstance(text, str | bytes):
        raise InputError(f"routed experts must be base64 text, not {type(text).__name__}")
    if len(text) > 4 * (max_bytes // 3 + 1):
        raise InputError(f"{len(text)} letters of base64 are more than the {max_bytes} bytes that there can be")
    try:
        content = b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(
            f"routed experts are no base64 ({error}): truncated, or damaged; they begin with {text[:SHOWN]!r}"
        ) from error
    if len(content) > max_bytes:
        raise InputError(f"{len(content)} bytes of routed experts came, there can be at most {max_bytes}")
    return content


def from_npy(content: bytes) -> NDArray[np.integer[Any]]:
    """The array of an .npy of whole numbers. Its header is believed only where it fits the bytes that follow."""
    file = io.BytesIO(content)
    shape, fortran_order, dtype = _npy_header(file)
    if dtype.hasobject:
        raise InputError("the .npy holds Python objects (a pickle), which are never opened; send whole numbers")
    if dtype.kind not in "iu":
        raise InputError(f"routed experts must be whole numbers, not {dtype}")
    claimed, there = prod(int(size) for size in shape) * dtype.itemsize, len(content) - file.tell()
    if min((0, *shape)) < 0 or claimed != there:
        raise InputError(f"the .npy says it is {dtype} {_short(shape)}, {claimed} bytes, and has {there}")
    values = np.frombuffer(content, dtype=dtype, offset=file.tell())
    return values.reshape(shape, order="F" if fortran_order else "C")


def _npy_header(file: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numpy, about odd headers
            version = np.lib.format.read_magic(file)
            if version == (1, 0):
                return np.lib.format.read_array_header_1_0(file, max_header_size=MAX_HEADER)
            if version == (2, 0):
                return np.lib.format.read_array_header_2_0(file, max_header_size=MAX_HEADER)
    except Exception as error:  # numpy raises anything on damaged headers
        raise InputError(f"routed experts are no readable .npy ({type(error).__name__}: {str(error)[:200]})") from error
    raise InputError(f"routed experts are an .npy of version {version}, not 1.0 or 2.0")


def flat_int32(content: bytes, *, num_layers: int, top_k: int) -> NDArray[np.int32]:
    """[rows, num_layers, top_k] of the bare little-endian numbers that SGLang sends."""
    row_bytes = 4 * num_layers * top_k
    if len(content) % row_bytes:
        raise InputError(
            f"{len(content)} bytes of routed experts are no whole number of tokens: {num_layers} layers of {top_k} "
            f"experts are {row_bytes} bytes a token; check both, or the record was truncated"
        )
    return np.frombuffer(content, dtype="<i4").astype(np.int32, copy=False).reshape(-1, num_layers, top_k)


def as_rows(values: object) -> NDArray[np.integer[Any]]:
    """An array, a tensor of torch (on any device) or nested lists, as [rows, layers, k] whole numbers."""
    if isinstance(values, list | tuple):
        values = _from_lists(values)
    elif not isinstance(values, np.ndarray):
        values = _from_tensor(values)
    if values.dtype.kind not in "iu":
        raise InputError(f"routed experts must be whole numbers, not {values.dtype}")
    if values.ndim != 3:
        raise InputError(f"routed experts must be [tokens, layers, k], not of shape {_short(values.shape)}")
    return values


def _from_lists(values: list[Any] | tuple[Any, ...]) -> NDArray[Any]:
    if not values:
        return np.zeros((0, 0, 0), np.int32)
    try:
        return np.array(values)
    except (ValueError, OverflowError) as error:
        raise InputError(f"routed experts must be lists of equal length ({str(error)[:120]})") from error


def _from_tensor(values: Any) -> NDArray[Any]:  # noqa: ANN401 - torch is not imported for it
    for method in ("detach", "cpu", "numpy"):
        if not hasattr(values, method):
            raise InputError(f"routed experts must be an array, a tensor or lists, not {type(values).__name__}")
        values = getattr(values, method)()
    if not isinstance(values, np.ndarray):
        raise InputError(f"routed experts must be an array, a tensor or lists, not {type(values).__name__}")
    return values


def _short(shape: tuple[int, ...]) -> str:
    text = str(tuple(shape))
    return text if len(text) <= 2 * SHOWN else text[: 2 * SHOWN] + "..."
