"""Files beside exported weights (config.json, tokenizer.json, ...), and when an export may replace a folder.

The index names them in its metadata. So a later export knows which files of a folder an export wrote; a folder that
holds any other is somebody's, and is never replaced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from equilibra.core.atomic import cannot
from equilibra.core.errors import InputError
from equilibra.execute.state.safetensors_read import INDEX

__all__ = ["OTHER_FILES", "check_others", "check_replaceable", "write_others"]

OTHER_FILES = "other_files"
"""in the metadata of the index: the list of their names"""


def check_others(others: Mapping[str, bytes]) -> None:
    """An error unless they are plain names, not those of weights, with bytes."""
    for name, content in others.items():
        if not _is_plain(name) or name.lower() == INDEX or name.lower().endswith(".safetensors"):
            raise InputError(
                f"cannot write {name!r:.80} beside weights: it must be a plain file name, not {INDEX} nor *.safetensors"
            )
        if not isinstance(content, bytes):
            raise InputError(f"cannot write {name} beside weights: its content is {type(content).__name__}, not bytes")


def write_others(folder: Path, others: Mapping[str, bytes]) -> None:
    """Write them all."""
    for name, content in others.items():
        path = folder / name
        try:
            path.write_bytes(content)
        except OSError as error:
            raise cannot("write", path, error) from error


def check_replaceable(folder: Path) -> None:
    """An error if a folder holds anything that no export wrote."""
    if not folder.is_dir():
        return
    named = _others_of(folder)
    foreign = [path.name for path in folder.iterdir() if not (_is_own(path, named) and _is_file(path))]
    if foreign:
        raise InputError(f"cannot export to {folder}: it holds {min(foreign)}, too; export to a new folder")


def _is_own(path: Path, named: list[str]) -> bool:
    is_weights = path.name.startswith("model-") and path.name.endswith(".safetensors")
    return is_weights or path.name == INDEX or path.name in named


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _others_of(folder: Path) -> list[str]:
    """What the index names; nothing if it cannot be read."""
    try:
        named = json.loads((folder / INDEX).read_bytes())["metadata"][OTHER_FILES]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name and "\0" not in name and name not in {"", ".", ".."}
