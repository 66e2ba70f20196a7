"""A checkpoint on disk: shards in the format of torch.distributed.checkpoint (DCP), and a manifest of them.

    FOLDER/step-00000012/        complete: renamed to this once everything in it was on disk
        __0_0.distcp, ...        tensors, one file per rank that had any
        .metadata                DCP's own index, a pickle for other readers of DCP; never read here
        manifest.json            index, sizes and SHA-256 of all files, plain values; written last
    FOLDER/step-*.part           an interrupted save or removal; the next save deletes it
    FOLDER/step-*.replaced       the step's previous checkpoint; valid until the new one is complete
    FOLDER/step-*.aside          newer than the checkpoint a run resumed from; never read or removed

Only tensors are unpickled, by `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from equilibra.core.atomic import cannot, flush_to_disk
from equilibra.core.errors import InputError
from equilibra.execute.watch import first_line

FORMAT, VERSION = "equilibra-checkpoint", 1
MANIFEST = "manifest.json"
FILE_NAME = re.compile(r"\.?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """Size and hash of a file."""

    num_bytes: int
    sha256: str
    """hexadecimal"""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor is stored."""

    dtype: str
    """torch's name"""
    shape: tuple[int, ...]
    file: str
    """name in the folder"""
    first: int
    """byte offset in the file"""
    num_bytes: int
    """in the file, as torch.save writes it"""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """Contents of a checkpoint."""

    step: int
    """as counted by the training loop"""
    tensors: dict[str, StoredTensor]
    """by key"""
    files: dict[str, StoredFile]
    """by name"""
    values: dict[str, Any]
    """plain values: see `checkpoint_state`"""
    digest: str = ""
    """SHA-256 of the manifest itself"""


@contextmanager
def disk_errors(verb: str, path: Path) -> Iterator[None]:
    """Turn disk errors, also those torch wraps, into an InputError that names the file."""
    try:
        yield
    except OSError as error:
        raise cannot(verb, path, error) from error
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if isinstance(cause, OSError):
            raise cannot(verb, path, cause) from error
        raise InputError(f"cannot {verb} {path}: {first_line(error)}") from error


def write_shard(folder: Path, state: Mapping[str, Tensor], rank: int) -> None:
    """Write this rank's tensors, and a note of them for `finish`. On disk when it returns."""
    with disk_errors("write", folder):
        if not folder.is_dir():
            raise InputError(f"rank {rank} cannot see {folder}, which rank 0 made: ranks must share a file system")
        tensors = {key: asdict(stored) for key, stored in _write_tensors(folder, dict(state), rank).items()}
        names = {stored["file"] for stored in tensors.values()}
        note = {"tensors": tensors, "files": {name: asdict(_stored_file(folder / name)) for name in names}}
        _write_bytes(_note(folder, rank), json.dumps(note).encode())


def _write_tensors(folder: Path, state: dict[str, Tensor], rank: int) -> dict[str, StoredTensor]:
    """Write with DCP's planner. Ranks' keys are disjoint, so no rank needs the plans of others."""
    if not state:
        return {}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer = FileSystemWriter(folder, sync_files=True, overwrite=False)
    planner.set_up_planner(state, is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, _ = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    # DCP names files after the plan's position among those of all ranks
    plan = writer.prepare_global_plan([SavePlan([])] * rank + plans)[rank]
    found = {}
    for result in writer.write_data(planner.finish_plan(plan), planner).wait():
        key, where = result.index.fqn, result.storage_data
        found[key] = StoredTensor(
            dtype=str(state[key].dtype).removeprefix("torch."), shape=tuple(state[key].shape), file=where.relative_path,
            first=where.offset, num_bytes=where.length,
        )  # fmt: skip
    return found


def finish(folder: Path, *, step: int, world_size: int, values: dict[str, Any]) -> None:
    """On rank 0: collect the notes of all ranks, then write index and manifest to disk."""
    with disk_errors("write", folder):
        tensors: dict[str, StoredTensor] = {}
        files: dict[str, StoredFile] = {}
        for rank in range(world_size):
            note = json.loads(_note(folder, rank).read_text())
            for key, stored in note["tensors"].items():
                if key in tensors:
                    raise InputError(f"two ranks wrote {key} into {folder}: homes must be the same on all ranks")
                tensors[key] = StoredTensor(**{**stored, "shape": tuple(stored["shape"])})
            files |= {name: StoredFile(**stored) for name, stored in note["files"].items()}
            _note(folder, rank).unlink()
        _write_bytes(folder / ".metadata", pickle.dumps(_metadata(tensors)))
        files[".metadata"] = _stored_file(folder / ".metadata")
        body = {
            "format": FORMAT, "version": VERSION, "step": step, "values": values,
            "files": {name: asdict(stored) for name, stored in files.items()},
            "tensors": {key: asdict(stored) for key, stored in tensors.items()},
        }  # fmt: skip
        text = json.dumps({**body, "sha256": _digest(body)})
        _write_bytes(folder / MANIFEST, text.encode())
        flush_to_disk(folder)


def read_manifest(folder: Path) -> Manifest:
    """Read and check a manifest; anything wrong with it is an InputError that names the file."""
    path = folder / MANIFEST
    with disk_errors("read", path):
        try:
            body = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is damaged: not valid JSON ({error}); load another checkpoint") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT or body.get("version") != VERSION:
        raise InputError(
            f"{path} is not the manifest of a checkpoint: its format must be {FORMAT!r}, version {VERSION}"
        )
    digest = body.pop("sha256", None)
    if digest != _digest(body):
        raise InputError(f"{path} is damaged: its SHA-256 does not match its contents; load another checkpoint")
    try:
        return _checked(body, digest)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"{path} cannot be used: {error}") from error


