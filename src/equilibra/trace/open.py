"""`load_trace` and `save_trace` for both file formats, and the plain one of them: `.npz`, read and written with numpy.

Symbols: T tokens, S sequences, L layers, K experts per token. The arrays of an `.npz`:

    ids          [T, L, K]  experts of each token, any integer type; -1 in every place of a token: not recorded
    offsets      [S + 1]    sequence s is tokens offsets[s] to offsets[s + 1]
    num_experts  scalar     E; if missing, the largest id + 1 is taken and a warning is logged
    and the optional index arrays of `routing.py`

Other arrays are ignored, pickled (object) arrays refused. Ids are converted piece by piece, so int64 ids do not need
eight times the memory. The size in an array's header is compared with its archive entry before anything is allocated.
"""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from equilibra.core.atomic import DAMAGED, atomic_file
from equilibra.core.errors import InputError, TraceFormatError
from equilibra.trace.routing import (
    INDEX_DTYPES,
    Ids,
    Recording,
    RoutingTrace,
    id_dtype,
    index_arrays,
    index_fields,
    narrow_ids,
    tokens_per_piece,
)
from equilibra.trace.store import open_trace, write_trace

BOMB_BYTES, BOMB_RATIO = 1 << 30, 256
log = logging.getLogger("equilibra.trace")


def load_trace(path: Path | str, *, num_experts: int | None = None, verify: bool = True) -> Recording:
    """Open a folder NAME.eqtrace (ids stay on disk) or read a file NAME.npz.

    Give `num_experts` if the .npz does not; `verify=False` skips the checksums of stored ids.
    """
    path = Path(path)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:
        raise TraceFormatError(f"cannot open {path}: {error}") from error
    if not is_folder and not is_file:
        raise TraceFormatError(f"cannot open {path}: no such file or folder")
    if is_file and path.suffix != ".npz":
        raise TraceFormatError(f"cannot open {path}: a trace is a file NAME.npz or a folder NAME.eqtrace")
    trace = open_trace(path, verify=verify) if is_folder else read_npz(path, num_experts=num_experts)
    if num_experts not in (None, trace.num_experts):
        found = f"{path} is a recording of {trace.num_experts} experts"
        raise TraceFormatError(f"{found}, not of the {num_experts} asked for")
    return trace


def save_trace(recording: Recording, path: Path | str, *, overwrite: bool = False) -> None:
    """Write NAME.eqtrace or NAME.npz; it appears at `path` when it is complete."""
    path = Path(path)
    if path.suffix == ".eqtrace":
        write_trace(recording, path, overwrite=overwrite)
    elif path.suffix == ".npz":
        write_npz(recording, path, overwrite=overwrite)
    else:
        raise InputError(f"cannot write {path}: its name must end in .npz or .eqtrace")


