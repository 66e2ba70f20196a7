"""Arrays as text inside a page: smallest type, bytes of equal weight together, gzip, base64.

Low bytes of counts look random and high bytes hardly change; written one plane after the other (all first bytes, then
all second bytes) gzip finds the second half for free. `assets/data.js` undoes it. The same array always gives the same
text: gzip carries no time.
"""

from __future__ import annotations

import base64
import gzip
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack", "packed_size"]

INTEGERS = ("u1", "u2", "u4", "i1", "i2", "i4")


def pack(array: NDArray[Any]) -> dict[str, Any]:
    """{dtype, shape, data}: the array as text. Whole numbers keep their values, others become 32-bit floats."""
    if array.dtype == np.bool_ or np.issubdtype(array.dtype, np.integer):
        small = array.astype(_smallest(array))
    else:
        small = array.astype(np.float32)
    planes = np.ascontiguousarray(small).reshape(-1).view(np.uint8).reshape(-1, small.dtype.itemsize).T
    text = base64.b64encode(gzip.compress(planes.tobytes(), compresslevel=9, mtime=0)).decode()
    return {"dtype": f"{small.dtype.kind}{small.dtype.itemsize}", "shape": list(array.shape), "data": text}


def packed_size(arrays: dict[str, dict[str, Any]]) -> int:
    """Bytes that packed arrays take on the page."""
    return sum(len(entry["data"]) for entry in arrays.values())


def _smallest(array: NDArray[Any]) -> str:
    """Little-endian type of fewest bytes that holds all values; a float where none does."""
    low, high = int(array.min(initial=0)), int(array.max(initial=0))
    for name in INTEGERS:
        limits = np.iinfo(name)
        if limits.min <= low and high <= limits.max:
            return f"<{name}"
    return "<f8"
