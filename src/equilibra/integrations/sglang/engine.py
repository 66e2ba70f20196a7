"""A rollout engine that asks SGLang servers over HTTP.

    python -m sglang.launch_server --model-path MODEL --enable-return-routed-experts

Every rank asks one of the servers, whole batches at a time. After an update world rank 0 writes the weights to a folder
that the servers see, and has each of them load it (`/update_weights_from_disk`); the others wait until that is done.

The noise of a request cannot be handed to a server: it becomes a seed (`sampling_seed`, which SGLang follows under
--enable-deterministic-inference). So runs repeat as far as the server does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import InputError
from equilibra.execute.group import ExpertGroup
from equilibra.integrations.routed.decode import located
from equilibra.integrations.routed.model import RoutedModel
from equilibra.integrations.routed.save import NOTHING
from equilibra.integrations.sglang.http import Server
from equilibra.integrations.sglang.routing import sequence_of_result
from equilibra.integrations.weights_folder import hand_over
from equilibra.rl.engine import Generation, Request, seed_of

__all__ = ["SGLangEngine"]

SMALL_BYTES = 1 << 20
"""of an answer that says only how it went"""
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
    batch: int = 256
    """requests that are sent at the same time"""

    # --- weights ---

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Collective: servers take new weights."""

        def take() -> None:
            for server in self.servers if self.group.world_rank == 0 else ():
                _update(server, self.folder)

        hand_over(self.group, self.folder, weights, self.files, take=take)

    # --- sampling ---

    def generate(self, requests: Sequence[Request], *, temperature: float) -> list[Generation]:
        """Answer all requests, batch by batch."""
        server = self.servers[self.group.world_rank % len(self.servers)]
        done: list[Generation] = []
        for first in range(0, len(requests), self.batch):
            done += self._batch(server, requests[first : first + self.batch], temperature)
        return done

    def _batch(self, server: Server, requests: Sequence[Request], temperature: float) -> list[Generation]:
        asked = [request for request in requests if request.max_new]
        results = self._ask(server, asked, temperature) if asked else []
        if not isinstance(results, list) or len(results) != len(asked):
            raise InputError(f"{server.url} was asked {len(asked)} questions and answered {results!r:.80}")
        if asked and all(_meta(result).get("routed_experts") is None for result in results):
            raise InputError(f"{server.url}: {NOTHING}")
        answers = iter(results)
        shape = (len(self.model.moe_layers), self.model.top_k)
        return [self._read(server, request, next(answers)) if request.max_new else request.unanswered(shape)
                for request in requests]  # fmt: skip

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
        per_row = math.ceil(4 * self.model.num_layers * self.model.top_k * 4 / 3) + BYTES_PER_TOKEN
        rows = sum(request.tokens.size + request.max_new for request in requests)
        return server.post("/generate", body, max_bytes=SMALL_BYTES * len(requests) + rows * per_row)

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
            return Generation(tokens=tokens, logprobs=logprobs, experts=sequence.experts(), ended=bool(ended))


def _update(server: Server, folder: Path) -> None:
    said = server.post("/update_weights_from_disk", {"model_path": str(folder)}, max_bytes=SMALL_BYTES)
    if not isinstance(said, Mapping) or said.get("success") is not True:
        raise InputError(f"{server.url} did not take the weights in {folder}: {said!r:.300}")


def _meta(result: object) -> Mapping[str, Any]:
    meta = result.get("meta_info") if isinstance(result, Mapping) else None
    if not isinstance(meta, Mapping):
        raise InputError(f"an answer of SGLang has a table meta_info, and this is {result!r:.80}")
    return meta


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
