"""Routing as vLLM, SGLang, verl, slime and NeMo-RL report it, converted to one form. Needs numpy only, no engine.

Symbols: T tokens of a sequence, R reported rows, C columns, L MoE layers, K experts per token.

What engines send (base64, .npy, nested lists, tensors) becomes integer arrays [R, C, K]. Nothing is unpickled, and
sizes are checked before memory is allocated: decoding takes at most a small multiple of what was received.

`align` finds the tokens that the rows belong to:

    tokens     0 ........ first ................ T - 2   T - 1
    rows                  0 .................... R - 1
    routing    none       reported               ...     none: the last token is never processed

R must be T - 1 - first: a shorter record was truncated, at an unknown end. A row of -1 has no routing (the engine
dropped it). Padding rows of zeros are recognised only with K > 1, where zeros cannot be routing.

Engines report all decoder layers, and fill only those of MoE layers: columns of dense layers must be 0 or -1. Or they
report the MoE layers alone. Which layers are dense comes from the model's config.json, or from the caller.
"""

from __future__ import annotations

import binascii
import io
import json
import warnings
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.atomic import cannot
from equilibra.core.checks import check_whole
from equilibra.core.errors import InputError
from equilibra.trace.open import write_npz
from equilibra.trace.routing import Ids, id_dtype, narrow_ids
from equilibra.trace.store import open_trace, trace_writer

__all__ = ["RoutedModel", "RoutedSequence", "align", "model_from_config", "model_from_folder", "save_sequences"]

MAX_BYTES = 1 << 32
"""most bytes of one sequence's routing: twice a million tokens of 60 layers, 8 experts and 4 bytes"""
MAX_HEADER = 4096
MAX_TOKENS = 1 << 31
SHOWN = 40


@contextmanager
def located(where: str) -> Iterator[None]:
    """Prefix every `InputError` with the place of the input that caused it."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def table_in(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The JSON object under a key; empty if the key is missing."""
    value = table.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise InputError(f"{name} must be a table, not {value!r:.60}")
    return value or {}


def count_in(table: Mapping[str, Any], name: str) -> int | None:
    """The number of tokens under a key of a JSON object; None if the key is missing."""
    value = table.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_TOKENS):
        raise InputError(f"{name} must be a number of tokens, not {value!r:.60}")
    return value


