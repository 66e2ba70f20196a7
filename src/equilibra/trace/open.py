"""One way in and one way out for both file formats, chosen by looking at the path."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from equilibra.core.errors import InputError, TraceFormatError
from equilibra.trace.npz import read_npz, write_npz
from equilibra.trace.store import open_trace
from equilibra.trace.writer import write_trace

if TYPE_CHECKING:
    from equilibra.trace.routing import Recording

__all__ = ["load_trace", "save_trace"]


def load_trace(path: Path | str, *, num_experts: int | None = None, verify: bool = True) -> Recording:
    """Open a folder NAME.eqtrace (ids stay on disk) or read a file NAME.npz.

    `num_experts` where an .npz does not say it; `verify=False` leaves out the checksums of stored ids.
    """
    path = Path(path)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:
        raise TraceFormatError(f"cannot open {path}: {error}") from error
    if is_folder:
        trace = open_trace(path, verify=verify)
        if num_experts not in (None, trace.num_experts):
            raise InputError(
                f"{path} is a recording of {trace.num_experts} experts, not of the {num_experts} asked for"
            )
        return trace
    if not is_file:
        raise TraceFormatError(f"cannot open {path}: there is no such file or folder")
    if path.suffix != ".npz":
        raise TraceFormatError(f"cannot open {path}: a trace is a file NAME.npz or a folder NAME.eqtrace")
    return read_npz(path, num_experts=num_experts)


def save_trace(recording: Recording, path: Path | str, *, overwrite: bool = False) -> None:
    """Write NAME.eqtrace or NAME.npz; it appears when it is complete."""
    path = Path(path)
    if path.suffix == ".eqtrace":
        write_trace(recording, path, overwrite=overwrite)
    elif path.suffix == ".npz":
        write_npz(recording, path, overwrite=overwrite)
    else:
        raise InputError(f"cannot write {path}: its name must end in .npz or .eqtrace")
