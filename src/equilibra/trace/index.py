"""The index of a recording as named arrays: what both file formats store beside the ids.

Symbols: T tokens, S sequences, P policy-version segments. The names are those of the files in a stored trace
and of the arrays in an `.npz`:

    offsets [S + 1], recorded [T], prompt_length_of_sequence [S], group_of_sequence [S],
    segment_offsets [P + 1], version_of_segment [P]

All but `offsets` are optional; the last two come together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from equilibra.core.errors import InputError
from equilibra.trace.routing import PolicySegments

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from equilibra.trace.routing import Recording

__all__ = ["INDEX_DTYPES", "index_arrays", "index_fields"]

INDEX_DTYPES = {
    "offsets": np.dtype("<i8"),
    "recorded": np.dtype("|b1"),
    "prompt_length_of_sequence": np.dtype("<i8"),
    "group_of_sequence": np.dtype("<i8"),
    "segment_offsets": np.dtype("<i8"),
    "version_of_segment": np.dtype("<i8"),
}


def index_arrays(recording: Recording) -> dict[str, NDArray[Any]]:
    """The arrays to store, by name; those that are not known are left out."""
    segments = recording.segments
    arrays = {
        "offsets": recording.offsets,
        "recorded": recording.recorded,
        "prompt_length_of_sequence": recording.prompt_length_of_sequence,
        "group_of_sequence": recording.group_of_sequence,
        "segment_offsets": None if segments is None else segments.offsets,
        "version_of_segment": None if segments is None else segments.version_of_segment,
    }
    return {name: array for name, array in arrays.items() if array is not None}


def index_fields(arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """The fields of a `Recording` from stored arrays."""
    fields: dict[str, Any] = {
        name: array for name, array in arrays.items() if name not in ("segment_offsets", "version_of_segment")
    }
    if "offsets" not in fields:
        raise InputError("sequence offsets are missing")
    if ("segment_offsets" in arrays) != ("version_of_segment" in arrays):
        raise InputError("segment_offsets and version_of_segment must come together, and one is missing")
    if "segment_offsets" in arrays:
        fields["segments"] = PolicySegments(
            offsets=arrays["segment_offsets"], version_of_segment=arrays["version_of_segment"]
        )
    return fields
