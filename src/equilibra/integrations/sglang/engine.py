"""A rollout engine that asks SGLang servers over HTTP.

    python -m sglang.launch_server --model-path MODEL --enable-return-routed-experts

Every rank asks one of the servers, in pieces whose answers are of bounded size. After an update world rank 0 writes the
weights to a folder that the servers see, and has each of them load it (`/update_weights_from_disk`); the others wait
until that is done.

The noise of a request cannot be handed to a server: it becomes a seed (`sampling_seed`, which SGLang follows under
--enable-deterministic-inference). So runs repeat as far as the server does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib import request as http
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import OpenerDirector, ProxyHandler, build_opener

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import ExecuteError, InputError
from equilibra.execute.group import ExpertGroup
from equilibra.integrations.routing_formats.decode import located
from equilibra.integrations.routing_formats.model import RoutedModel
from equilibra.integrations.routing_formats.sequence import NOTHING
from equilibra.integrations.sglang import sequence_of_result
from equilibra.integrations.weights_folder import hand_over
from equilibra.rl.engine import UNKNOWN, Generation, Request, seed_of
from equilibra.rl.mismatch import unit_roundoff

__all__ = ["SGLangEngine", "Server", "check_url"]

# Talking to an inference server: JSON over HTTP with the standard library, with limits on time and size.
#
# A server that refuses connections may be starting: it is asked again until the time is over. Nothing else is
# repeated,
# for an answer that was lost may have been given.


PAUSE_S = 0.5
SAID = 300


def check_url(url: str) -> str:
    """The address of a server, without a slash at its end."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or parts.username:
        raise InputError(f"the address of a server must be as http://127.0.0.1:30000, not {url!r:.100}")
    return url.rstrip("/")


