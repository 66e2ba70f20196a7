"""Routing as the rollout recorded it: which experts each token went to, in every layer.

Symbols: T tokens, S sequences, L MoE layers, K experts per token (top-k), E experts, P policy-version segments.

A `Recording` has its ids in memory (`RoutingTrace`) or on disk (`trace.store.StoredTrace`); functions read them through
`pieces()`, a few MiB at a time. Tokens without recorded routing (last tokens, prefix-cache hits, tool output) have
`recorded` False: they count in lengths, their ids are neither checked nor counted.

Frameworks fill unknown rows with zeros or one repeated expert, so repeats within a token are accepted and counted;
`trace.count.require_distinct_experts` refuses them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from equilibra.core.checks import check_whole
from equilibra.core.errors import InputError

Ids: TypeAlias = NDArray[np.unsignedinteger[Any]]
MAX_EXPERTS = 65_536
PIECE_BYTES = 16 << 20


def id_dtype(num_experts: int) -> np.dtype[np.unsignedinteger[Any]]:
    """uint8 up to 256 experts, uint16 above, little-endian."""
    check_whole("num_experts", num_experts, low=1, high=MAX_EXPERTS)
    return np.dtype(np.uint8) if num_experts <= 256 else np.dtype("<u2")


def tokens_per_piece(bytes_per_token: int) -> int:
    """How many tokens a piece of `pieces()` has."""
    return max(1, PIECE_BYTES // bytes_per_token)


def check_ids(ids: NDArray[np.integer[Any]], num_experts: int, recorded: NDArray[np.bool_] | None = None) -> None:
    """Raise InputError if a recorded token has an id outside 0 to num_experts - 1; ids [t, L, K], recorded [t]."""
    if ids.size == 0 or (ids.max() < num_experts and ids.min() >= 0):
        return
    known = ids if recorded is None else ids[recorded]
    if known.size and (known.max() >= num_experts or known.min() < 0):
        bad = int(known.max() if known.max() >= num_experts else known.min())
        raise InputError(
            f"expert id {bad} is out of range: ids must be 0 to {num_experts - 1} for {num_experts} experts; "
            "check the number of experts, or mark these tokens as not recorded"
        )


def narrow_ids(
    ids: NDArray[np.integer[Any]], num_experts: int, recorded: NDArray[np.bool_] | None = None
) -> tuple[Ids, NDArray[np.bool_] | None]:
    """(ids as uint8 or uint16, which tokens are recorded) from ids [t, L, K] of any integer type.

    A token whose ids are all -1 has no recorded routing; -1 in only some places is an error. recorded [t]; None: all.
    """
    dtype = id_dtype(num_experts)
    if ids.dtype.kind == "i" and ids.size and ids.min() < 0:
        missing = (ids == -1).all(axis=(1, 2))
        recorded = ~missing if recorded is None else recorded & ~missing
    check_ids(ids, num_experts, recorded)
    if ids.dtype == dtype:
        return ids.astype(dtype, copy=False), recorded
    known = ids if recorded is None else np.where(recorded[:, None, None], ids, 0)
    return known.astype(dtype), recorded


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicySegments:
    """The policy version of every token, as consecutive segments that cover the recording."""

    offsets: NDArray[np.int64]
    """[P + 1] segment p is tokens offsets[p] to offsets[p + 1]: part of an answer, or several answers"""
    version_of_segment: NDArray[np.int64]
    """[P] policy version, for example the optimizer step"""

    def __post_init__(self) -> None:
        _check_offsets("segment offsets", self.offsets)
        if self.version_of_segment.shape != (len(self.offsets) - 1,):
            found = self.version_of_segment.shape
            raise InputError(f"{len(self.offsets) - 1} segments need as many versions, not shape {found}")
        if self.version_of_segment.dtype != np.int64:
            raise InputError(f"policy versions must be int64, not {self.version_of_segment.dtype}")


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingPiece:
    """Consecutive tokens of a recording."""

    first_token: int
    """index of the first token in the recording"""
    ids: Ids
    """[t, L, K] experts of each token"""
    recorded: NDArray[np.bool_] | None
    """[t] which tokens have recorded routing; None: all"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording(ABC):
    """Recorded routing; subclasses say where the ids are."""

    offsets: NDArray[np.int64]
    """[S + 1] sequence s is tokens offsets[s] to offsets[s + 1], not empty"""
    num_experts: int
    """E, the same in every layer"""
    recorded: NDArray[np.bool_] | None = None
    """[T] which tokens have recorded routing; None: all"""
    prompt_length_of_sequence: NDArray[np.int64] | None = None
    """[S] prompt tokens at the start of each sequence; None: unknown"""
    group_of_sequence: NDArray[np.int64] | None = None
    """[S] prompt group >= 0, the same for answers to one prompt; None: unknown"""
    segments: PolicySegments | None = None
    """policy version of every token; None: unknown"""

    def __post_init__(self) -> None:
        num_tokens, _, top_k = self.shape
        if min(self.shape) < 1:
            raise InputError(f"ids must be [tokens, layers, k], all > 0, not {self.shape}: an empty trace has no load")
        id_dtype(self.num_experts)
        if top_k > self.num_experts:
            raise InputError(f"{top_k} experts per token need at least as many experts, not {self.num_experts}")
        _check_offsets("sequence offsets", self.offsets, num_tokens)
        if self.recorded is not None and (self.recorded.shape != (num_tokens,) or self.recorded.dtype != np.bool_):
            raise InputError(f"recorded must be bool [{num_tokens}], not {self.recorded.dtype} {self.recorded.shape}")
        for name in ("prompt_length_of_sequence", "group_of_sequence"):
            value = getattr(self, name)
            if value is not None and (value.shape != (self.num_sequences,) or value.dtype != np.int64):
                raise InputError(f"{name} must be int64 [{self.num_sequences}], not {value.dtype} {value.shape}")
            if value is not None and value.min() < 0:
                raise InputError(f"{name} must not be negative, but contains {value.min()}")
        prompts = self.prompt_length_of_sequence
        if prompts is not None and (prompts > self.length_of_sequence).any():
            at = int(np.argmax(prompts > self.length_of_sequence))
            raise InputError(f"the prompt of sequence {at} ({prompts[at]} tokens) is longer than its sequence")
        if self.segments is not None:
            _check_offsets("segment offsets", self.segments.offsets, num_tokens)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """(T, L, K)."""

    @abstractmethod
    def pieces(self) -> Iterator[RoutingPiece]:
        """All tokens in order, a few MiB at a time. Trust them only after the last piece: checksums come at the end."""

    def load(self) -> RoutingTrace:
        ids = np.empty(self.shape, dtype=id_dtype(self.num_experts))
        for piece in self.pieces():
            ids[piece.first_token : piece.first_token + len(piece.ids)] = piece.ids
        return RoutingTrace(ids=ids, num_experts=self.num_experts, **index_fields(index_arrays(self)))

    @property
    def num_tokens(self) -> int:
        return self.shape[0]

    @property
    def num_layers(self) -> int:
        return self.shape[1]

    @property
    def top_k(self) -> int:
        return self.shape[2]

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def length_of_sequence(self) -> NDArray[np.int64]:
        """[S] tokens, with or without recorded routing."""
        return np.diff(self.offsets)

    @property
    def tokens_without_routing(self) -> int:
        return 0 if self.recorded is None else int(self.num_tokens - np.count_nonzero(self.recorded))


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingTrace(Recording):
    """A recording with its ids in memory."""

    ids: Ids
    """[T, L, K] logical experts of each token in each layer: uint8 up to 256 experts, uint16 above"""

    def __post_init__(self) -> None:
        if self.ids.ndim != 3:
            raise InputError(f"ids must be [tokens, layers, k], not of shape {self.ids.shape}")
        super().__post_init__()
        if self.ids.dtype != id_dtype(self.num_experts):
            raise InputError(
                f"ids for {self.num_experts} experts must be {id_dtype(self.num_experts)}, "
                f"not {self.ids.dtype}; convert them with narrow_ids"
            )
        for piece in self.pieces():
            check_ids(piece.ids, self.num_experts, piece.recorded)

    @property
    def shape(self) -> tuple[int, int, int]:
        num_tokens, num_layers, top_k = self.ids.shape
        return num_tokens, num_layers, top_k

    def pieces(self) -> Iterator[RoutingPiece]:
        step = tokens_per_piece(self.num_layers * self.top_k * self.ids.itemsize)
        for first in range(0, self.num_tokens, step):
            recorded = None if self.recorded is None else self.recorded[first : first + step]
            yield RoutingPiece(first_token=first, ids=self.ids[first : first + step], recorded=recorded)


