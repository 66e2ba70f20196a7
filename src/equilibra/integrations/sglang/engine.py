"""A rollout engine that asks SGLang servers over HTTP.

    python -m sglang.launch_server --model-path MODEL --enable-return-routed-experts

Every rank sends its requests to one server, in batches whose answers have a bounded size. After an update, world rank 0
writes the weights to a folder that the servers share and has each of them load it (`/update_weights_from_disk`); the
other ranks wait.

A server cannot take a request's noise, so the noise becomes a seed (`sampling_seed`, which SGLang follows under
--enable-deterministic-inference): runs are as reproducible as the server is.
"""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import ExecuteError, InputError
from equilibra.execute.group import ExpertGroup
from equilibra.integrations.routing_formats.decode import located
from equilibra.integrations.routing_formats.model import RoutedModel
from equilibra.integrations.routing_formats.sequence import NOTHING
from equilibra.integrations.sglang import meta_info, sequence_of_result
from equilibra.integrations.weights_folder import hand_over
from equilibra.rl.engine import UNKNOWN, Generation, Request, seed_of
from equilibra.rl.mismatch import unit_roundoff

__all__ = ["SGLangEngine", "Server", "check_url"]

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
    """such as http://127.0.0.1:30000"""
    timeout_s: float
    """for an answer, and for a server that is starting"""
    clock: Callable[[], float] = monotonic
    """returns seconds"""
    pause: Callable[[float], None] = sleep
    """waits for some seconds"""

    def post(self, path: str, body: object, *, max_bytes: int) -> Any:  # noqa: ANN401 - whatever JSON it answers
        """The server's JSON answer, of at most `max_bytes`."""
        request = urllib.request.Request(  # noqa: S310 - `check_url` allows http and https only
            f"{self.url}{path}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
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
        end = self.clock() + self.timeout_s
        while True:
            try:
                return self._once(request, max_bytes)
            except ConnectionRefusedError as error:
                if self.clock() + PAUSE_S > end:
                    raise ExecuteError(
                        f"no server answered at {self.url} within {self.timeout_s:g} s (connection refused): start it "
                        "there, or set rollout.server"
                    ) from error
                self.pause(PAUSE_S)

    def _once(self, request: urllib.request.Request, max_bytes: int) -> bytes:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self.timeout_s) as answer:
                content: bytes = answer.read(max_bytes + 1)
                return content
        except HTTPError as error:
            with error:
                said = error.read(SHOWN_BYTES).decode(errors="replace")
            raise InputError(f"{request.full_url} refused: {error.code} {error.reason}: {said}") from error
        except URLError as error:
            if isinstance(error.reason, ConnectionRefusedError):
                raise error.reason from error
            raise ExecuteError(f"{request.full_url} cannot be reached: {error.reason}") from error
        except (TimeoutError, HTTPException, ConnectionError) as error:
            raise ExecuteError(
                f"{request.full_url} did not answer within {self.timeout_s:g} s, or the connection broke "
                f"({type(error).__name__}: {error}): check the server, or raise rollout.server_timeout_s"
            ) from error


