"""A folder of recorded rollouts: every rank writes one file per step; any number of ranks can read them.

    FOLDER/about.json                         the model and a description of the run; rank 0 writes it once
    FOLDER/step-00000012-rank-3-of-4.npz      samples of rank 3 of 4 in step 12, as in `sample_file`

Readers get whole groups, because advantages compare the answers of a group. Groups are dealt out to the ranks in turn;
each rank's samples are sorted by group and number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from equilibra.core.atomic import atomic_file, cannot
from equilibra.core.errors import InputError
from equilibra.rl.recording.sample_file import ModelShape, read_keys, read_samples, write_samples
from equilibra.rl.sample import Sample
from equilibra.trace.open import save_trace
from equilibra.trace.routing import PolicySegments, RoutingTrace, narrow_ids

__all__ = [
    "RolloutAbout", "convert_rollout", "load_rollout", "read_about", "recorded_steps", "save_rollout", "to_trace",
]  # fmt: skip


def to_trace(samples: Iterable[Sample], num_experts: int) -> RoutingTrace:
    """The routing that training replays, as a trace for `equilibra simulate` and `equilibra trace`.

    Prompt tokens get the policy version of the first window. A token with an unknown expert in any layer counts as not
    recorded. Samples without answers are left out.
    """
    samples = [sample for sample in samples if sample.segments and sample.num_rows]
    if not samples:
        raise InputError("cannot make a trace: no sample of the rollout has an answer")
    experts = np.concatenate([sample.experts for sample in samples])
    recorded: NDArray[np.bool_] = np.asarray((experts >= 0).all(axis=(1, 2)))
    ids, _ = narrow_ids(experts, num_experts, recorded)
    lengths = np.array([sample.num_rows for sample in samples], np.int64)
    runs = [run for sample in samples for run in _runs(sample)]
    return RoutingTrace(
        ids=ids,
        num_experts=num_experts,
        offsets=np.cumsum([0, *lengths]),
        recorded=None if recorded.all() else recorded,
        prompt_length_of_sequence=np.minimum([sample.prompt.size for sample in samples], lengths),
        group_of_sequence=np.array([sample.group for sample in samples], np.int64),
        segments=PolicySegments(
            offsets=np.cumsum([0, *(rows for rows, _ in runs)]),
            version_of_segment=np.array([version for _, version in runs], np.int64),
        ),
    )


def convert_rollout(folder: Path | str, step: int, path: Path | str, *, overwrite: bool = False) -> None:
    """Write a recorded step as NAME.npz or NAME.eqtrace, for `equilibra simulate --trace`."""
    model = read_about(folder).model
    save_trace(to_trace(load_rollout(folder, step, model=model), model.num_experts), path, overwrite=overwrite)


def _runs(sample: Sample) -> Iterator[tuple[int, int]]:
    """(rows, version) of each segment that has rows; the prompt counts with the first."""
    first = 0
    for segment in sample.segments:
        end = min(sample.prompt.size + segment.end, sample.num_rows)
        if end > first:
            yield end - first, segment.version
            first = end


FORMAT, VERSION = "equilibra-rollout", 1
ABOUT, MAX_ABOUT_BYTES = "about.json", 1 << 16
FILE_NAME = re.compile(r"step-([0-9]{8,18})-rank-([0-9]{1,7})-of-([0-9]{1,7})\.npz")


@dataclass(frozen=True, kw_only=True)
class RolloutAbout:
    """Which model and run a folder records."""

    model: ModelShape
    about: Mapping[str, object]
    """description of the run in plain values: task, seed"""


class _File(NamedTuple):
    step: int
    rank: int
    world_size: int
    path: Path


def save_rollout(
    folder: Path | str, step: int, samples: Sequence[Sample], *, rank: int, world_size: int, model: ModelShape,
    about: Mapping[str, object],
) -> Path:  # fmt: skip
    """Write this rank's samples of a step; every rank calls it. A repeated step replaces the old one."""
    folder = Path(folder)
    _check_rank(rank, world_size)
    if step < 0:
        raise InputError(f"cannot record step {step}: steps count from 0")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            _write_about(folder, RolloutAbout(model=model, about=about))
            for file in _files(folder):
                if file.step == step and file.world_size != world_size:  # resumed with another number of ranks
                    file.path.unlink(missing_ok=True)
    except OSError as error:
        raise cannot("write", folder, error) from error
    path = folder / f"step-{step:08d}-rank-{rank}-of-{world_size}.npz"
    write_samples(path, samples, overwrite=True)
    return path


