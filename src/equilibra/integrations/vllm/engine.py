"""vLLM as a rollout engine: inside the training processes, one `vllm.LLM` per rank, or as servers behind HTTP.

In the processes, vLLM starts when the first weights arrive, from the folder that carries them; later ones are loaded
into the live model (`worker.py`). The CPU build keeps weights packed, where an update can go wrong in silence. So there
the first update is compared with a fresh start on the same weights: if log-probs of a probe differ by more than
rounding, every update starts vLLM anew. Ranks are daemonic and may not have children, so the engine core runs in the
rank's process unless VLLM_ENABLE_V1_MULTIPROCESSING says otherwise. On GPUs it was run only with a stand-in of the same
interface.

A server is started with

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL --tokens-only \
        --enable-return-routed-experts --logprobs-mode processed_logprobs \
        --worker-extension-cls equilibra.integrations.vllm.worker.WeightUpdate

Tokens go in and out of `/inference/v1/generate`, one request per POST; vLLM batches them. New weights go through
`/collective_rpc` to the worker extension, then the prefix cache is emptied and the server is told the version
(`/update_weight_version`). A server that was restarted has forgotten it, which `/weight_info` shows after every batch.

Log-probs are at the sampling temperature (`processed_logprobs`). A request's noise becomes its seed: runs are as
reproducible as vLLM is.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import InputError
from equilibra.execute.group import ExpertGroup
from equilibra.integrations.routing_formats import NOTHING, RoutedModel, located, table_in
from equilibra.integrations.served import ServedEngine, Server, hand_over
from equilibra.integrations.vllm import sequences_of_outputs, sequences_of_response
from equilibra.rl.engine import UNKNOWN, Generation, Request, seed_of
from equilibra.rl.mismatch import mismatch_limit, unit_roundoff

logger = logging.getLogger(__name__)

EXTENSION = "equilibra.integrations.vllm.worker.WeightUpdate"
"""vLLM's `worker_extension_cls`, which puts new weights into live models"""
START = (
    "start it with VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL --tokens-only "
    f"--enable-return-routed-experts --logprobs-mode processed_logprobs --worker-extension-cls {EXTENSION}, in an "
    "environment that has equilibra"
)
OLDEST, OLDEST_ON_CPUS, NEWEST = (0, 28), (0, 30), (0, 30)
OURS = frozenset(
    {"model", "dtype", "skip_tokenizer_init", "enable_return_routed_experts", "logprobs_mode", "worker_extension_cls"}
)
"""settings of vllm.LLM that the run decides"""
ON_CPUS = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
"""defaults of the CPU build: compiling takes minutes, and its cache would take most of the machine's memory"""
PROBES, PROBE_TOKENS = 4, 64


