"""A server that speaks SGLang's format and answers with the embedded engine, so that its routing is real.

Noise cannot be sent to a server, only a seed: `Seeded` is the embedded engine with noise drawn from that seed, and must
give the same numbers as the server.
"""

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file
from tests.distributed.rl_runs import run

from equilibra.integrations.hf import Replica, open_model_folder
from equilibra.rl.engine import Request, seed_of
from equilibra.train import build

BUILDING = threading.Lock()
"""transformers builds a model under a default type that all threads share: servers of one process take turns"""


def noise_of(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).random(size)


class Seeded(Replica):
    def generate(self, requests, *, temperature):
        seeded = [Request(tokens=one.tokens, noise=noise_of(seed_of(one), one.max_new)) for one in requests]
        return super().generate(seeded, temperature=temperature)


def run_embedded(config: Any, folder: Path) -> Any:
    """A training run with noise from seeds; called on every rank."""
    with mock.patch.object(build, "Replica", Seeded):
        return run(config, folder)


class Served:
    """The model behind the server, loaded from whatever folder it is told to."""

    def __init__(self) -> None:
        self.replica: Replica | None = None
        self.updates: list[str] = []
        self.asked = 0
        self.posts: list[int] = []
        self.answer_bytes: list[int] = []
        self.version = "default"
        self.lock = threading.Lock()
        self.spoil: Callable[[list[dict[str, Any]]], Any] = lambda results: results

    def routes(self) -> dict[str, Callable[[Any], Any]]:
        """What answers at each address; GET comes with None."""
        return {"/generate": self.generate, "/update_weights_from_disk": self.update}

    def update(self, body: dict[str, Any]) -> dict[str, Any]:
        folder = open_model_folder(body["model_path"])
        index = json.loads((folder.path / "model.safetensors.index.json").read_text())["weight_map"]
        weights = {name: value for file in set(index.values()) for name, value in load_file(folder.path / file).items()}
        assert weights.keys() == index.keys()
        dtype = next(iter(weights.values())).dtype
        with BUILDING:
            self.replica = Replica(folder, dtype=dtype, device=torch.device("cpu"), end=-1, pad=0)
        self.replica.load_weights(weights.items())
        self.updates.append(body["model_path"])
        self.version = body.get("weight_version", "default")
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def generate(self, body: dict[str, Any]) -> Any:
        assert body["return_logprob"] is True
        assert body["return_routed_experts"] is True
        self.asked += len(body["input_ids"])
        self.posts.append(len(body["input_ids"]))
        settings = body["sampling_params"]
        temperature, ends = settings[0]["temperature"], settings[0]["stop_token_ids"]
        assert all((one["top_p"], one["top_k"]) == (1.0, -1) for one in settings)
        assert self.replica is not None
        self.replica.end = ends[0]
        requests = [
            Request(tokens=np.array(tokens), noise=noise_of(one["sampling_seed"], one["max_new_tokens"]))
            for tokens, one in zip(body["input_ids"], settings, strict=True)
        ]
        said = self.replica.generate(requests, temperature=temperature)
        return self.spoil([self._result(request, one) for request, one in zip(requests, said, strict=True)])

    def _result(self, request: Request, said: Any) -> dict[str, Any]:
        assert self.replica is not None
        layers = self.replica.folder.config.num_hidden_layers
        full = np.zeros((len(said.experts), layers, said.experts.shape[2]), np.int32)
        full[:, list(self.replica.blocks)] = said.experts
        reason = {"type": "stop", "matched": int(said.tokens[-1])} if said.ended else {"type": "length"}
        pairs = zip(said.logprobs.tolist(), said.tokens.tolist(), strict=True)
        meta = {
            "id": "0", "finish_reason": reason, "prompt_tokens": request.tokens.size, "cached_tokens": 0,
            "completion_tokens": said.tokens.size, "weight_version": self.version,
            "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
            "routed_experts": base64.b64encode(full.tobytes()).decode(),
        }  # fmt: skip
        return {"text": "", "output_ids": said.tokens.tolist(), "meta_info": meta}


@contextmanager
def sglang_server(served: Served | None = None, port: int = 0) -> Iterator[tuple[str, Served]]:
    """The address of a running server, and what is behind it."""
    served = served or Served()
    with serving(served, port) as url:
        yield url, served


@contextmanager
def serving(served: Served, port: int = 0) -> Iterator[str]:
    """The address of a server with these routes."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(None)

        def do_POST(self):
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, body):
            routes = served.routes()
            with served.lock:
                try:
                    status, answer = (200, routes[self.path](body)) if self.path in routes else (404, {})
                except Exception as error:  # noqa: BLE001 - the client must hear of it
                    status, answer = 400, {"error": {"message": f"{type(error).__name__}: {error}"}}
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            served.answer_bytes.append(len(content))
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
