"""A server that speaks the format of vLLM 0.30 and answers with the embedded engine, so that its routing is real."""

import base64
import io
from typing import Any

import numpy as np
from tests.references.sglang_server import Served, noise_of

from equilibra.rl.engine import Request


class ServedVLLM(Served):
    """The model behind a server with --tokens-only, in development mode, with our worker extension."""

    def __init__(self) -> None:
        super().__init__()
        self.number = "0.30.0"
        self.closed: set[str] = set()
        """addresses that it does not have"""

    def routes(self):
        routes = {
            "/version": lambda _: {"version": self.number},
            "/weight_info": lambda _: {"weight_version": self.version},
            "/reset_prefix_cache": lambda _: {"success": True},
            "/update_weight_version": self.rename,
            "/collective_rpc": self.call,
            "/inference/v1/generate": self.answer,
        }
        return {path: act for path, act in routes.items() if path not in self.closed}

    def rename(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version = body["new_version"]
        return {"success": True, "new_version": self.version}

    def call(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["method"] == "equilibra_load"
        self.update({"model_path": body["kwargs"]["folder"]})
        return {"results": [None]}

    def answer(self, body: dict[str, Any]) -> Any:
        asked = body["sampling_params"]
        assert (asked["n"], asked["logprobs"], asked["ignore_eos"], asked["detokenize"]) == (1, 0, True, False)
        assert self.replica is not None
        self.asked += 1
        self.replica.end = asked["stop_token_ids"][0]
        request = Request(tokens=np.array(body["token_ids"]), noise=noise_of(asked["seed"], asked["max_tokens"]))
        (said,) = self.replica.generate([request], temperature=asked["temperature"])
        full = np.zeros((len(said.experts), self.replica.folder.config.num_hidden_layers, said.experts.shape[2]), "u1")
        full[:, list(self.replica.blocks)] = said.experts
        file = io.BytesIO()
        np.save(file, full)
        content = [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(said.tokens.tolist(), said.logprobs.tolist(), strict=True)
        ]
        choice = {
            "index": 0, "logprobs": {"content": content}, "finish_reason": "stop" if said.ended else "length",
            "token_ids": said.tokens.tolist(), "routed_experts": base64.b64encode(file.getvalue()).decode(),
        }  # fmt: skip
        usage = {"prompt_tokens": request.tokens.size, "completion_tokens": said.tokens.size}
        response = {"request_id": "0", "choices": [choice], "usage": usage, "prompt_token_ids": None}
        return self.spoil([response])[0]