def _check_offsets(what: str, offsets: NDArray[np.int64], num_tokens: int | None = None) -> None:
    if offsets.ndim != 1 or len(offsets) < 2 or offsets.dtype != np.int64:
        raise InputError(f"{what} must be int64 [number + 1], at least 2, not {offsets.dtype} {offsets.shape}")
    if offsets[0] != 0 or (num_tokens is not None and offsets[-1] != num_tokens):
        end = "the number of tokens" if num_tokens is None else num_tokens
        raise InputError(f"{what} must run from 0 to {end}, not from {offsets[0]} to {offsets[-1]}")
    stuck = offsets[1:] <= offsets[:-1]
    if stuck.any():
        at = int(np.argmax(stuck))
        raise InputError(
            f"{what} must grow: entry {at} runs from {offsets[at]} to {offsets[at + 1]}; sort them and drop empty ones"
        )


# Both file formats store the index of a recording beside its ids, as arrays with these names. All but `offsets` are
# optional; the last two come together.
INDEX_DTYPES = {
    "offsets": np.dtype("<i8"),
    "recorded": np.dtype("|b1"),
    "prompt_length_of_sequence": np.dtype("<i8"),
    "group_of_sequence": np.dtype("<i8"),
    "segment_offsets": np.dtype("<i8"),
    "version_of_segment": np.dtype("<i8"),
}


def index_arrays(recording: Recording) -> dict[str, NDArray[Any]]:
    """The arrays to store, by name, without unknown ones."""
    names = ("offsets", "recorded", "prompt_length_of_sequence", "group_of_sequence")
    arrays = {name: getattr(recording, name) for name in names}
    if (segments := recording.segments) is not None:
        arrays |= {"segment_offsets": segments.offsets, "version_of_segment": segments.version_of_segment}
    return {name: array for name, array in arrays.items() if array is not None}


def index_fields(arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """Constructor arguments of a `Recording` from stored arrays."""
    fields: dict[str, Any] = dict(arrays)
    offsets, versions = fields.pop("segment_offsets", None), fields.pop("version_of_segment", None)
    if "offsets" not in fields:
        raise InputError("sequence offsets are missing")
    if (offsets is None) != (versions is None):
        raise InputError("segment_offsets and version_of_segment must come together; one is missing")
    if offsets is not None:
        fields["segments"] = PolicySegments(offsets=offsets, version_of_segment=versions)
    return fields