def import_vllm() -> Any:  # noqa: ANN401 - vLLM has its own types
    """Import vLLM for use inside a training rank, or say which one must be installed."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # read on import; ranks may not have children
    try:
        library = import_module("vllm")
        import_module("vllm.platforms")
    except ImportError as error:
        raise InputError(
            f"rollout.engine vllm needs vLLM, which is not installed ({error}): install it, or choose another engine"
        ) from error
    check_version(str(getattr(library, "__version__", "unknown")), cpu=library.platforms.current_platform.is_cpu())
    return library


def check_version(version: str, *, cpu: bool = False) -> None:
    """Refuse a vLLM that these integrations do not fit. cpu: whether it is the CPU build."""
    found = re.match(r"(\d+)\.(\d+)\.", version)
    number = (int(found[1]), int(found[2])) if found else (0, 0)
    if number > NEWEST:
        reason = "since 0.31 it returns routed experts only under Model Runner V2, with which this was never run"
    elif number < OLDEST:
        reason = "its interface for new weights is another one"
    elif cpu and number < OLDEST_ON_CPUS:
        reason = "before 0.30 its CPU build cannot return routed experts"
    else:
        return
    raise InputError(f"vLLM {version} is not supported: {reason}; install 0.30 (on GPUs 0.28 or 0.29 will do too)")


def sampling_of(request: Request, *, temperature: float, end: int) -> dict[str, Any]:
    """Sampling parameters of a request, as vLLM names them. end: token that ends an answer."""
    return {
        "n": 1, "temperature": temperature, "max_tokens": request.max_new, "seed": seed_of(request), "logprobs": 0,
        "stop_token_ids": [end], "ignore_eos": True, "detokenize": False,
    }  # fmt: skip


class VLLMEngine:
    """Answers prompts with vLLM and returns the routing of every token."""

    def __init__(
        self, group: ExpertGroup, model: RoutedModel, *, end: int, vocabulary: int, max_tokens: int, folder: Path,
        files: Mapping[str, bytes], dtype: str, options: Mapping[str, Any], load: Callable[[], Any] = import_vllm,
    ) -> None:  # fmt: skip
        """Prepare everything; vLLM itself starts with the first weights.

        end: token that ends an answer. max_tokens: of the longest prompt with its answer. folder: carries the weights,
        on a file system that all ranks share. files: config.json and the tokenizer's. options: further settings of
        vllm.LLM.
        """
        taken = sorted(OURS & options.keys())
        if taken:
            raise InputError(f"{', '.join(taken)} cannot be settings of vLLM here: the run decides them; remove them")
        self.group, self.model, self.end, self.folder, self.files = group, model, end, folder, files
        self.vocabulary = vocabulary
        self._library = load()
        self.packs = bool(self._library.platforms.current_platform.is_cpu())
        """whether vLLM keeps weights packed, as its CPU build does"""
        self._settings = {
            **(ON_CPUS if self.packs else {}), "max_model_len": max_tokens, **options, "model": str(folder),
            "dtype": dtype, "skip_tokenizer_init": True, "enable_return_routed_experts": True,
            "logprobs_mode": "processed_logprobs", "worker_extension_cls": EXTENSION,
        }  # fmt: skip
        self.in_place: bool | None = None if self.packs else True
        """whether updates reach the live model; None: not yet known"""
        self._llm: Any = None
        self._version: int | None = None

    @property
    def roundoff(self) -> float:
        """Unit roundoff of the model's type on vLLM's device."""
        return unit_roundoff(getattr(torch, self._settings["dtype"]), "cpu" if self.packs else "cuda")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int = 0) -> None:
        """Collective: start vLLM with these weights, or load them into the live model."""
        known = self.in_place is not None
        hand_over(self.group, self.folder, weights, self.files, take=self._take)
        if not known and self.in_place is not None:  # starting vLLM is collective: all ranks do, or none
            said = self.group.gather(np.array([self.in_place]), what="comparing vLLM's updates on all ranks")
            self.in_place = bool(np.concatenate(said).all())
        self._version = version

    def _take(self) -> None:
        if self._llm is None or self.in_place is False:
            self._start()
            return
        self._llm.collective_rpc("equilibra_load", kwargs={"folder": str(self.folder)})
        self._llm.reset_prefix_cache()  # computed with the old weights
        if self.in_place is None:
            self._verify()

    def _start(self) -> None:
        self._llm = None  # free its memory before the next one starts
        self._llm = self._library.LLM(**self._settings)

    def _verify(self) -> None:
        """Compare the updated model with a fresh start on the same weights, once."""
        updated = self._probe()
        self._start()
        apart = float(np.abs(updated - self._probe()).mean())
        limit = mismatch_limit([self.roundoff], num_layers=self.model.num_layers, temperature=1.0)
        self.in_place = apart <= limit
        if not self.in_place:
            logger.warning(
                "vLLM does not take new weights while it runs (log-probabilities differ by %.2g from a fresh start, "
                "rounding explains %.2g): every update starts it anew", apart, limit,
            )  # fmt: skip

    def _probe(self) -> NDArray[np.float64]:
        """Log-probs of fixed prompts, all tokens of a small vocabulary among them."""
        size = min(PROBE_TOKENS, self._settings["max_model_len"] - 1)
        tokens = np.arange(PROBES * size).reshape(PROBES, size) % self.vocabulary
        settings = self._library.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt.tolist()} for prompt in tokens], settings, use_tqdm=False
        )
        return np.array([
            said[token].logprob
            for prompt, output in zip(tokens.tolist(), outputs, strict=True)
            for token, said in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        ])  # fmt: skip

    def generate(self, requests: Sequence[Request], *, temperature: float) -> list[Generation]:
        asked = [request for request in requests if request.max_new]
        prompts = [{"prompt_token_ids": request.tokens.tolist()} for request in asked]
        settings = [
            self._library.SamplingParams(**sampling_of(request, temperature=temperature, end=self.end))
            for request in asked
        ]
        outputs = list(self._llm.generate(prompts, settings, use_tqdm=False)) if asked else []
        if len(outputs) != len(asked) or any(len(output.outputs) != 1 for output in outputs):
            raise InputError(f"vLLM must answer each of {len(asked)} requests once; it gave {len(outputs)} outputs")
        if asked and all(output.outputs[0].routed_experts is None for output in outputs):
            raise InputError(f"vLLM: {NOTHING}")
        sequences = sequences_of_outputs(outputs, self.model)
        answers = iter([
            self._generation(request, output.outputs[0], sequence.experts())
            for request, output, sequence in zip(asked, outputs, sequences, strict=True)
        ])  # fmt: skip
        shape = len(self.model.moe_layers), self.model.top_k
        return [next(answers) if request.max_new else request.unanswered(shape) for request in requests]

    def _generation(self, request: Request, answer: Any, experts: NDArray[np.int32]) -> Generation:  # noqa: ANN401
        tokens = np.array(answer.token_ids, np.int64)
        ended = bool(tokens.size) and bool(tokens[-1] == self.end)
        if answer.logprobs is None or len(answer.logprobs) != tokens.size:
            raise InputError(f"vLLM gave {tokens.size} tokens but log-probs of {len(answer.logprobs or ())}")
        if not ended and tokens.size != request.max_new:
            raise InputError(
                f"vLLM stopped after {tokens.size} of {request.max_new} tokens, not at end token {self.end}: finish "
                f"reason {answer.finish_reason!r} ({answer.stop_reason!r})"
            )
        pairs = zip(answer.logprobs, tokens.tolist(), strict=True)
        logprobs = np.array([chosen[token].logprob for chosen, token in pairs], np.float64)
        return Generation(tokens=tokens, logprobs=logprobs, experts=experts, ended=ended, version=self._version)


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

    def answers(self, requests: Sequence[Request], temperature: float, max_bytes: int) -> list[tuple[Generation, bool]]:
        (request,) = requests
        body = {
            "token_ids": request.tokens.tolist(),
            "sampling_params": sampling_of(request, temperature=temperature, end=self.end),
        }
        try:
            said = self.server.post("/inference/v1/generate", body, max_bytes=max_bytes)
        except InputError as error:
            raise InputError(f"{error}: {START}" if "refused: 404" in str(error) else str(error)) from error
        with located(f"an answer of {self.server.url}"):
            return [self._read(request, said)]

    def _read(self, request: Request, said: object) -> tuple[Generation, bool]:
        choices = said.get("choices") if isinstance(said, Mapping) else None
        if not isinstance(said, Mapping) or not isinstance(choices, list) or len(choices) != 1:
            raise InputError(f"it must have one choice, not {said!r:.80}")
        choice, table = choices[0], choices[0] if isinstance(choices[0], Mapping) else {}
        tokens, content = table.get("token_ids"), table_in(table, "logprobs").get("content")
        if not isinstance(tokens, list) or not isinstance(content, list) or len(tokens) != len(content):
            raise InputError(f"it must have token_ids and as many logprobs, not {choice!r:.80}")
        (sequence,) = sequences_of_response(said, self.model)
        logprobs = [one.get("logprob") if isinstance(one, Mapping) else None for one in content]
        answer = self.generation(request, tokens, logprobs, sequence)
        return answer, table.get("routed_experts") is not None
