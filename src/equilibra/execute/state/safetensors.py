"""Export and import weights as Hugging Face safetensors, by logical expert number.

    export_safetensors(folder, runtime, naming_of("qwen3-moe"), dense)      # on all ranks
    import_safetensors(folder, runtime, naming_of("qwen3-moe"), dense)

dense: everything but experts, by name in the file, on every rank; `dense_tensors` gives routers and shared experts.

    model-00001-of-00009.safetensors    everything dense, by world rank 0
    model-00002-of-00009.safetensors    home experts of one rank of the first group, written by it; with stacked naming,
    ...                                 one layer per file: layer n is gathered on rank n % R
    config.json, tokenizer.json, ...    other given files, by world rank 0
    model.safetensors.index.json        the file of every tensor; its metadata names the other files

The folder appears atomically, and only replaces one that holds nothing but an earlier export. Optimizer state is not
included: see `checkpoint`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from equilibra.core.atomic import atomic_folder, cannot, flush_to_disk
from equilibra.core.checks import check_whole
from equilibra.core.errors import InputError
from equilibra.execute.runtime import Runtime
from equilibra.execute.state.published import Entry, Naming, gather_layer, room_for_a_layer, tensors_of_layer

DEFAULT_FILE_BYTES = 5 << 30
INDEX = "model.safetensors.index.json"
ALONE = "model.safetensors"
KINDS = ("F64", "F32", "F16", "BF16")
"""dtypes that can be imported; others need scales"""
OTHER_FILES = "other_files"
"""key of their names in the index's metadata"""

Row = tuple[int, int] | None
"""row number and number of rows; None: the whole tensor"""


@dataclass(frozen=True, kw_only=True)
class _File:
    rank: int
    """of the first group; writes the file"""
    names: dict[str, int]
    """bytes by name"""


def export_safetensors(
    folder: str | Path, runtime: Runtime, naming: Naming, dense: Mapping[str, Tensor], *,
    others: Mapping[str, bytes] | None = None, overwrite: bool = False, max_file_bytes: int = DEFAULT_FILE_BYTES,
) -> None:  # fmt: skip
    """Collective: write the weights to a shared file system; others: more files by name, from world rank 0 only."""
    runtime.check_whole("export weights")
    group, target, what = runtime.group, Path(folder), f"exporting weights to {folder}"
    more = dict(others or {}) if group.world_rank == 0 else {}

    def prepare() -> tuple[list[_File], Mapping[str, Tensor], tuple[Tensor, Tensor] | None]:
        check_others(more)
        files = _files(runtime, naming, dense, max_file_bytes)
        if naming.stacked:
            return files, dense, room_for_a_layer(runtime, receives=group.rank < len(runtime.weights))
        return files, {**dense, **{entry.name: entry.value for _, entry in _home_entries(runtime, naming)}}, None

    files, values, room = group.all_succeed(prepare, what=what)
    every = json.dumps([(file.rank, file.names) for file in files])
    group.agree(hashlib.sha256(every.encode()).hexdigest()[:32], what="the tensors to export")
    with ExitStack() as stack:

        def begin() -> str:
            if group.world_rank != 0:
                return ""
            if overwrite:
                check_replaceable(target)
            part = stack.enter_context(atomic_folder(target, overwrite=overwrite, replaceable_if=INDEX))
            write_others(part, more)
            return part.name

        def end() -> None:
            if group.world_rank == 0:
                _write_index(part, files, sorted(more))
            stack.close()

        part = target.parent / group.gather_text(group.all_succeed(begin, what=what), what=what)[0]
        for numbers in _rounds(files):
            write = partial(_write, part, runtime, naming, values, files, numbers, room)
            group.all_succeed(write, what=what)
        group.all_succeed(end, what=what)


def import_safetensors(folder: str | Path, runtime: Runtime, naming: Naming, dense: Mapping[str, Tensor]) -> None:
    """Collective: fill experts and `dense` from published weights of any floating-point dtype."""
    runtime.check_whole("import weights")
    group, what = runtime.group, f"importing weights from {folder}"
    wanted: list[tuple[Row, Entry]] = [
        (None, Entry(name=name, value=value.detach(), shape=tuple(value.shape))) for name, value in dense.items()
    ]
    for expert, entry in _home_entries(runtime, naming):
        wanted.append(((expert, runtime.spec.num_experts) if naming.stacked else None, entry))
    group.all_succeed(lambda: read_entries(Path(folder), wanted, fill=False), what=what)
    runtime.disarm()
    try:
        group.all_succeed(lambda: read_entries(Path(folder), wanted, fill=True), what=what)
    except BaseException as error:
        runtime.broken = f"{what} was cut off ({type(error).__name__}): weights in memory are mixed; load a checkpoint"
        raise
    runtime.weights_changed()


# --- which file holds what ---


