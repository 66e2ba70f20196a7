"""A rollout engine that asks vLLM servers over HTTP.

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL --tokens-only \
        --enable-return-routed-experts --logprobs-mode processed_logprobs \
        --worker-extension-cls equilibra.integrations.vllm.worker.WeightUpdate

Tokens go in and out of `/inference/v1/generate`, one request per POST; vLLM batches them. New weights go through
`/collective_rpc` to the worker extension, then the prefix cache is emptied and the server is told the version
(`/update_weight_version`). A server that was restarted has forgotten it, which `/weight_info` shows after every batch.
A request's noise becomes its seed: runs are as reproducible as vLLM is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from equilibra.core.errors import InputError
from equilibra.integrations.routing_formats.decode import located
from equilibra.integrations.served import ServedEngine, Server, check_logprob, check_token
from equilibra.integrations.vllm import sequences_of_response
from equilibra.integrations.vllm.interface import EXTENSION, check_version, sampling_of
from equilibra.rl.engine import UNKNOWN, Generation, Request

__all__ = ["VLLMServerEngine"]

START = (
    "start it with VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL --tokens-only "
    f"--enable-return-routed-experts --logprobs-mode processed_logprobs --worker-extension-cls {EXTENSION}, in an "
    "environment that has equilibra"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class VLLMServerEngine(ServedEngine):
    """Answers prompts with vLLM servers and returns the routing of every token."""

    batch: int = 1
    """the endpoint takes one request"""
    connections: int = 64

    def update(self, server: Server, version: int) -> None:
        said = server.get("/version")
        if not isinstance(said, Mapping) or not isinstance(said.get("version"), str):
            raise InputError(f"{server.url} is not a vLLM server: /version answered {said!r:.80}")
        check_version(said["version"])
        call = {"method": "equilibra_load", "kwargs": {"folder": str(self.folder)}, "timeout": server.timeout_s}
        try:
            server.post("/collective_rpc", call)
            reset = server.post("/reset_prefix_cache", {})
            server.post("/update_weight_version", {"new_version": str(version)})
        except InputError as error:
            raise InputError(f"{server.url} did not load the weights in {self.folder} ({error}): {START}") from error
        if not isinstance(reset, Mapping) or reset.get("success") is not True:
            raise InputError(
                f"{server.url} still has answers of the old weights in its prefix cache: is another program asking it?"
            )

    def generate(self, requests: Sequence[Request], *, temperature: float) -> list[Generation]:
        """Answer all requests; the version is what the server says after the last one."""
        found = super().generate(requests, temperature=temperature)
        said = self.server.get("/weight_info")
        version = str(said.get("weight_version")) if isinstance(said, Mapping) else ""
        number = int(version) if version.isdecimal() else UNKNOWN
        return [replace(one, version=number) for one in found]

    def answers(
        self, server: Server, requests: Sequence[Request], temperature: float, max_bytes: int
    ) -> list[tuple[Generation, bool]]:
        (request,) = requests
        body = {
            "token_ids": request.tokens.tolist(),
            "sampling_params": sampling_of(request, temperature=temperature, end=self.end),
        }
        try:
            said = server.post("/inference/v1/generate", body, max_bytes=max_bytes)
        except InputError as error:
            raise InputError(f"{error}: {START}" if "refused: 404" in str(error) else str(error)) from error
        with located(f"an answer of {server.url}"):
            return [self._read(request, said)]

    def _read(self, request: Request, said: object) -> tuple[Generation, bool]:
        choices = said.get("choices") if isinstance(said, Mapping) else None
        if not isinstance(said, Mapping) or not isinstance(choices, list) or len(choices) != 1:
            raise InputError(f"it must have one choice, not {said!r:.80}")
        choice, table = choices[0], choices[0] if isinstance(choices[0], Mapping) else {}
        tokens, content = table.get("token_ids"), (table.get("logprobs") or {}).get("content")
        if not isinstance(tokens, list) or not isinstance(content, list) or len(tokens) != len(content):
            raise InputError(f"it must have token_ids and as many logprobs, not {choice!r:.80}")
        numbers = np.array([check_token(token, self.vocabulary) for token in tokens], np.int64)
        logprobs = np.array([check_logprob(one.get("logprob")) for one in content], np.float64)
        ended = bool(numbers.size) and bool(numbers[-1] == self.end)
        (sequence,) = sequences_of_response(said, self.model)
        self.check_length(request, numbers.size, ended=ended, sequence=sequence)
        answer = Generation(tokens=numbers, logprobs=logprobs, experts=sequence.experts(), ended=ended)
        return answer, table.get("routed_experts") is not None
