"""Writing so that a reader sees the old file, or the whole new one, and never a part.

Everything goes to a hidden neighbour first, is flushed to the disk, and is then renamed over the target.
Whatever ends the `with` block early (an error, a full disk, Ctrl-C) removes the neighbour and leaves the
target as it was. A folder cannot be renamed over another one: the old folder steps aside first, and comes
back if the rename fails.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from equilibra.core.errors import InputError, UnreadableError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["atomic_file", "atomic_folder", "cannot", "flush_to_disk"]


def cannot(verb: str, path: Path, error: OSError) -> InputError:
    """The error to raise when the operating system refuses `verb` (read, write) on `path`."""
    there = verb == "read" and not isinstance(error, FileNotFoundError | NotADirectoryError)
    kind = UnreadableError if there else InputError
    return kind(f"cannot {verb} {path}: {error.strerror or error}")


def flush_to_disk(path: Path) -> None:
    """Return when the file or folder entry at `path` is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _neighbour(path: Path) -> Path:
    return path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part"


def _check_target(path: Path, *, overwrite: bool) -> None:
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    if os.path.lexists(path) and not overwrite:
        raise InputError(f"cannot write {path}: it exists; choose another name, or ask to overwrite it (--overwrite)")


@contextmanager
def atomic_file(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a neighbour to write; when the block ends without an error it becomes `path`."""
    part = _neighbour(path)
    try:
        _check_target(path, overwrite=overwrite)
        if path.is_dir():
            raise InputError(f"cannot write {path}: it is a folder; give the name of a file")
        yield part
        flush_to_disk(part)
        _check_target(path, overwrite=overwrite)
        part.replace(path)
        flush_to_disk(path.parent)
    except OSError as error:
        raise cannot("write", path, error) from error
    finally:
        with suppress(OSError):  # a disk that cannot be written has nothing to remove
            part.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path, *, overwrite: bool = False, replaceable_if: str = "manifest.json") -> Iterator[Path]:
    """Give a neighbour folder to fill; when the block ends without an error it becomes `path`.

    Only a folder that holds a file `replaceable_if` is ever overwritten, so that a slip of the hand cannot
    delete a folder of something else.
    """
    part, aside = _neighbour(path), _neighbour(path)
    try:
        _check_target(path, overwrite=overwrite)
        if os.path.lexists(path) and not (path / replaceable_if).is_file():
            raise InputError(f"cannot overwrite {path}: it holds no {replaceable_if}, so it is something else")
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
