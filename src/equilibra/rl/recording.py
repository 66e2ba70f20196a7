"""Rollouts on disk: recorded by one run, trained on by another with any number of ranks.

    FOLDER/about.json                         the model and a description of the run; rank 0 writes it once
    FOLDER/step-00000012-rank-3-of-4.npz      samples of rank 3 of 4 in step 12

Readers get whole groups, because advantages compare the answers of a group. Groups are dealt out to the ranks in turn;
each rank's samples are sorted by group and number.

A file of samples also holds a checkpoint's unfinished answers. Symbols: N samples, P prompt and A answer tokens of all
samples, M segments, R rows of routing, L MoE layers, K experts per token. Its arrays:

    problem, group, number, prompt_length, answer_length, num_segments, finished, reward    [N]
    version, start, end, first_row, num_rows                                                [M]
    prompt [P], answer [A], logprobs [A], experts [R, L, K]

Arrays are not compressed, so no file needs more memory than it has bytes. Nothing is unpickled. Sizes and values are
checked against the file, each other and the model before a sample is made.
"""

from __future__ import annotations

import json
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from equilibra.core.atomic import atomic_file, cannot
from equilibra.core.checks import check_text, check_whole
from equilibra.core.errors import InputError
from equilibra.rl.engine import Sample, Segment
from equilibra.trace.open import _Member as StoredArray
from equilibra.trace.open import save_trace
from equilibra.trace.routing import PolicySegments, RoutingTrace, narrow_ids

FORMAT, VERSION = "equilibra-rollout", 1
ABOUT, MAX_ABOUT_BYTES = "about.json", 1 << 16
FILE_NAME = re.compile(r"step-([0-9]{8,18})-rank-([0-9]{1,7})-of-([0-9]{1,7})\.npz")
Arrays: TypeAlias = dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The properties of a model that samples depend on; models that agree in all of them can share samples."""

    family: str
    """transformers' model_type"""
    num_layers: int
    num_experts: int
    top_k: int
    vocabulary: int
    """number of token ids"""
    tokenizer: str
    """digest of the tokenizer"""

    def __post_init__(self) -> None:
        for name in ("family", "tokenizer"):
            check_text(f"{name} of a recorded model", getattr(self, name), empty=True)
        for name in ("num_layers", "num_experts", "top_k", "vocabulary"):
            check_whole(f"{name} of a recorded model", getattr(self, name), low=1, high=None)
        if self.top_k > self.num_experts:
            raise InputError(f"{self.top_k} experts per token need at least as many experts, not {self.num_experts}")

    def differences(self, yours: ModelShape) -> list[str]:
        """Differences in words that follow "a model"."""
        words = {
            "family": "of the family {0!r}, yours is of {1!r}",
            "num_layers": "with {} MoE layers, yours has {}",
            "num_experts": "with {} experts, yours has {}",
            "top_k": "with {} experts per token, yours has {}",
            "vocabulary": "with {} token ids, yours has {}",
            "tokenizer": "with the tokenizer {:.12}, yours is {:.12}",
        }
        pairs = {name: (getattr(self, name), getattr(yours, name)) for name in words}
        return [words[name].format(*pair) for name, pair in pairs.items() if pair[0] != pair[1]]


MAX_ROWS = 1 << 31
OF_SAMPLE = {
    "problem": "<i8", "group": "<i8", "number": "<i8", "prompt_length": "<i8", "answer_length": "<i8",
    "num_segments": "<i8", "finished": "|b1", "reward": "<f8",
}  # fmt: skip
OF_SEGMENT = dict.fromkeys(("version", "start", "end", "first_row", "num_rows"), "<i8")
OF_TOKEN = {"prompt": "<i8", "answer": "<i8", "logprobs": "<f8"}
FLAT = {**OF_SAMPLE, **OF_SEGMENT, **OF_TOKEN}
NAMES = (*FLAT, "experts")
LENGTHS = {"prompt_length": "prompt", "answer_length": "answer", "num_segments": "version", "num_rows": "experts"}


def write_samples(path: Path, samples: Sequence[Sample], *, overwrite: bool = False) -> None:
    """Write samples atomically."""
    segments = [segment for sample in samples for segment in sample.segments]
    arrays: dict[str, Any] = {
        **_columns(OF_SAMPLE, [
            (s.problem, s.group, s.number, s.prompt.size, s.answer.size, len(s.segments), s.finished, s.reward)
            for s in samples
        ]),
        **_columns(OF_SEGMENT, [(s.version, s.start, s.end, s.first_row, len(s.experts)) for s in segments]),
    }  # fmt: skip
    for name, dtype in OF_TOKEN.items():
        arrays[name] = _joined([getattr(sample, name) for sample in samples], dtype)
    arrays["experts"] = _joined_experts([segment.experts for segment in segments])
    with atomic_file(path, overwrite=overwrite) as part, part.open("xb") as file:
        np.savez(file, **arrays)