@dataclass(frozen=True, kw_only=True)
class Server:
    """One server."""

    url: str
    """as http://127.0.0.1:30000"""
    timeout_s: float
    """for an answer, and for a server that is starting"""
    clock: Callable[[], float] = monotonic
    """seconds"""
    pause: Callable[[float], None] = sleep
    """waits for some seconds"""

    def post(self, path: str, body: object, *, max_bytes: int) -> Any:  # noqa: ANN401 - whatever JSON it answers
        """What the server answers, of at most so many bytes."""
        request = http.Request(
            f"{self.url}{path}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        content = self._answer(request, max_bytes)
        if len(content) > max_bytes:
            raise InputError(
                f"{self.url}{path} answered more than the {max_bytes:,} bytes that there can be: does it serve the "
                "model that is trained, and return no more than it is asked for?"
            )
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{self.url}{path} answered no JSON ({str(error)[:120]}): {content[:80]!r}") from error

    def _answer(self, request: http.Request, max_bytes: int) -> bytes:
        end, opener = self.clock() + self.timeout_s, build_opener(ProxyHandler({}))
        while True:
            try:
                return self._once(opener, request, max_bytes)
            except ConnectionRefusedError as error:
                if self.clock() + PAUSE_S > end:
                    raise ExecuteError(
                        f"no server answered at {self.url} within {self.timeout_s:g} s (connection refused): start it "
                        "there, or set rollout.server"
                    ) from error
                self.pause(PAUSE_S)

    def _once(self, opener: OpenerDirector, request: http.Request, max_bytes: int) -> bytes:
        try:
            with opener.open(request, timeout=self.timeout_s) as answer:
                content: bytes = answer.read(max_bytes + 1)
                return content
        except HTTPError as error:
            with error:
                said = error.read(SAID).decode(errors="replace")
            raise InputError(f"{request.full_url} refused: {error.code} {error.reason}: {said}") from error
        except URLError as error:
            if isinstance(error.reason, ConnectionRefusedError):
                raise error.reason from error
            raise ExecuteError(f"{request.full_url} cannot be reached: {error.reason}") from error
        except (TimeoutError, HTTPException, ConnectionError) as error:
            raise ExecuteError(
                f"{request.full_url} did not answer within {self.timeout_s:g} s, or broke off "
                f"({type(error).__name__}: {error}): look at the server, or raise rollout.server_timeout_s"
            ) from error


SMALL_BYTES = 1 << 20
"""of an answer that says only how it went"""
ANSWER_BYTES = 64 << 10
"""of what an answer says besides its tokens"""
BYTES_PER_TOKEN = 256
"""of a generated token in JSON, its log-probability and text, generously"""


@dataclass(frozen=True, kw_only=True, eq=False)
class SGLangEngine:
    """Prompts to servers, answers with routing back."""

    servers: Sequence[Server]
    """all that take part; this rank asks the one of its number"""
    group: ExpertGroup
    """the ranks"""
    model: RoutedModel
    """what the servers serve"""
    vocabulary: int
    """tokens are below it"""
    end: int
    """token that ends an answer"""
    folder: Path
    """where weights are handed over; all servers see it"""
    files: Mapping[str, bytes]
    """config.json and the tokenizer's, which servers read with the weights"""
    dtype: torch.dtype = torch.float32
    """numbers of the weights"""
    batch: int = 256
    """most requests of one piece, which is one POST"""
    piece_bytes: int = 64 << 20
    """most bytes that the answer to a piece may have, but for a single request that needs more"""
    connections: int = 32
    """pieces that are under way at the same time"""

    # --- weights ---

    @property
    def roundoff(self) -> float:
        """Of the run's type on a GPU: what a server computes with is not known here."""
        return unit_roundoff(self.dtype, "cuda")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int = 0) -> None:
        """Collective: servers take new weights; their answers say the version."""

        def take() -> None:
            if self.group.world_rank == 0:
                with ThreadPoolExecutor(len(self.servers)) as pool:
                    list(pool.map(lambda server: _update(server, self.folder, version), self.servers))

        hand_over(self.group, self.folder, weights, self.files, take=take)

    # --- sampling ---

    def generate(self, requests: Sequence[Request], *, temperature: float) -> list[Generation]:
        """Answer all requests, in pieces of bounded size, several at a time."""
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
        """Neighbours that share a POST."""
        pieces: list[list[Request]] = []
        room = 0
        for request in requests:
            size = self._most_bytes(request)
            if not pieces or size > room or len(pieces[-1]) == self.batch:
                pieces.append([])
                room = self.piece_bytes
            pieces[-1].append(request)
            room -= size
        return pieces

    def _most_bytes(self, request: Request) -> int:
        """Of the answer: routing as int32 in base64, and text."""
        per_row = math.ceil(4 * self.model.num_layers * self.model.top_k * 4 / 3) + BYTES_PER_TOKEN
        return ANSWER_BYTES + (request.tokens.size + request.max_new) * per_row

    def _piece(self, server: Server, requests: Sequence[Request], temperature: float) -> list[tuple[Generation, bool]]:
        """Answers, and whether they have routing."""
        results = self._ask(server, requests, temperature)
        if not isinstance(results, list) or len(results) != len(requests):
            raise InputError(f"{server.url} was asked {len(requests)} questions and answered {results!r:.80}")
        return [
            (self._read(server, request, result), _meta(result).get("routed_experts") is not None)
            for request, result in zip(requests, results, strict=True)
        ]

    def _ask(self, server: Server, requests: Sequence[Request], temperature: float) -> Any:  # noqa: ANN401
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
        most = SMALL_BYTES + sum(self._most_bytes(request) for request in requests)
        return server.post("/generate", body, max_bytes=most)

    def _read(self, server: Server, request: Request, result: object) -> Generation:
        with located(f"an answer of {server.url}"):
            tokens, logprobs = _tokens(_meta(result), self.vocabulary)
            ended = bool(tokens.size) and tokens[-1] == self.end
            if not ended and tokens.size != request.max_new:
                raise InputError(
                    f"it has {tokens.size} of {request.max_new} tokens and does not end with token {self.end}: the "
                    "server stops at others, too; take them out of its generation_config.json"
                )
            sequence = sequence_of_result(result, self.model)
            wanted = (request.tokens.size, request.tokens.size + tokens.size)
            if (sequence.prompt_length, sequence.num_tokens) != wanted:
                raise InputError(
                    f"it says that the prompt has {sequence.prompt_length} tokens and all of it {sequence.num_tokens}, "
                    f"and they have {wanted[0]} and {wanted[1]}"
                )
            return Generation(
                tokens=tokens, logprobs=logprobs, experts=sequence.experts(), ended=bool(ended),
                version=_version(_meta(result)),
            )  # fmt: skip


def _update(server: Server, folder: Path, version: int) -> None:
    body = {"model_path": str(folder), "weight_version": str(version)}
    said = server.post("/update_weights_from_disk", body, max_bytes=SMALL_BYTES)
    if not isinstance(said, Mapping) or said.get("success") is not True:
        raise InputError(f"{server.url} did not take the weights in {folder}: {said!r:.300}")


def _meta(result: object) -> Mapping[str, Any]:
    meta = result.get("meta_info") if isinstance(result, Mapping) else None
    if not isinstance(meta, Mapping):
        raise InputError(f"an answer of SGLang has a table meta_info, and this is {result!r:.80}")
    return meta


def _version(meta: Mapping[str, Any]) -> int | None:
    """Of the weights that the server answered with; servers before weight_version say nothing."""
    said = meta.get("weight_version")
    if said is None:
        return None
    return int(said) if str(said).isdecimal() else UNKNOWN


def _tokens(meta: Mapping[str, Any], vocabulary: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """New tokens and their log-probabilities, from [log-probability, token, text] each."""
    said = meta.get("output_token_logprobs")
    if not isinstance(said, list) or not all(isinstance(one, list) and len(one) >= 2 for one in said):
        raise InputError("it has no output_token_logprobs: a list of [log-probability, token, text] is needed")
    for logprob, token, *_ in said:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise InputError(f"tokens must be from 0 to {vocabulary - 1}, not {token!r:.40}: is it the right model?")
        if type(logprob) not in (int, float) or not math.isfinite(logprob):
            raise InputError(f"log-probabilities must be finite numbers, not {logprob!r:.40}")
    return np.array([one[1] for one in said], np.int64), np.array([one[0] for one in said], np.float64)
