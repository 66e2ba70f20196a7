"""A rollout engine that asks SGLang servers over HTTP.

    python -m sglang.launch_server --model-path MODEL --enable-return-routed-experts

A server loads new weights from a folder (`/update_weights_from_disk`). It cannot take a request's noise, so the noise
becomes a seed (`sampling_seed`, which SGLang follows under --enable-deterministic-inference): runs are as reproducible
as the server is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from equilibra.core.errors import InputError
from equilibra.integrations.routing_formats import located
from equilibra.integrations.served import ServedEngine, Server
from equilibra.integrations.sglang import meta_info, sequence_of_result
from equilibra.rl.engine import UNKNOWN, Generation, Request, seed_of


class SGLangEngine(ServedEngine):
    """Answers prompts with SGLang servers and returns the routing of every token."""

    def update(self, server: Server, version: int) -> None:
        body = {"model_path": str(self.folder), "weight_version": str(version)}
        said = server.post("/update_weights_from_disk", body)
        if not isinstance(said, Mapping) or said.get("success") is not True:
            raise InputError(f"{server.url} did not load the weights in {self.folder}: {said!r:.300}")

    def answers(self, requests: Sequence[Request], temperature: float, max_bytes: int) -> list[tuple[Generation, bool]]:
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
        url, results = self.server.url, self.server.post("/generate", body, max_bytes=max_bytes)
        if not isinstance(results, list) or len(results) != len(requests):
            raise InputError(f"{url} must answer {len(requests)} requests with as many, not {results!r:.80}")
        with located(f"an answer of {url}"):
            return [self._read(request, result) for request, result in zip(requests, results, strict=True)]

    def _read(self, request: Request, result: object) -> tuple[Generation, bool]:
        meta = meta_info(result)
        said = meta.get("output_token_logprobs")
        if not isinstance(said, list) or not all(isinstance(one, list) and len(one) >= 2 for one in said):
            raise InputError("it has no output_token_logprobs: a list of [log-prob, token, text] is required")
        reported = meta.get("weight_version")  # servers before weight_version say nothing
        version = None if reported is None else int(reported) if str(reported).isdecimal() else UNKNOWN
        tokens, logprobs = [one[1] for one in said], [one[0] for one in said]
        answer = self.generation(request, tokens, logprobs, sequence_of_result(result, self.model), version)
        return answer, meta.get("routed_experts") is not None