def _columns(dtypes: dict[str, str], table: list[tuple[Any, ...]]) -> Arrays:
    return {name: np.array([row[at] for row in table], dtype) for at, (name, dtype) in enumerate(dtypes.items())}


def _joined(parts: list[NDArray[Any]], dtype: str, shape: tuple[int, ...] = ()) -> NDArray[Any]:
    return np.concatenate([np.zeros((0, *shape), dtype), *parts], dtype=dtype, casting="unsafe")


def _joined_experts(experts: list[NDArray[np.int32]]) -> NDArray[Any]:
    shapes = {array.shape[1:] for array in experts}
    if len(shapes) > 1:
        raise InputError(f"samples of one file must be of one model, but their (layers, experts) are {sorted(shapes)}")
    largest = max((int(array.max(initial=-1)) for array in experts), default=-1)
    return _joined(experts, "<i2" if largest < 1 << 15 else "<i4", shapes.pop() if shapes else (0, 0))


def read_keys(path: Path) -> NDArray[np.int64]:
    """[N, 2] group and number of each sample in a file."""
    with _opened(path) as arrays:
        index = _index(arrays)
        return np.stack([index["group"], index["number"]], axis=1)


def read_samples(
    path: Path | str, *, model: ModelShape | None = None, groups: NDArray[np.int64] | None = None
) -> list[Sample]:
    """The samples of a file in order, of all or some groups; checked against `model` if given."""
    with _opened(Path(path)) as arrays:
        index = _index(arrays)
        sample = np.ones(len(index["group"]), np.bool_) if groups is None else np.isin(index["group"], groups)
        segment = np.repeat(sample, index["num_segments"])
        prompt, answer = (np.repeat(sample, index[name]) for name in ("prompt_length", "answer_length"))
        kept = {name: index[name][sample if name in OF_SAMPLE else segment] for name in index}
        kept["prompt"] = _rows(arrays["prompt"], prompt)
        kept["answer"], kept["logprobs"] = _rows(arrays["answer"], answer), _rows(arrays["logprobs"], answer)
        kept["experts"] = _rows(arrays["experts"], np.repeat(segment, index["num_rows"])).astype(np.int32)
        _check_values(kept, model)
        return list(_samples(kept))


@contextmanager
def _opened(path: Path) -> Iterator[dict[str, StoredArray]]:
    """The arrays of a file, their headers checked against its size; errors in the block name the file."""
    try:
        if not S_ISREG(path.stat().st_mode):  # `is_file` hides a file that cannot be read now
            raise FileNotFoundError  # noqa: TRY301 - same error as for a missing file
        with warnings.catch_warnings(), zipfile.ZipFile(path) as archive:
            warnings.simplefilter("ignore")  # of numpy, about odd headers
            yield _arrays(archive, path.stat().st_size)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"cannot read {path}: there is no such sample file") from None
    except OSError as error:
        raise cannot("read", path, error) from error
    except InputError as error:
        raise InputError(f"cannot read {path}: {error}") from error
    except Exception as error:  # zipfile and numpy raise anything on damaged files
        raise InputError(
            f"{path} is not a readable sample file ({error or type(error).__name__}): truncated or corrupted; copy or "
            "record it again"
        ) from error


def _arrays(archive: zipfile.ZipFile, file_bytes: int) -> dict[str, StoredArray]:
    entries = archive.infolist()
    found = sorted(entry.filename for entry in entries)
    if found != sorted(f"{name}.npy" for name in NAMES):
        raise InputError(f"it must hold the arrays {', '.join(NAMES)}, not {', '.join(found[:30])!r:.400}")
    if any(entry.compress_type or entry.file_size != entry.compress_size for entry in entries):
        raise InputError("it is compressed, but sample files must not be; write it again")
    if sum(entry.file_size for entry in entries) > file_bytes:
        raise InputError(f"its arrays claim more than its {file_bytes} bytes; copy or record it again")
    arrays = {name: StoredArray.find(archive, name) for name in NAMES}
    for name, dtype in FLAT.items():
        if arrays[name].dtype.str != dtype or len(arrays[name].shape) != 1:
            raise InputError(f"{name} must be {dtype} in one dimension, not {arrays[name].dtype} {arrays[name].shape}")
    experts = arrays["experts"]
    if experts.dtype.str not in ("<i2", "<i4") or len(experts.shape) != 3 or (experts.shape[0] and 0 in experts.shape):
        raise InputError(f"experts must be whole numbers [rows, layers, k], not {experts.dtype} {experts.shape}")
    return arrays


def _rows(array: StoredArray, mask: NDArray[np.bool_] | None = None) -> NDArray[Any]:
    """The array, or the rows that the mask selects, without loading the others."""
    kept, first = [np.empty((0, *array.shape[1:]), array.dtype)], 0
    for piece in array.pieces() if array.shape[0] else ():
        kept.append(piece if mask is None else piece[mask[first : first + len(piece)]])
        first += len(piece)
    return np.concatenate(kept)