def _files(runtime: Runtime, naming: Naming, dense: Mapping[str, Tensor], max_bytes: int) -> list[_File]:
    """The files of an export and their tensors; equal on all ranks."""
    check_whole("max_file_bytes", max_bytes, low=1, high=None)
    layers, ranks, size = range(len(runtime.weights)), runtime.group.num_ranks, runtime.weights[0].dtype.itemsize
    found = _split(0, ((name, value.nbytes) for name, value in dense.items()), max_bytes)
    if naming.stacked:
        for layer in layers:
            row = naming.names_of_expert(runtime.spec, layer, 0)
            every = {name: prod(shape) * size * runtime.spec.num_experts for name, shape in row.items()}
            found.append(_File(rank=layer % ranks, names=every))
    else:
        for rank in range(ranks):
            named = (
                (name, prod(shape) * size)
                for layer in layers
                for expert in runtime.placement.homes_on(layer, rank)
                for name, shape in naming.names_of_expert(runtime.spec, layer, expert).items()
            )
            found += _split(rank, named, max_bytes)
    names = [name for file in found for name in file.names]
    twice = next((name for name, number in Counter(names).items() if number > 1), None)
    if twice is not None:
        raise InputError(f"two tensors would be called {twice}: rename the dense tensor, which has an expert's name")
    return found


def _split(rank: int, named: Iterator[tuple[str, int]], max_bytes: int) -> list[_File]:
    """Files of at most `max_bytes`, unless a single tensor is larger."""
    found: list[_File] = []
    size = 0
    for name, num_bytes in named:
        size += num_bytes
        if not found or size > max_bytes:
            found.append(_File(rank=rank, names={}))
            size = num_bytes
        found[-1].names[name] = num_bytes
    return found


def _file_name(number: int, files: list[_File]) -> str:
    return f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"


# --- writing ---


def _rounds(files: list[_File]) -> list[list[int]]:
    """Files written at the same time, at most one per rank, so that a failure is noticed between rounds."""
    of_rank: dict[int, list[int]] = {}
    for number, file in enumerate(files):
        of_rank.setdefault(file.rank, []).append(number)
    return [sorted(n for n in numbers if n is not None) for numbers in zip_longest(*of_rank.values())]


def _write(
    part: Path, runtime: Runtime, naming: Naming, values: Mapping[str, Tensor], files: list[_File], numbers: list[int],
    room: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """One round: gather layers if experts are stacked, then write this rank's file."""
    if runtime.group.index != 0:
        return
    first = len(files) - len(runtime.weights)
    layer_of = {number: number - first for number in numbers if naming.stacked and number >= first}
    for number, layer in layer_of.items():  # collectives first: nothing before them may fail on one rank
        assert room is not None
        gather_layer(runtime, layer, room, target=files[number].rank)
    for number in numbers:
        if files[number].rank == runtime.group.rank:
            found = values
            if number in layer_of and room is not None:
                found = dict(tensors_of_layer(runtime, naming, layer_of[number], room[1]))
            _save(part / _file_name(number, files), {name: found[name] for name in files[number].names})


def _home_entries(runtime: Runtime, naming: Naming) -> Iterator[tuple[int, Entry]]:
    """Every tensor (or row, if stacked) of this rank's home experts, with the number of its expert."""
    for layer, weights in enumerate(runtime.weights):
        for expert, parts in zip(weights.experts.tolist(), weights.homes(), strict=True):
            for entry in naming.entries(runtime.spec, layer, expert, parts):
                yield expert, entry


def _save(path: Path, values: Mapping[str, Tensor]) -> None:
    copies = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in values.items()}
    try:
        save_file(copies, path, metadata={"format": "pt"})
        flush_to_disk(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write {path}: {error}") from error


def _write_index(part: Path, files: list[_File], others: list[str]) -> None:
    of_tensor = {name: _file_name(number, files) for number, file in enumerate(files) for name in file.names}
    total = sum(sum(file.names.values()) for file in files)
    metadata = {"total_size": total, **({OTHER_FILES: others} if others else {})}
    body = {"metadata": metadata, "weight_map": dict(sorted(of_tensor.items()))}
    (part / INDEX).write_text(json.dumps(body, indent=2) + "\n")


# --- reading ---


def read_entries(folder: Path, wanted: Iterable[tuple[Row, Entry]], *, fill: bool) -> None:
    """Check the file's tensor of every entry, or copy it there; what is wrong is an InputError that names the file."""
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
        if not _is_plain(value):
            raise InputError(f"{path} names the file {value!r:.80}, which is not in its folder")
    return names


def _near(name: str, file_of: dict[str, str]) -> str:
    """Names similar to the missing one, to see which naming would fit."""
    prefix = ".".join(name.split(".")[:4])
    near = sorted(other for other in file_of if other.startswith(prefix))[:3] or sorted(file_of)[:3]
    return f"it has {len(file_of)} tensors, such as {', '.join(near)}"


# --- other files ---
# The index names them (config.json, tokenizer.json, ...), so that a later export knows which files an export wrote.
# A folder with any other file is never replaced.


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
    foreign = [path.name for path in folder.iterdir() if not _is_own(path, named)]
    if foreign:
        raise InputError(f"cannot export to {folder}: it also holds {min(foreign)}; export to a new folder")


def _is_own(path: Path, named: list[str]) -> bool:
    is_weights = path.name.startswith("model-") and path.name.endswith(".safetensors")
    return (is_weights or path.name in {INDEX, *named}) and path.is_file() and not path.is_symlink()


def _others_of(folder: Path) -> list[str]:
    """Other files that the index names; empty if it cannot be read."""
    try:
        named = json.loads((folder / INDEX).read_bytes())["metadata"][OTHER_FILES]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name and "\0" not in name and name not in {"", ".", ".."}