def from_base64(text: object, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Decode base64 text of at most `max_bytes` bytes."""
    if not isinstance(text, str | bytes):
        raise InputError(f"routed experts must be base64 text, not {type(text).__name__}")
    if len(text) > 4 * (max_bytes // 3 + 1):
        raise InputError(f"{len(text)} base64 characters are more than the {max_bytes} bytes of routed experts allowed")
    try:
        content = b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(
            f"routed experts are not valid base64 ({error}): truncated or damaged; they begin with {text[:SHOWN]!r}"
        ) from error
    if len(content) > max_bytes:
        raise InputError(f"routed experts decode to {len(content)} bytes; at most {max_bytes} are allowed")
    return content


def from_npy(content: bytes) -> NDArray[np.integer[Any]]:
    """The integer array of an .npy file whose header matches the size of its data."""
    file = io.BytesIO(content)
    shape, fortran_order, dtype = _npy_header(file)
    if dtype.hasobject:
        raise InputError("the .npy holds Python objects (a pickle), which are never loaded; send integers")
    if dtype.kind not in "iu":
        raise InputError(f"routed experts must be integers, not {dtype}")
    claimed, there = prod(int(size) for size in shape) * dtype.itemsize, len(content) - file.tell()
    if min((0, *shape)) < 0 or claimed != there:
        raise InputError(f"the .npy header says {dtype} {_short(shape)}, {claimed} bytes, but {there} bytes follow")
    values = np.frombuffer(content, dtype=dtype, offset=file.tell())
    return values.reshape(shape, order="F" if fortran_order else "C")


def _npy_header(file: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns about odd headers
            version = np.lib.format.read_magic(file)
            if version == (1, 0):
                return np.lib.format.read_array_header_1_0(file, max_header_size=MAX_HEADER)
            if version == (2, 0):
                return np.lib.format.read_array_header_2_0(file, max_header_size=MAX_HEADER)
    except Exception as error:  # numpy raises anything on damaged headers
        raise InputError(
            f"routed experts are not a readable .npy ({type(error).__name__}: {str(error)[:200]})"
        ) from error
    raise InputError(f"routed experts are an .npy of version {version}; use version 1.0 or 2.0")


def flat_int32(content: bytes, *, num_layers: int, top_k: int) -> NDArray[np.int32]:
    """[rows, num_layers, top_k] from the headerless little-endian int32 values that SGLang sends."""
    row_bytes = 4 * num_layers * top_k
    if len(content) % row_bytes:
        raise InputError(
            f"{len(content)} bytes of routed experts are not a whole number of tokens: {num_layers} layers of {top_k} "
            f"experts take {row_bytes} bytes per token; check both numbers, or the record was truncated"
        )
    return np.frombuffer(content, dtype="<i4").astype(np.int32, copy=False).reshape(-1, num_layers, top_k)


def as_rows(values: object) -> NDArray[np.integer[Any]]:
    """[rows, layers, k] integers from an array, a torch tensor on any device, or nested lists."""
    if isinstance(values, list | tuple):
        try:
            values = np.array(values) if values else np.zeros((0, 0, 0), np.int32)
        except (ValueError, OverflowError) as error:
            raise InputError(f"routed experts must be lists of equal length ({str(error)[:120]})") from error
    elif all(hasattr(values, method) for method in ("detach", "cpu", "numpy")):
        tensor: Any = values  # torch is not imported for it
        values = tensor.detach().cpu().numpy()
    if not isinstance(values, np.ndarray):
        raise InputError(f"routed experts must be an array, a tensor or lists, not {type(values).__name__}")
    if values.dtype.kind not in "iu":
        raise InputError(f"routed experts must be integers, not {values.dtype}")
    if values.ndim != 3:
        raise InputError(f"routed experts must be [tokens, layers, k], not of shape {_short(values.shape)}")
    return values


def _short(shape: tuple[int, ...]) -> str:
    text = str(tuple(shape))
    return text if len(text) <= 2 * SHOWN else text[: 2 * SHOWN] + "..."


EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""keys under which configurations keep the number of experts per layer"""
MAX_CONFIG_BYTES = 1 << 20
MAX_LAYERS = 4096


@dataclass(frozen=True, kw_only=True)
class RoutedModel:
    """Shape of the model that an engine reports about."""

    num_layers: int
    """decoder layers including dense ones: the columns of a report"""
    top_k: int
    """experts per token"""
    num_experts: int
    """routed experts per MoE layer, without shared ones"""
    dense_layers: tuple[int, ...] = ()
    """decoder layers without experts, ascending"""

    def __post_init__(self) -> None:
        for name in ("num_layers", "top_k"):
            check_whole(name, getattr(self, name), low=1, high=MAX_LAYERS)
        id_dtype(self.num_experts)
        if self.top_k > self.num_experts:
            raise InputError(f"{self.top_k} experts per token need at least as many experts, not {self.num_experts}")
        if list(self.dense_layers) != sorted(set(self.dense_layers) & set(range(self.num_layers))):
            raise InputError(
                f"dense layers must be different numbers from 0 to {self.num_layers - 1}, in order, not "
                f"{self.dense_layers!r:.80}"
            )
        if not self.moe_layers:
            raise InputError(f"all {self.num_layers} layers are dense: there is no routing to read")

    @property
    def moe_layers(self) -> tuple[int, ...]:
        dense = set(self.dense_layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in dense)


def model_from_config(config: Mapping[str, Any]) -> RoutedModel:
    """The model that a Hugging Face configuration describes; the text model if it has several."""
    inner = config.get("text_config")
    config = inner if isinstance(inner, Mapping) else config
    experts = next((name for name in EXPERTS if config.get(name)), EXPERTS[0])
    missing = [name for name in ("num_hidden_layers", "num_experts_per_tok", experts) if config.get(name) is None]
    if missing:
        raise InputError(
            f"the configuration has no {', '.join(missing)}, so it describes no known MoE model; give layers, experts "
            "per token, experts and dense layers instead"
        )
    num_layers: Any = config["num_hidden_layers"]
    check_whole("num_hidden_layers", num_layers, low=1, high=MAX_LAYERS)
    dense = tuple(layer for layer in range(num_layers) if _is_dense(config, layer))
    return RoutedModel(
        num_layers=num_layers, top_k=config["num_experts_per_tok"], num_experts=config[experts], dense_layers=dense
    )


def model_from_folder(path: Path | str) -> RoutedModel:
    """The model that the config.json in a folder describes; no other file is read."""
    file = Path(path) / "config.json"
    config = read_config(file)
    with located(str(file)):
        return model_from_config(config)


def read_config(file: Path) -> dict[str, Any]:
    """The JSON object in a config.json of at most 1 MiB."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise cannot("read", file, error) from error
    if len(content) > MAX_CONFIG_BYTES:
        raise InputError(f"cannot read {file}: it is larger than the {MAX_CONFIG_BYTES} bytes allowed")
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot read {file}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise InputError(f"cannot read {file}: it must be a JSON object, not a {type(config).__name__}")
    return config


def _is_dense(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has no experts, by the rules of transformers' model families."""
    types = config.get("mlp_layer_types")
    if isinstance(types, list) and layer < len(types):
        return bool(types[layer] == "dense")
    only = config.get("mlp_only_layers") or []
    if not isinstance(only, list):
        raise InputError(f"mlp_only_layers must be a list of layers, not {only!r:.60}")
    names = ("first_k_dense_replace", "decoder_sparse_step", "moe_layer_freq")
    first, step, every = (0 if config.get(name) is None else config[name] for name in names)
    for name, value in zip(names, (first, step, every), strict=True):
        check_whole(name, value, low=0, high=MAX_LAYERS)
    return layer < first or layer in only or (layer + 1) % (step or 1) != 0 or layer % (every or 1) != 0


NOTHING = "no token has routing: start the engine with enable_return_routed_experts, and ask for it in every request"


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutedSequence:
    """One sequence and the experts of its tokens."""

    ids: Ids
    """[T, L, K] experts; meaningless where not recorded"""
    recorded: NDArray[np.bool_]
    """[T] which tokens have routing"""
    prompt_length: int | None = None
    """tokens of the prompt; None: unknown"""
    group: int | None = None
    """shared by all answers to one prompt; None: unknown"""

    @property
    def num_tokens(self) -> int:
        return len(self.recorded)

    def experts(self) -> NDArray[np.int32]:
        """[T - 1, L, K] as `Generation` wants it: -1 without routing, no row for the last token."""
        experts = self.ids[:-1].astype(np.int32)
        experts[~self.recorded[:-1]] = -1
        return experts


def align(
    rows_RCK: NDArray[np.integer[Any]] | None, model: RoutedModel, *, num_tokens: int | None = None, first: int = 0,
    prompt_length: int | None = None, group: int | None = None, zeros_are_fillers: bool = False,
) -> RoutedSequence:  # fmt: skip
    """The checked sequence that reported rows belong to.

    rows_RCK: None if the engine dropped them (preempted requests): the `num_tokens` tokens are then routed live.
    num_tokens: of prompt and answer; None: derived from the rows. first: tokens at the start that the request left out
    of the report. zeros_are_fillers: whether a row of zeros means that nothing was written.
    """
    if rows_RCK is None:
        assert num_tokens is not None
        rows_RCK, first = np.zeros((0, model.num_layers, model.top_k), np.int32), num_tokens - 1
    num_rows = len(rows_RCK)
    num_tokens = first + num_rows + 1 if num_tokens is None else num_tokens
    if num_tokens < 1 or first < 0:
        raise InputError(f"a sequence needs at least one token and a start from 0 on, not {num_tokens} and {first}")
    if first + num_rows != num_tokens - 1:
        raise InputError(
            f"routing of {num_rows} tokens came, but a sequence of {num_tokens} tokens whose first {first} are left "
            f"out has {max(num_tokens - 1 - first, 0)} rows (the last token has none): the record was truncated or "
            "belongs to another sequence; if the request left out a prefix, give its length"
        )
    if prompt_length is not None and not 0 <= prompt_length <= num_tokens:
        raise InputError(f"a prompt of {prompt_length} tokens does not fit a sequence of {num_tokens}")
    values_RLK = _moe_columns(rows_RCK, model)
    recorded = np.zeros(num_tokens, np.bool_)
    there = slice(first, first + num_rows)
    recorded[there] = values_RLK.any(axis=(1, 2)) if zeros_are_fillers and model.top_k > 1 else True
    ids = np.zeros((num_tokens, *values_RLK.shape[1:]), values_RLK.dtype)
    ids[there] = values_RLK
    narrow, known = narrow_ids(ids, model.num_experts, recorded)
    return RoutedSequence(
        ids=narrow, recorded=recorded if known is None else known, prompt_length=prompt_length, group=group
    )


def _moe_columns(values: NDArray[np.integer[Any]], model: RoutedModel) -> NDArray[np.integer[Any]]:
    """[R, L, K] without the columns of dense layers."""
    layers, (num_rows, columns, top_k) = model.moe_layers, values.shape
    if num_rows == 0:
        return np.zeros((0, len(layers), model.top_k), np.int32)
    if top_k != model.top_k or columns not in (model.num_layers, len(layers)):
        raise InputError(
            f"routing of {columns} layers and {top_k} experts per token came, but the model has {model.num_layers} "
            f"layers, {len(layers)} of them with experts, and {model.top_k} experts per token"
        )
    if columns != len(layers):
        dense = values[:, model.dense_layers]
        written = (dense != 0) & (dense != -1) if dense.dtype.kind == "i" else dense != 0
        if written.any():
            row, column, _ = np.argwhere(written)[0]
            raise InputError(
                f"layer {model.dense_layers[column]} is said to be dense, but row {row} has experts "
                f"{dense[row, column].tolist()} there: check which layers are dense"
            )
        values = values[:, layers]
    _check_written(values, model)
    return values


def _check_written(values: NDArray[np.integer[Any]], model: RoutedModel) -> None:
    """Refuse a layer of zeros in tokens that have routing: it is dense, since no token has an expert twice."""
    if model.top_k > 1:
        tokens = values.any(axis=(1, 2))
        written = np.asarray(values[tokens].any(axis=(0, 2)))
        layers = [layer for layer, is_written in zip(model.moe_layers, written.tolist(), strict=True) if not is_written]
        if tokens.any() and layers:
            raise InputError(
                f"layers {', '.join(map(str, layers[:8]))} are zeros throughout, which is not routing: if they have no "
                "experts, declare them dense"
            )


def save_sequences(
    sequences: Iterable[RoutedSequence], path: Path | str, model: RoutedModel, *, overwrite: bool = False
) -> tuple[int, int]:
    """Write NAME.eqtrace or NAME.npz atomically; returns the numbers of tokens and sequences.

    Holds one sequence in memory at a time. An .npz is made from a temporary stored trace beside it.
    """
    path = Path(path)
    if path.suffix == ".eqtrace":
        return _store(sequences, path, model, overwrite=overwrite)
    if path.suffix != ".npz":
        raise InputError(f"cannot write {path}: its name must end in .npz or .eqtrace")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        stored = Path(folder) / "sequences.eqtrace"
        found = _store(sequences, stored, model, overwrite=False)
        write_npz(open_trace(stored, verify=False), path, overwrite=overwrite)
    return found


def _store(
    sequences: Iterable[RoutedSequence], path: Path, model: RoutedModel, *, overwrite: bool
) -> tuple[int, int]:  # fmt: skip
    num_tokens = num_sequences = num_recorded = 0
    with trace_writer(
        path, num_layers=len(model.moe_layers), top_k=model.top_k, num_experts=model.num_experts, overwrite=overwrite
    ) as writer:
        for sequence in sequences:
            writer.append(
                sequence.ids, recorded=sequence.recorded, prompt_length=sequence.prompt_length, group=sequence.group
            )
            num_tokens, num_sequences = num_tokens + sequence.num_tokens, num_sequences + 1
            num_recorded += int(np.count_nonzero(sequence.recorded))
        if num_tokens and not num_recorded:
            raise InputError(NOTHING)
    return num_tokens, num_sequences
