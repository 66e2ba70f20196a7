"""What rollout engines outside the model of `equilibra train` share: weights in a folder, and servers behind HTTP.

    model-00001.safetensors ...    tensors in stream order; one file at a time is in memory
    model.safetensors.index.json   which file holds which tensor
    config.json, tokenizer.json    whatever else the engine reads

World rank 0 writes a stream of weights to the folder, which replaces its predecessor atomically once it is complete;
then engines load it. Servers share the folder: rank 0 has each of them load it while the other ranks wait.

Every rank sends its requests to one server, in pieces whose answers have a bounded size; ranks may share a server.
"""

from __future__ import annotations

import json
import math
import urllib.request
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from itertools import chain
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from equilibra.core.atomic import atomic_folder, cannot
from equilibra.core.errors import ExecuteError, InputError
from equilibra.execute.group import ExpertGroup
from equilibra.integrations.routing_formats import NOTHING, RoutedModel, RoutedSequence
from equilibra.rl.engine import Generation, Request
from equilibra.rl.mismatch import unit_roundoff

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
            deque(weights, maxlen=0)

    group.all_succeed(write, what=f"writing weights to {folder}")
    group.all_succeed(take, what="loading new weights into the rollout engine")


def write_weights(
    folder: Path, weights: Iterable[tuple[str, Tensor]], others: Mapping[str, bytes], *, file_bytes: int = FILE_BYTES
) -> None:
    """Write or replace a folder. The stream is drained even if writing fails, since other ranks take part in it."""
    stream = iter(weights)
    file_of_tensor: dict[str, str] = {}
    total = 0
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(folder, overwrite=True, replaceable_if=INDEX) as part:
            for name, content in others.items():
                (part / name).write_bytes(content)
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
    except OSError as error:
        raise cannot("write", folder, error) from error
    finally:
        deque(stream, maxlen=0)


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


PAUSE_S = 0.5
"""between two attempts to reach a server that is starting"""
SHOWN_BYTES = 300
"""of a refusal, in messages"""
STATUS_BYTES = 1 << 20
"""most bytes of an answer that only reports success"""
ANSWER_BYTES = 64 << 10
"""most bytes of an answer besides its tokens"""
BYTES_PER_TOKEN = 256
"""generous bound on a generated token in JSON: its log-prob and text"""