@dataclass(frozen=True, kw_only=True, eq=False)
class SGLangEngine:
    """Answers prompts with SGLang servers and returns the routing of every token."""

    servers: Sequence[Server]
    """all servers; rank r asks number r modulo their number"""
    group: ExpertGroup
    """the training ranks"""
    model: RoutedModel
    """what the servers serve"""
    vocabulary: int
    """number of tokens in the vocabulary"""
    end: int
    """token that ends an answer"""
    folder: Path
    """carries the weights, on a file system that all servers share"""
    files: Mapping[str, bytes]
    """config.json and the tokenizer's, which servers read with the weights"""
    dtype: torch.dtype = torch.float32
    """type of the weights"""
    batch: int = 256
    """most requests in one POST"""
    piece_bytes: int = 64 << 20
    """most bytes of the answer to one POST, unless a single request needs more"""
    connections: int = 32
    """POSTs in flight at a time"""

    # --- weights ---

    @property
    def roundoff(self) -> float:
        """Unit roundoff of the run's type on a GPU; the server's actual arithmetic is unknown."""
        return unit_roundoff(self.dtype, "cuda")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int = 0) -> None:
        """Collective: have all servers load new weights; their answers carry the version."""

        def update(server: Server) -> None:
            body = {"model_path": str(self.folder), "weight_version": str(version)}
            said = server.post("/update_weights_from_disk", body, max_bytes=STATUS_BYTES)
            if not isinstance(said, Mapping) or said.get("success") is not True:
                raise InputError(f"{server.url} did not load the weights in {self.folder}: {said!r:.300}")

        def take() -> None:
            if self.group.world_rank == 0:
                with ThreadPoolExecutor(len(self.servers)) as pool:
                    list(pool.map(update, self.servers))

        hand_over(self.group, self.folder, weights, self.files, take=take)

    # --- sampling ---

    def generate(self, requests: Sequence[Request], *, temperature: float) -> list[Generation]:
        """Answer all requests, several POSTs at a time."""
        server = self.servers[self.group.world_rank % len(self.servers)]
        asked = [request for request in requests if request.max_new]
        pool = ThreadPoolExecutor(self.connections)
        try:
            found = list(pool.map(lambda piece: self._piece(server, piece, temperature), self._pieces(asked)))
        finally:
            pool.shutdown(cancel_futures=True)
        pairs = [pair for piece in found for pair in piece]
        if asked and not any(routed for _, routed in pairs):
            raise InputError(f"{server.url}: {NOTHING}")
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

    def _piece(self, server: Server, requests: Sequence[Request], temperature: float) -> list[tuple[Generation, bool]]:
        """Answers to the requests of one POST, and whether each has routing."""
        body = {
            "input_ids": [request.tokens.tolist() for request in requests],
            "sampling_params": [
                {"max_new_tokens": request.max_new, "temperature": temperature, "top_p": 1.0, "top_k": -1,
                 "stop_token_ids": [self.end], "sampling_seed": seed_of(request), "skip_special_tokens": False}
                for request in requests
            ],
            "return_logprob": True,
            "return_routed_experts": True,
        }  # fmt: skip
        max_bytes = STATUS_BYTES + sum(self._max_bytes(request) for request in requests)
        results = server.post("/generate", body, max_bytes=max_bytes)
        if not isinstance(results, list) or len(results) != len(requests):
            raise InputError(f"{server.url} must answer {len(requests)} requests with as many, not {results!r:.80}")
        return [
            (self._read(server, request, result), meta_info(result).get("routed_experts") is not None)
            for request, result in zip(requests, results, strict=True)
        ]

    def _read(self, server: Server, request: Request, result: object) -> Generation:
        with located(f"an answer of {server.url}"):
            meta = meta_info(result)
            tokens, logprobs = _tokens(meta, self.vocabulary)
            ended = bool(tokens.size) and bool(tokens[-1] == self.end)
            if not ended and tokens.size != request.max_new:
                raise InputError(
                    f"it has {tokens.size} of {request.max_new} tokens and does not end with token {self.end}: the "
                    "server also stops at other tokens; remove them from its generation_config.json"
                )
            sequence = sequence_of_result(result, self.model)
            wanted = (request.tokens.size, request.tokens.size + tokens.size)
            if (sequence.prompt_length, sequence.num_tokens) != wanted:
                raise InputError(
                    f"it claims {sequence.prompt_length} tokens in the prompt and {sequence.num_tokens} in all, but "
                    f"there are {wanted[0]} and {wanted[1]}"
                )
            said = meta.get("weight_version")  # servers before weight_version say nothing
            version = None if said is None else int(said) if str(said).isdecimal() else UNKNOWN
            return Generation(
                tokens=tokens, logprobs=logprobs, experts=sequence.experts(), ended=ended, version=version
            )  # fmt: skip


def _tokens(meta: Mapping[str, Any], vocabulary: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """New tokens and their log-probs, from a list of [log-prob, token, text]."""
    said = meta.get("output_token_logprobs")
    if not isinstance(said, list) or not all(isinstance(one, list) and len(one) >= 2 for one in said):
        raise InputError("it has no output_token_logprobs: a list of [log-prob, token, text] is required")
    for logprob, token, *_ in said:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise InputError(f"tokens must be from 0 to {vocabulary - 1}, not {token!r:.40}: is it the right model?")
        if type(logprob) not in (int, float) or not math.isfinite(logprob):
            raise InputError(f"log-probs must be finite numbers, not {logprob!r:.40}")
    return np.array([one[1] for one in said], np.int64), np.array([one[0] for one in said], np.float64)
