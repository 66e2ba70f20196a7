"""Read requested tensors and rows of published weights, and manage the other files of an export.

The index names other files (config.json, tokenizer.json, ...), so that a later export knows which files an export
wrote. A folder with any other file is never replaced.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from equilibra.core.atomic import cannot
from equilibra.core.errors import InputError
from equilibra.execute.state.safetensors_names import Entry

__all__ = ["INDEX", "OTHER_FILES", "Row", "check_others", "check_replaceable", "read_entries", "write_others"]

INDEX = "model.safetensors.index.json"
ALONE = "model.safetensors"
KINDS = ("F64", "F32", "F16", "BF16")
"""dtypes that can be imported; others need scales"""

Row = tuple[int, int] | None
"""row number and number of rows; None: the whole tensor"""


def read_entries(folder: Path, wanted: Iterable[tuple[Row, Entry]], *, fill: bool) -> None:
    """Check, or fill, every entry; anything wrong with a file is an InputError that names it."""
    of_file: dict[str, list[tuple[Row, Entry]]] = {}
    file_of = _index(folder)
    for row, entry in wanted:
        if entry.name not in file_of:
            raise InputError(f"cannot import {folder}: it has no tensor {entry.name}; {_near(entry.name, file_of)}")
        of_file.setdefault(file_of[entry.name], []).append((row, entry))
    for name, entries in of_file.items():
        path = folder / name
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for row, entry in entries:
                    _read(path, file, row, entry, fill=fill)
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot read {path}: {error}") from error


def _read(path: Path, file: Any, row: Row, entry: Entry, *, fill: bool) -> None:  # noqa: ANN401
    found = file.get_slice(entry.name)
    shape, kind = tuple(found.get_shape()), found.get_dtype()
    required = entry.shape if row is None else (row[1], *entry.shape)
    if shape != required:
        raise InputError(
            f"cannot import {entry.name} of {path}: its shape is {list(shape)}, required is {list(required)}"
        )
    if kind not in KINDS:
        raise InputError(
            f"cannot import {entry.name} of {path}: its type is {kind}, required is one of {', '.join(KINDS)}"
        )
    if fill:
        values = file.get_tensor(entry.name) if row is None else found[row[0]]
        entry.value.copy_(values.reshape(entry.value.shape))


def _index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    try:
        if not path.is_file() and (folder / ALONE).is_file():
            with safe_open(folder / ALONE, framework="pt", device="cpu") as file:
                return dict.fromkeys(file.keys(), ALONE)
        file_of = json.loads(path.read_bytes())["weight_map"]
        names = {str(name): str(value) for name, value in file_of.items()}
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {path}, nor {ALONE} in its place: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is no index of safetensors: it needs a weight_map of names ({error!r})") from error
    for value in set(names.values()):
        if Path(value).name != value or value in {"", ".", ".."}:
            raise InputError(f"{path} names the file {value!r:.80}, which is not in its folder")
    return names


def _near(name: str, file_of: dict[str, str]) -> str:
    """Names similar to the missing one, to see which naming would fit."""
    prefix = ".".join(name.split(".")[:4])
    near = sorted(other for other in file_of if other.startswith(prefix))[:3] or sorted(file_of)[:3]
    return f"it has {len(file_of)} tensors, such as {', '.join(near)}"


OTHER_FILES = "other_files"
"""key of their names in the index's metadata"""


def check_others(others: Mapping[str, bytes]) -> None:
    """Raise InputError unless other files have plain names, not those of weights, and bytes as content."""
    for name, content in others.items():
        if not _is_plain(name) or name.lower() == INDEX or name.lower().endswith(".safetensors"):
            raise InputError(
                f"cannot write {name!r:.80} beside weights: it must be a plain file name, not {INDEX} nor *.safetensors"
            )
        if not isinstance(content, bytes):
            raise InputError(f"cannot write {name} beside weights: its content is {type(content).__name__}, not bytes")


def write_others(folder: Path, others: Mapping[str, bytes]) -> None:
    """Write the other files of an export."""
    for name, content in others.items():
        path = folder / name
        try:
            path.write_bytes(content)
        except OSError as error:
            raise cannot("write", path, error) from error


def check_replaceable(folder: Path) -> None:
    """Raise InputError if a folder holds anything that no export wrote."""
    if not folder.is_dir():
        return
    named = _others_of(folder)
    foreign = [path.name for path in folder.iterdir() if not (_is_own(path, named) and _is_file(path))]
    if foreign:
        raise InputError(f"cannot export to {folder}: it also holds {min(foreign)}; export to a new folder")


def _is_own(path: Path, named: list[str]) -> bool:
    is_weights = path.name.startswith("model-") and path.name.endswith(".safetensors")
    return is_weights or path.name == INDEX or path.name in named


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _others_of(folder: Path) -> list[str]:
    """Other files that the index names; empty if it cannot be read."""
    try:
        named = json.loads((folder / INDEX).read_bytes())["metadata"][OTHER_FILES]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name and "\0" not in name and name not in {"", ".", ".."}