def _index(arrays: dict[str, StoredArray]) -> Arrays:
    """The columns of samples and segments, checked to add up."""
    for names in (tuple(OF_SAMPLE), tuple(OF_SEGMENT), ("answer", "logprobs")):
        sizes = {name: arrays[name].shape[0] for name in names}
        if len(set(sizes.values())) > 1:
            raise InputError(f"these arrays must have one length: {sizes}")
    index = {name: _rows(arrays[name]) for name in (*OF_SAMPLE, *OF_SEGMENT)}
    for name, what in LENGTHS.items():
        lengths, total = index[name], arrays[what].shape[0]
        if max(total, len(lengths)) > MAX_ROWS or lengths.min(initial=0) < 0 or lengths.max(initial=0) > total:
            raise InputError(f"{name} must be from 0 to {total}, the length of {what}")
        if lengths.sum() != total:
            raise InputError(f"{name} adds up to {lengths.sum()}, but {what} has {total} entries")
    return index


def _check_values(kept: Arrays, model: ModelShape | None) -> None:
    tokens, experts = (model.vocabulary, model.num_experts) if model else (1 << 62, 1 << 30)
    limits = dict.fromkeys(("problem", "group", "number", "version", "start", "end", "first_row"), (0, 1 << 62))
    limits |= {"prompt": (0, tokens), "answer": (0, tokens), "experts": (-1, experts)}
    for name, (least, most) in limits.items():
        low, high = kept[name].min(initial=0), kept[name].max(initial=0)
        if low < least or high >= most:
            raise InputError(f"{name} must be from {least} to {most - 1}, not {low if low < least else high}")
    for name in ("logprobs", "reward"):
        if not np.isfinite(kept[name]).all():
            raise InputError(f"{name} must be finite, not {kept[name][~np.isfinite(kept[name])][0]}")
    shape = kept["experts"].shape
    if model and shape[0] and shape[1:] != (model.num_layers, model.top_k):
        raise InputError(f"routing must have (layers, k) = {(model.num_layers, model.top_k)}, not {shape[1:]}")


def _samples(kept: Arrays) -> Iterator[Sample]:
    prompts, answers, segments, rows = (np.cumsum([0, *kept[name]]) for name in LENGTHS)
    all_segments = [
        Segment(
            **{name: int(kept[name][at]) for name in ("version", "start", "end", "first_row")},
            experts=kept["experts"][rows[at] : rows[at + 1]],
        )
        for at in range(len(kept["version"]))
    ]
    for at in range(len(kept["problem"])):
        answer = slice(answers[at], answers[at + 1])
        sample = Sample(
            **{name: int(kept[name][at]) for name in ("problem", "group", "number")},
            prompt=kept["prompt"][prompts[at] : prompts[at + 1]],
            answer=kept["answer"][answer],
            logprobs=kept["logprobs"][answer],
            segments=tuple(all_segments[segments[at] : segments[at + 1]]),
            finished=bool(kept["finished"][at]),
            reward=float(kept["reward"][at]),
        )
        _check_segments(sample)
        yield sample


def _check_segments(sample: Sample) -> None:
    for segment in sample.segments:
        if segment.end < segment.start or segment.first_row + len(segment.experts) > sample.num_rows:
            raise InputError(f"a segment of answer {sample.number} of group {sample.group} lies outside the answer")
    if sample.segments and len(sample.experts) != sample.num_rows:
        raise InputError(f"answer {sample.number} of group {sample.group} lacks the routing of some tokens")


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
    model = read_about(Path(folder)).model
    save_trace(to_trace(load_rollout(Path(folder), step, model=model), model.num_experts), path, overwrite=overwrite)


def _runs(sample: Sample) -> Iterator[tuple[int, int]]:
    """(rows, version) of each segment that has rows; the prompt counts with the first."""
    first = 0
    for segment in sample.segments:
        end = min(sample.prompt.size + segment.end, sample.num_rows)
        if end > first:
            yield end - first, segment.version
            first = end


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
    folder: Path, step: int, samples: Sequence[Sample], *, rank: int, world_size: int, model: ModelShape,
    about: Mapping[str, object],
) -> Path:  # fmt: skip
    """Write this rank's samples of a step; every rank calls it. A repeated step replaces the old one."""
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


def load_rollout(folder: Path, step: int, *, model: ModelShape, rank: int = 0, world_size: int = 1) -> list[Sample]:
    """Read this rank's share of a recorded step; the recording must be of the same model."""
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


def recorded_steps(folder: Path) -> list[int]:
    """Steps that have files."""
    return sorted({file.step for file in _files(folder)})


def read_about(folder: Path) -> RolloutAbout:
    """Read which model and run a folder records."""
    path = folder / ABOUT
    try:
        if not path.is_file():
            raise InputError(f"{folder} is not a recording of rollouts (no {ABOUT})")
        with path.open("rb") as file:
            content = file.read(MAX_ABOUT_BYTES)  # cuts a longer file, which is then not valid JSON
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