def _checked(body: dict[str, Any], digest: str) -> Manifest:
    files = {name: StoredFile(**stored) for name, stored in body["files"].items()}
    for name in files:
        if not FILE_NAME.fullmatch(name):
            raise ValueError(f"{name!r:.80} is not a file name in the folder")
    tensors = {}
    for key, stored in body["tensors"].items():
        tensor = StoredTensor(**{**stored, "shape": tuple(stored["shape"])})
        if not isinstance(tensor.torch_dtype, torch.dtype) or not all(isinstance(n, int) for n in tensor.shape):
            raise ValueError(f"{key!r:.80} has no type or shape of a tensor")
        if tensor.first < 0 or tensor.first + tensor.num_bytes > files[tensor.file].num_bytes:
            raise ValueError(f"{key!r:.80} lies outside of {tensor.file}")
        tensors[key] = tensor
    return Manifest(step=int(body["step"]), tensors=tensors, files=files, values=body["values"], digest=digest)


def verify(folder: Path, manifest: Manifest, *, rank: int, world_size: int) -> None:
    """Check the sizes of all files, and the hashes of this rank's share of them."""
    for number, (name, stored) in enumerate(sorted(manifest.files.items())):
        path = folder / name
        with disk_errors("read", path):
            size = path.stat().st_size
            if size != stored.num_bytes:
                raise InputError(
                    f"{path} is damaged: it has {size} bytes instead of {stored.num_bytes}; load another checkpoint"
                )
            if number % world_size == rank and _stored_file(path) != stored:
                raise InputError(f"{path} is damaged: its SHA-256 is not the manifest's; load another checkpoint")


def read_tensors(folder: Path, manifest: Manifest, targets: Mapping[str, Tensor]) -> None:
    """Fill `targets`, whose dtypes and shapes must match the manifest."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = FileSystemReader(folder)
    metadata = _metadata({key: manifest.tensors[key] for key in targets})
    planner.set_up_planner(dict(targets), metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    with disk_errors("read", folder):
        reader.read_data(plan, planner).wait()


def _metadata(tensors: Mapping[str, StoredTensor]) -> Metadata:
    return Metadata(
        state_dict_metadata={
            key: TensorStorageMetadata(
                properties=TensorProperties(dtype=stored.torch_dtype),
                size=torch.Size(stored.shape),
                chunks=[ChunkStorageMetadata(offsets=_origin(stored), sizes=torch.Size(stored.shape))],
            )
            for key, stored in tensors.items()
        },
        storage_data={
            MetadataIndex(key, _origin(stored), 0): _StorageInfo(stored.file, stored.first, stored.num_bytes)
            for key, stored in tensors.items()
        },
    )


def _origin(stored: StoredTensor) -> torch.Size:
    return torch.Size([0] * len(stored.shape))


def _note(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _stored_file(path: Path) -> StoredFile:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return StoredFile(num_bytes=file.tell(), sha256=sha256)


def _write_bytes(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    flush_to_disk(path)