def load_rollout(
    folder: Path | str, step: int, *, model: ModelShape, rank: int = 0, world_size: int = 1
) -> list[Sample]:
    """Read this rank's share of a recorded step; the recording must be of the same model."""
    folder = Path(folder)
    _check_rank(rank, world_size)
    differences = read_about(folder).model.differences(model)
    if differences:
        raise InputError(
            f"{folder} records a model {'; '.join(differences)}: train the recorded model, or record a rollout of yours"
        )
    paths = _complete(folder, step)
    keys = np.concatenate([read_keys(path) for path in paths])
    distinct, counts = np.unique(keys, axis=0, return_counts=True)
    if (counts > 1).any():
        group, number = distinct[np.argmax(counts > 1)]
        raise InputError(
            f"{folder}: step {step} has answer {number} of group {group} twice; files of several runs are mixed up"
        )
    mine = np.unique(keys[:, 0])[rank::world_size]
    samples = [sample for path in paths for sample in read_samples(path, model=model, groups=mine)]
    return sorted(samples, key=lambda sample: (sample.group, sample.number))


def recorded_steps(folder: Path | str) -> list[int]:
    """Steps that have files."""
    return sorted({file.step for file in _files(Path(folder))})


def read_about(folder: Path | str) -> RolloutAbout:
    """Read which model and run a folder records."""
    path = Path(folder) / ABOUT
    try:
        if not path.is_file():
            raise InputError(f"{folder} is not a recording of rollouts (no {ABOUT})")
        with path.open("rb") as file:
            content = file.read(MAX_ABOUT_BYTES)  # of a longer file too little for valid JSON
    except OSError as error:
        raise cannot("read", path, error) from error
    try:
        body = json.loads(content)
        found = (body["format"], body["version"], type(body["about"]))
        if found != (FORMAT, VERSION, dict):
            raise InputError(f"it must have format {FORMAT}, version {VERSION} and a table about, not {found!r:.100}")
        return RolloutAbout(model=ModelShape(**body["model"]), about=body["about"])
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise InputError(f"{path} is damaged or not {FORMAT} version {VERSION} ({error}); record again") from error


def _write_about(folder: Path, new: RolloutAbout) -> None:
    path = folder / ABOUT
    body = {"format": FORMAT, "version": VERSION, "model": asdict(new.model), "about": dict(new.about)}
    try:
        content = json.dumps(body, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"a recording must be described by plain values, not {new.about!r:.200}: {error}") from error
    if not path.exists():
        with atomic_file(path) as part:
            part.write_text(content, "utf-8")
        return
    old = read_about(folder)
    if old != RolloutAbout(model=new.model, about=json.loads(content)["about"]):  # JSON has lists for tuples
        changed = old.model.differences(new.model) or [f"about {dict(old.about)}, yours is about {dict(new.about)}"]
        raise InputError(f"{folder} records a model {'; '.join(changed)}; choose another folder")


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise InputError(f"there is no rank {rank} of {world_size}: ranks count from 0")


def _files(folder: Path) -> list[_File]:
    try:
        found = [(FILE_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    except OSError as error:
        raise cannot("read", folder, error) from error
    return sorted(_File(int(match[1]), int(match[2]), int(match[3]), path) for match, path in found if match)


def _complete(folder: Path, step: int) -> list[Path]:
    """The files of a step, one of each rank that wrote it."""
    files = [file for file in _files(folder) if file.step == step]
    if not files:
        steps = recorded_steps(folder)
        held = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has no steps"
        raise InputError(f"{folder} has no recording of step {step}: {held}")
    sizes = sorted({file.world_size for file in files})
    if len(sizes) > 1:
        raise InputError(f"{folder} has step {step} from runs of {sizes} ranks; remove the files of all runs but one")
    missing = sorted(set(range(sizes[0])) - {file.rank for file in files})
    if missing or len(files) != sizes[0]:
        raise InputError(
            f"{folder} has {len(files)} files of step {step} for {sizes[0]} ranks: ranks {missing[:8]} are missing; "
            "copy their files too, or use another step"
        )
    return [file.path for file in files]
