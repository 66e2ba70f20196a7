"""Files: reads whose errors name the file, and atomic writes.

With atomic writes a reader sees the old file or the complete new one, never a part. Content goes to a hidden temporary
path in the same folder, is flushed to disk, and renamed over the target; if the `with` block ends early, it is removed.
A folder cannot replace another, so the old one is moved aside first and restored if the rename fails.
"""

from __future__ import annotations

import json
import lzma
import os
import secrets
import shutil
import tokenize
import tomllib
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equilibra.core.errors import InputError, UnreadableError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def cannot(verb: str, path: Path, error: OSError) -> InputError:
    """The error to raise when the operating system refuses to `verb` (read, write) `path`."""
    exists = verb == "read" and not isinstance(error, FileNotFoundError | NotADirectoryError)
    kind = UnreadableError if exists else InputError
    return kind(f"cannot {verb} {path}: {error.strerror or error}")


def read_values(path: Path) -> Any:  # noqa: ANN401
    """The content of a JSON file or, if its name ends in .toml, of a TOML file."""
    kind, parse = ("TOML", tomllib.loads) if path.suffix == ".toml" else ("JSON", json.loads)
    try:
        return parse(path.read_text())
    except OSError as error:
        raise cannot("read", path, error) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot read {path}: not valid {kind} ({error})") from error


DAMAGED = (
    ValueError, TypeError, AttributeError, LookupError, OverflowError, EOFError, MemoryError, zipfile.BadZipFile,
    zlib.error, lzma.LZMAError, tokenize.TokenError, NotImplementedError, RuntimeError,
)  # fmt: skip
"""what numpy and zipfile raise on damaged archives; the last two where a flipped byte claims a version or a password"""


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file by name; pickled objects are refused."""
    import numpy as np  # noqa: PLC0415 - programs that only write files start without it

    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except OSError as error:
        raise cannot("read", path, error) from error
    except DAMAGED as error:
        raise InputError(f"cannot read {path}: damaged, or not an .npz of arrays ({error})") from error


def flush_to_disk(path: Path) -> None:
    """Flush the file or folder entry at `path` to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _temporary(path: Path) -> Path:
    return path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part"


def _check_target(path: Path, *, overwrite: bool) -> None:
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    if os.path.lexists(path) and not overwrite:
        raise InputError(f"cannot write {path}: it exists; choose another name or overwrite it (--overwrite)")


@contextmanager
def atomic_file(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write; it becomes `path` when the block ends without an error."""
    part = _temporary(path)
    try:
        _check_target(path, overwrite=overwrite)
        if path.is_dir():
            raise InputError(f"cannot write {path}: it is a folder; give a file name")
        yield part
        flush_to_disk(part)
        _check_target(path, overwrite=overwrite)
        part.replace(path)
        flush_to_disk(path.parent)
    except OSError as error:
        raise cannot("write", path, error) from error
    finally:
        with suppress(OSError):  # an unwritable disk has nothing to remove
            part.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path, *, overwrite: bool = False, replaceable_if: str = "manifest.json") -> Iterator[Path]:
    """Yield a temporary folder to fill; it becomes `path` when the block ends without an error.

    Only a folder that contains a file `replaceable_if` is overwritten, so a typo cannot delete an unrelated folder.
    """
    part, aside = _temporary(path), _temporary(path)
    try:
        _check_target(path, overwrite=overwrite)
        if os.path.lexists(path) and not (path / replaceable_if).is_file():
            raise InputError(f"cannot overwrite {path}: not the same kind of folder (no {replaceable_if})")
        part.mkdir()
        yield part
        for file in part.iterdir():
            flush_to_disk(file)
        flush_to_disk(part)
        if overwrite and path.is_dir():
            path.rename(aside)
        _check_target(path, overwrite=False)
        part.rename(path)
        flush_to_disk(path.parent)
    except OSError as error:
        raise cannot("write", path, error) from error
    finally:
        if aside.is_dir() and not os.path.lexists(path):
            aside.rename(path)
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)