def read_npz(path: Path, *, num_experts: int | None = None) -> RoutingTrace:
    """Read a trace; `num_experts` counts if the file does not say it."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive, path, num_experts)
    except OSError as error:
        raise TraceFormatError(f"cannot read {path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise TraceFormatError(f"{path} does not fit in memory; use .eqtrace, which is read in pieces") from error
    except InputError as error:
        raise TraceFormatError(f"{path}: {error}") from error
    except DAMAGED as error:
        raise TraceFormatError(
            f"{path} is not a readable .npz ({error}): truncated, corrupted or another format; write it again"
        ) from error


def _read(archive: zipfile.ZipFile, path: Path, num_experts: int | None) -> RoutingTrace:
    present = {name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")}
    if "ids" not in present or "offsets" not in present:
        raise InputError(
            "it must hold the arrays ids [tokens, layers, k] and offsets [sequences + 1]; "
            f"it has: {', '.join(sorted(present)[:10]) or 'none'}"
        )
    arrays = {name: _index_array(archive, name) for name in INDEX_DTYPES if name in present}
    if "num_experts" in present:
        num_experts = _stored_num_experts(archive)
    ids = _Member.find(archive, "ids")
    if ids.dtype.kind not in "iu" or len(ids.shape) != 3 or min(ids.shape) < 1:
        raise InputError(f"ids must be whole numbers [tokens, layers, k], all > 0, not {ids.dtype} {ids.shape}")
    if num_experts is None:
        num_experts = max(int(piece.max()) for piece in ids.pieces()) + 1
        log.warning("%s has no num_experts: taking %d, the largest expert id + 1", path, num_experts)
    narrow, recorded = _narrow(ids, num_experts, arrays.pop("recorded", None))
    return RoutingTrace(ids=narrow, num_experts=num_experts, recorded=recorded, **index_fields(arrays))


def _narrow(
    ids: _Member, num_experts: int, stored_recorded: NDArray[np.bool_] | None
) -> tuple[Ids, NDArray[np.bool_] | None]:
    num_tokens = ids.shape[0]
    if stored_recorded is not None and stored_recorded.shape != (num_tokens,):
        raise InputError(f"{num_tokens} tokens need as many recorded flags, not {stored_recorded.shape}")
    narrow = np.empty(ids.shape, dtype=id_dtype(num_experts))
    recorded = np.ones(num_tokens, dtype=np.bool_) if stored_recorded is None else stored_recorded.copy()
    first = 0
    for piece in ids.pieces():
        tokens = slice(first, first + len(piece))
        narrow[tokens], known = narrow_ids(piece, num_experts, recorded[tokens])
        recorded[tokens] = recorded[tokens] if known is None else known
        first += len(piece)
    return narrow, None if recorded.all() else recorded


@dataclass(frozen=True, kw_only=True)
class _Member:
    """One array of the archive; its header matches the size of its entry."""

    archive: zipfile.ZipFile
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool
    data_offset: int

    @classmethod
    def find(cls, archive: zipfile.ZipFile, name: str) -> _Member:
        info = archive.getinfo(f"{name}.npy")
        with archive.open(info) as file:
            version = np.lib.format.read_magic(file)
            if version not in ((1, 0), (2, 0)):
                raise InputError(f"array {name!r} has .npy version {version}, not 1.0 or 2.0")
            read_header = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
            shape, fortran_order, dtype = read_header(file)
            data_offset = file.tell()
        if dtype.hasobject:
            raise InputError(f"array {name!r} holds Python objects, which are never read; save whole numbers")
        claimed = data_offset + int(np.prod([int(n) for n in shape], dtype=object)) * dtype.itemsize
        if min((0, *shape)) < 0 or claimed != info.file_size:
            raise InputError(f"array {name!r} says it is {dtype} {shape}, {claimed} bytes, but has {info.file_size}")
        if info.file_size > BOMB_BYTES and info.file_size > BOMB_RATIO * info.compress_size:
            sizes = f"from {info.compress_size} to {info.file_size} bytes"
            raise InputError(f"array {name!r} grows {sizes}: no recording does")
        return cls(
            archive=archive, name=name, shape=shape, dtype=dtype, fortran_order=fortran_order, data_offset=data_offset
        )

    def pieces(self) -> Iterator[NDArray[Any]]:
        """The array along its first axis, a few MiB at a time; in one piece if it is in Fortran order."""
        row_shape = self.shape[1:]
        row_bytes = self.dtype.itemsize * int(np.prod(row_shape))
        step = self.shape[0] if self.fortran_order else tokens_per_piece(row_bytes)
        order: Literal["F", "C"] = "F" if self.fortran_order else "C"
        with self.archive.open(f"{self.name}.npy") as file:
            file.read(self.data_offset)
            for first in range(0, self.shape[0], step):
                rows = min(step, self.shape[0] - first)
                content = file.read(rows * row_bytes)
                if len(content) != rows * row_bytes:
                    raise EOFError("the archive ends early")
                yield np.frombuffer(content, dtype=self.dtype).reshape((rows, *row_shape), order=order)
            file.read(1)  # reading to the end makes zipfile compare the CRC


def _index_array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    member = _Member.find(archive, name)
    if len(member.shape) != 1 or member.shape[0] < 1 or member.dtype.kind not in "iub":
        raise InputError(f"{name} must be whole numbers in one dimension, not {member.dtype} {member.shape}")
    array = np.concatenate(list(member.pieces()))
    if name == "recorded":
        return array.astype(np.bool_)
    if array.dtype.kind == "b" or int(array.max()) > np.iinfo(np.int64).max:
        raise InputError(f"{name} must be whole numbers that fit int64, not {array.dtype} up to {array.max()}")
    return array.astype(np.int64)


def _stored_num_experts(archive: zipfile.ZipFile) -> int:
    member = _Member.find(archive, "num_experts")
    if member.shape not in ((), (1,)) or member.dtype.kind not in "iu":
        raise InputError(f"num_experts must be one whole number, not {member.dtype} {member.shape}")
    with archive.open("num_experts.npy") as file:
        return int(np.lib.format.read_array(file, allow_pickle=False).item())


def write_npz(recording: Recording, path: Path, *, overwrite: bool = False) -> None:
    """Write any recording as a compressed `.npz`, a few MiB at a time; it appears at `path` when it is complete."""
    with (
        atomic_file(path, overwrite=overwrite) as part,
        zipfile.ZipFile(part, "x", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
    ):
        descr = np.lib.format.dtype_to_descr(id_dtype(recording.num_experts))
        header = {"descr": descr, "fortran_order": False, "shape": recording.shape}
        with archive.open("ids.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array_header_1_0(file, header)
            for piece in recording.pieces():
                file.write(np.ascontiguousarray(piece.ids).data.cast("B"))
        arrays = {"num_experts": np.array(recording.num_experts), **index_arrays(recording)}
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