def check_url(url: str) -> str:
    """The server's address, checked, without a trailing slash."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or parts.username:
        raise InputError(f"the address of a server must look like http://127.0.0.1:30000, not {url!r:.100}")
    return url.rstrip("/")


@dataclass(frozen=True, kw_only=True)
class Server:
    """An inference server that speaks JSON over HTTP, with limits on time and size.

    A refused connection is retried until the timeout, since the server may be starting. Nothing else is retried: the
    server may have processed a request whose answer was lost.
    """

    url: str
    timeout_s: float
    """for an answer, and for a server that is starting"""
    clock: Callable[[], float] = monotonic
    pause: Callable[[float], None] = sleep

    def get(self, path: str) -> Any:  # noqa: ANN401 - whatever JSON it answers
        return self._json(path, None, STATUS_BYTES)

    def post(self, path: str, body: object, *, max_bytes: int = STATUS_BYTES) -> Any:  # noqa: ANN401
        return self._json(path, json.dumps(body).encode(), max_bytes)

    def _json(self, path: str, body: bytes | None, max_bytes: int) -> Any:  # noqa: ANN401
        request = urllib.request.Request(  # noqa: S310 - `check_url` allows http and https only
            f"{self.url}{path}", data=body, headers={"Content-Type": "application/json"}
        )
        content = self._answer(request, max_bytes)
        if len(content) > max_bytes:
            raise InputError(
                f"{self.url}{path} answered more than the {max_bytes:,} bytes expected: does it serve the model "
                "that is trained, and return only what was asked for?"
            )
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{self.url}{path} did not answer valid JSON ({str(error)[:120]}): {content[:80]!r}"
            ) from error

    def _answer(self, request: urllib.request.Request, max_bytes: int) -> bytes:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        end = self.clock() + self.timeout_s
        while True:
            try:
                with opener.open(request, timeout=self.timeout_s) as answer:
                    content: bytes = answer.read(max_bytes + 1)
                    return content
            except HTTPError as error:
                with error:
                    said = error.read(SHOWN_BYTES).decode(errors="replace")
                raise InputError(f"{request.full_url} refused: {error.code} {error.reason}: {said}") from error
            except URLError as error:
                if not isinstance(error.reason, ConnectionRefusedError):
                    raise ExecuteError(f"{request.full_url} cannot be reached: {error.reason}") from error
                if self.clock() + PAUSE_S > end:
                    raise ExecuteError(
                        f"no server answered at {self.url} within {self.timeout_s:g} s (connection refused): start it "
                        "there, or set rollout.server"
                    ) from error
                self.pause(PAUSE_S)
            except (TimeoutError, HTTPException, ConnectionError) as error:
                raise ExecuteError(
                    f"{request.full_url} did not answer within {self.timeout_s:g} s, or the connection broke "
                    f"({type(error).__name__}: {error}): check the server, or raise rollout.server_timeout_s"
                ) from error


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedEngine(ABC):
    """Answers prompts with inference servers and returns the routing of every token."""

    servers: Sequence[Server]
    """all servers; rank r asks number r modulo their number"""
    group: ExpertGroup
    model: RoutedModel
    """what the servers serve"""
    vocabulary: int
    end: int
    """token that ends an answer"""
    folder: Path
    """carries the weights, on a file system that all servers share"""
    files: Mapping[str, bytes]
    """config.json and the tokenizer's, which servers read with the weights"""
    dtype: torch.dtype = torch.float32
    batch: int = 256
    """most requests in one POST"""
    piece_bytes: int = 64 << 20
    """most bytes of the answer to one POST, unless a single request needs more"""
    connections: int = 32
    """POSTs in flight at a time"""

    @abstractmethod
    def update(self, server: Server, version: int) -> None:
        """Have a server load the folder's weights."""

    @abstractmethod
    def answers(self, requests: Sequence[Request], temperature: float, max_bytes: int) -> list[tuple[Generation, bool]]:
        """Answers to the requests of one POST, and whether each has routing."""

    @property
    def server(self) -> Server:
        return self.servers[self.group.world_rank % len(self.servers)]

    @property
    def roundoff(self) -> float:
        """Unit roundoff of the run's type on a GPU; the server's actual arithmetic is unknown."""
        return unit_roundoff(self.dtype, "cuda")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int = 0) -> None:
        """Collective: have all servers load new weights; their answers carry the version."""

        def take() -> None:
            if self.group.world_rank == 0:
                with ThreadPoolExecutor(len(self.servers)) as pool:
                    list(pool.map(lambda server: self.update(server, version), self.servers))

        hand_over(self.group, self.folder, weights, self.files, take=take)

    def generate(self, requests: Sequence[Request], *, temperature: float) -> list[Generation]:
        """Answer all requests, several POSTs at a time."""

        def post(piece: list[Request]) -> list[tuple[Generation, bool]]:
            return self.answers(piece, temperature, STATUS_BYTES + sum(map(self._max_bytes, piece)))

        asked = [request for request in requests if request.max_new]
        pool = ThreadPoolExecutor(self.connections)
        try:
            pairs = list(chain.from_iterable(pool.map(post, self._pieces(asked))))
        finally:
            pool.shutdown(cancel_futures=True)
        if asked and not any(routed for _, routed in pairs):
            raise InputError(f"{self.server.url}: {NOTHING}")
        answers = iter([generation for generation, _ in pairs])
        shape = (len(self.model.moe_layers), self.model.top_k)
        return [next(answers) if request.max_new else request.unanswered(shape) for request in requests]

    def _pieces(self, requests: Sequence[Request]) -> list[list[Request]]:
        """Consecutive requests that share a POST."""
        pieces: list[list[Request]] = []
        room = 0
        for request in requests:
            size = self._max_bytes(request)
            if not pieces or size > room or len(pieces[-1]) == self.batch:
                pieces.append([])
                room = self.piece_bytes
            pieces[-1].append(request)
            room -= size
        return pieces

    def _max_bytes(self, request: Request) -> int:
        """Bound on the answer: routing as int32 in base64, and text."""
        per_row = math.ceil(4 * self.model.num_layers * self.model.top_k * 4 / 3) + BYTES_PER_TOKEN
        return ANSWER_BYTES + (request.tokens.size + request.max_new) * per_row

    def generation(
        self, request: Request, tokens: Sequence[object], logprobs: Sequence[object], sequence: RoutedSequence,
        version: int | None = None,
    ) -> Generation:  # fmt: skip
        """The checked answer to a request; one that is cut short or has another sequence's routing is refused."""
        numbers = np.array([_token(token, self.vocabulary) for token in tokens], np.int64)
        ended = bool(numbers.size) and bool(numbers[-1] == self.end)
        if not ended and numbers.size != request.max_new:
            raise InputError(
                f"it has {numbers.size} of {request.max_new} tokens and does not end with token {self.end}: the "
                "server also stops at other tokens; remove them from its generation_config.json"
            )
        wanted = (request.tokens.size, request.tokens.size + numbers.size)
        if (sequence.prompt_length, sequence.num_tokens) != wanted:
            raise InputError(
                f"it claims {sequence.prompt_length} tokens in the prompt and {sequence.num_tokens} in all, but "
                f"there are {wanted[0]} and {wanted[1]}"
            )
        return Generation(
            tokens=numbers, logprobs=np.array([_logprob(one) for one in logprobs], np.float64),
            experts=sequence.experts(), ended=ended, version=version,
        )  # fmt: skip


def _token(token: object, vocabulary: int) -> int:
    if type(token) is not int or not 0 <= token < vocabulary:
        raise InputError(f"tokens must be from 0 to {vocabulary - 1}, not {token!r:.40}: is it the right model?")
    return token


def _logprob(logprob: object) -> float:
    if not isinstance(logprob, int | float) or isinstance(logprob, bool) or not math.isfinite(logprob):
        raise InputError(f"log-probs must be finite numbers, not {logprob!r:.40}")
    return float(logprob)
