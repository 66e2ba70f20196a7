"""A rollout engine inside the training processes: one `vllm.LLM` per rank.

vLLM starts when the first weights arrive, from the folder that carries them, and later reloads from there
(`reload_weights`). Its CPU build repacks weights at start and cannot reload them, so there every update starts a new
`vllm.LLM`. Log-probs are at the sampling temperature (`logprobs_mode="processed_logprobs"`). A request's noise becomes
its seed: runs are as reproducible as vLLM is.

Ranks are daemonic and may not have children, so the engine core runs in the rank's process unless
VLLM_ENABLE_V1_MULTIPROCESSING says otherwise. Run with vLLM 0.30 on CPUs, with one and two ranks; on GPUs only with a
stand-in of the same interface.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equilibra.core.errors import InputError
from equilibra.execute.group import ExpertGroup
from equilibra.integrations.routing_formats.model import RoutedModel
from equilibra.integrations.routing_formats.sequence import NOTHING
from equilibra.integrations.vllm import sequences_of_outputs
from equilibra.integrations.weights_folder import hand_over
from equilibra.rl.engine import Generation, Request, seed_of
from equilibra.rl.mismatch import unit_roundoff

__all__ = ["VLLMEngine", "import_vllm"]

OURS = frozenset({"model", "dtype", "skip_tokenizer_init", "enable_return_routed_experts", "logprobs_mode"})
"""settings of vllm.LLM that the run decides"""


def import_vllm() -> Any:  # noqa: ANN401 - vLLM has its own types
    """Import vLLM, or say that it must be installed."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # vLLM reads it on import
    try:
        return import_module("vllm")
    except ImportError as error:
        raise InputError(f"rollout.engine vllm needs vLLM ({error}): install it, or choose another engine") from error


class VLLMEngine:
    """Answers prompts with vLLM and returns the routing of every token."""

    def __init__(
        self, group: ExpertGroup, model: RoutedModel, *, end: int, folder: Path, files: Mapping[str, bytes], dtype: str,
        options: Mapping[str, Any], load: Callable[[], Any] = import_vllm,
    ) -> None:  # fmt: skip
        """Prepare everything; vLLM itself starts with the first weights.

        end: token that ends an answer. folder: carries the weights, on a file system that all ranks share.
        files: config.json and the tokenizer's. options: further settings of vllm.LLM.
        """
        taken = sorted(OURS & options.keys())
        if taken:
            raise InputError(f"{', '.join(taken)} cannot be settings of vLLM here: the run decides them; remove them")
        self.group, self.model, self.end, self.folder, self.files = group, model, end, folder, files
        self._settings = {
            **options, "model": str(folder), "dtype": dtype, "skip_tokenizer_init": True,
            "enable_return_routed_experts": True, "logprobs_mode": "processed_logprobs",
        }  # fmt: skip
        self._library = load()
        self._llm: Any = None
        self._version: int | None = None

    @property
    def roundoff(self) -> float:
        """Unit roundoff of the model's type on vLLM's device."""
        return unit_roundoff(getattr(torch, self._settings["dtype"]), "cuda" if torch.cuda.is_available() else "cpu")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int = 0) -> None:
        """Collective: start vLLM with these weights, or reload them."""
        hand_over(self.group, self.folder, weights, self.files, take=self._take)
        self._version = version

    def _take(self) -> None:
        if self._llm is None or self._repacks():
            self._llm = None  # free its memory before the next one starts
            self._llm = self._library.LLM(**self._settings)
            return
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self.folder)})
        self._llm.reset_prefix_cache()  # computed with the old weights

    def _repacks(self) -> bool:
        """Whether vLLM repacks weights at start (its CPU build), so that `reload_weights` has no effect."""
        platform = getattr(getattr(self._library, "platforms", None), "current_platform", None)
        return platform is not None and bool(platform.is_cpu())

    def generate(self, requests: Sequence[Request], *, temperature: float) -> list[Generation]:
        """Answer all requests in one call; vLLM batches them."""
        asked = [request for request in requests if request.max_new]
        outputs = self._ask(asked, temperature) if asked else []
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

    def _ask(self, requests: Sequence[Request], temperature: float) -> list[Any]:
        prompts = [{"prompt_token_ids": request.tokens.tolist()} for request in requests]
        settings = [
            self._library.SamplingParams(
                n=1, temperature=temperature, max_tokens=request.max_new, seed=seed_of(request), logprobs=0,
                stop_token_ids=[self.end], ignore_eos=True, detokenize=False,
            )
            for request in requests
        ]  # fmt: skip
        return list(self._llm.generate(prompts, settings, use_tqdm=False))

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
