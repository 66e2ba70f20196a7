"""A rollout engine that asks SGLang servers over HTTP.

    python -m sglang.launch_server --model-path MODEL --enable-return-routed-experts

A server loads new weights from a folder (`/update_weights_from_disk`). It cannot take a request's noise, so the noise
becomes a seed (`sampling_seed`, which SGLang follows under --enable-deterministic-inference): runs are as reproducible
as the server is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equilibra.core.errors import InputError
from equilibra.integrations.routing_formats.decode import located
from equilibra.integrations.served import ServedEngine, Server, check_logprob, check_token
from equilibra.integrations.sglang import meta_info, sequence_of_result
from equilibra.rl.engine import UNKNOWN, Generation, Request, seed_of

__all__ = ["SGLangEngine"]


class SGLangEngine(ServedEngine):
    """Answers prompts with SGLang servers and returns the routing of every token."""

    def update(self, server: Server, version: int) -> None:
        body = {"model_path": str(self.folder), "weight_version": str(version)}
        said = server.post("/update_weights_from_disk", body)
        if not isinstance(said, Mapping) or said.get("success") is not True:
            raise InputError(f"{server.url} did not load the weights in {self.folder}: {said!r:.300}")

    def answers(
        self, server: Server, requests: Sequence[Request], temperature: float, max_bytes: int
    ) -> list[tuple[Generation, bool]]:
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
            sequence = sequence_of_result(result, self.model)
            self.check_length(request, tokens.size, ended=ended, sequence=sequence)
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
    tokens = [check_token(one[1], vocabulary) for one in said]
    return np.array(tokens, np.int64), np.array([check_logprob(one[0]) for one in said], np.float64)
