"""The folder of a run's checkpoints: which are there, where a new one is written, and how it takes its place.

Only world rank 0 changes anything here. A kill at any moment leaves every complete checkpoint complete: see the names
in `checkpoint_files`. A checkpoint that is newer than the one this run went on from is never deleted: it is set aside.
"""

from __future__ import annotations

import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from equilibra.core.atomic import flush_to_disk
from equilibra.core.checks import check_whole
from equilibra.core.errors import InputError
from equilibra.execute.state.checkpoint_files import MANIFEST, disk_errors

__all__ = ["begin_part", "checkpoint_steps", "commit", "folder_of_step", "latest_checkpoint", "remove_checkpoint"]

COMPLETE = re.compile(r"step-(\d{8,})(\.replaced)?")
MAX_STEP = 10**12


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps that have a complete checkpoint, in order."""
    if not folder.is_dir():
        return []
    with disk_errors("read", folder):
        matches = [COMPLETE.fullmatch(path.name) for path in folder.iterdir() if (path / MANIFEST).is_file()]
    return sorted({int(match[1]) for match in matches if match})


def latest_checkpoint(folder: Path) -> int | None:
    """The last step that has a complete checkpoint."""
    return max(checkpoint_steps(folder), default=None)


def folder_of_step(folder: Path, step: int | None) -> Path:
    """Where a step's checkpoint is; None: the last one."""
    steps = checkpoint_steps(folder)
    if not steps:
        raise InputError(f"there is no checkpoint in {folder}{'' if folder.is_dir() else ': there is no such folder'}")
    if step is not None and step not in steps:
        raise InputError(f"there is no checkpoint of step {step} in {folder}: there are {', '.join(map(str, steps))}")
    chosen = _named(folder, steps[-1] if step is None else step)
    return chosen if (chosen / MANIFEST).is_file() else _replaced(chosen)


def begin_part(folder: Path, step: int, *, last: int | None) -> str:
    """Clear away what was cut off, and make a folder to write into; returns its name.

    last: the step that this run loaded or saved here last. None: it did neither, so later steps are of another run.
    """
    check_whole("step", step, low=0, high=MAX_STEP - 1)
    with disk_errors("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("step-*.replaced"):
            new = path.with_suffix("")
            _remove(path) if (new / MANIFEST).is_file() else path.rename(new)
        for path in folder.glob("step-*.part"):
            shutil.rmtree(path, ignore_errors=True)
        later = [other for other in checkpoint_steps(folder) if other >= step]
        if later and last is None:
            raise InputError(
                f"cannot save step {step} in {folder}, which has step {later[-1]}: it is of another run; load it to go "
                "on from there, or use another folder"
            )
        part = folder / f"{_named(folder, step).name}.{secrets.token_hex(4)}.part"
        part.mkdir()
        return part.name


def commit(folder: Path, part: Path, step: int, *, keep: int, last: int | None) -> None:
    """Make a finished part the checkpoint of its step; then, and only then, remove others.

    Those of steps after `last` came of an earlier attempt at these steps. They are set aside under another name.
    """
    final = _named(folder, step)
    with disk_errors("write", final):
        for other in checkpoint_steps(folder):
            if last is not None and other > last:
                _set_aside(folder_of_step(folder, other), _named(folder, other))
        if final.exists():
            final.rename(_replaced(final))
        part.rename(final)
        flush_to_disk(folder)
    steps = checkpoint_steps(folder)
    kept = [other for other in steps if other <= step][-keep:]
    with suppress(OSError):  # the checkpoint is there; what could not be removed is tried again by the next save
        _remove(_replaced(final))
        for other in set(steps) - set(kept):
            _remove(_named(folder, other))


def remove_checkpoint(folder: Path, step: int) -> None:
    """Take a step's checkpoint away, never half of it."""
    with disk_errors("write", folder):
        _remove(folder_of_step(folder, step))


def _set_aside(path: Path, named: Path) -> None:
    """Take a name that nothing here reads or removes."""
    number = 1
    while (aside := named.with_name(f"{named.name}.aside{f'-{number}' if number > 1 else ''}")).exists():
        number += 1
    path.rename(aside)


def _named(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _replaced(path: Path) -> Path:
    return path.with_name(f"{path.name}.replaced")


def _remove(path: Path) -> None:
    """Never half: a folder loses its good name first."""
    if path.exists():
        going = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        path.rename(going)
        shutil.rmtree(going)
