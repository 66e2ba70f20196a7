"""Write a stream of weights to a folder from which a rollout engine with its own memory loads them.

    model-00001.safetensors ...    tensors in stream order; one file at a time is in memory
    model.safetensors.index.json   which file holds which tensor
    config.json, tokenizer.json    whatever else the engine reads

The folder replaces its predecessor atomically once it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from equilibra.core.atomic import atomic_folder, cannot
from equilibra.core.errors import InputError
from equilibra.execute.group import ExpertGroup

__all__ = ["hand_over", "write_weights"]

INDEX = "model.safetensors.index.json"
FILE_BYTES = 2 << 30


def hand_over(
    group: ExpertGroup, folder: Path, weights: Iterable[tuple[str, Tensor]], others: Mapping[str, bytes], *,
    take: Callable[[], None],
) -> None:  # fmt: skip
    """Collective: world rank 0 writes the folder, then every rank calls `take`. Any rank's error is raised on all."""

    def write() -> None:
        if group.world_rank == 0:
            write_weights(folder, weights, others)
        else:
            for _ in weights:
                pass

    group.all_succeed(write, what=f"writing weights to {folder}")
    group.all_succeed(take, what="loading new weights into the rollout engine")


def write_weights(
    folder: Path, weights: Iterable[tuple[str, Tensor]], others: Mapping[str, bytes], *, file_bytes: int = FILE_BYTES
) -> None:
    """Write or replace a folder. The stream is drained even if writing fails, since other ranks take part in it."""
    stream = iter(weights)
    try:
        _write(folder, stream, others, file_bytes)
    finally:
        for _ in stream:
            pass


def _write(folder: Path, stream: Iterator[tuple[str, Tensor]], others: Mapping[str, bytes], file_bytes: int) -> None:
    file_of_tensor: dict[str, str] = {}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot("write", folder, error) from error
    with atomic_folder(folder, overwrite=True, replaceable_if=INDEX) as part:
        for name, content in others.items():
            (part / name).write_bytes(content)
        total = 0
        for number, tensors in enumerate(_batches(stream, file_bytes), 1):
            file = f"model-{number:05d}.safetensors"
            total += sum(value.nbytes for value in tensors.values())
            file_of_tensor.update(dict.fromkeys(tensors, file))
            try:
                save_file(tensors, part / file, metadata={"format": "pt"})
            except SafetensorError as error:
                raise InputError(f"cannot write {part / file}: {error}") from error
        body = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of_tensor.items()))}
        (part / INDEX).write_text(json.dumps(body, indent=2) + "\n")


def _batches(stream: Iterator[tuple[str, Tensor]], file_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Tensors grouped into files of at most `file_bytes`, at least one tensor each."""
    held: dict[str, Tensor] = {}
    size = 0
    for name, value in stream:
        if held and size + value.nbytes > file_bytes:
            yield held
            held, size = {}, 0
        held[name] = value.detach().to("cpu", copy=True).contiguous()
        size += value.nbytes
    if held:
        yield held
