"""A rollout engine inside the training processes: one `vllm.LLM` per rank.

vLLM starts when the first weights arrive, from the folder that carries them; later ones are loaded into the live model
(`worker.py`). The CPU build keeps weights packed, where an update can go wrong in silence. So there the first update is
compared with a fresh start on the same weights: if log-probs of a probe differ by more than rounding, every update
starts vLLM anew. Log-probs are at the sampling temperature (`logprobs_mode="processed_logprobs"`). A request's noise
becomes its seed: runs are as reproducible as vLLM is.

Ranks are daemonic and may not have children, so the engine core runs in the rank's process unless
VLLM_ENABLE_V1_MULTIPROCESSING says otherwise. On GPUs it was run only with a stand-in of the same interface.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from equilibra.integrations.vllm.interface import EXTENSION, import_vllm, sampling_of
from equilibra.integrations.weights_folder import hand_over
from equilibra.rl.engine import Generation, Request
from equilibra.rl.mismatch import mismatch_limit, unit_roundoff

__all__ = ["VLLMEngine"]

logger = logging.getLogger(__name__)

OURS = frozenset(
    {"model", "dtype", "skip_tokenizer_init", "enable_return_routed_experts", "logprobs_mode", "worker_extension_cls"}
)
"""settings of vllm.LLM that the run decides"""
ON_CPUS = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
"""defaults of the CPU build: compiling takes minutes, and its cache would take most of the machine's memory"""
PROBES, PROBE_TOKENS = 4, 64


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
            self._library.SamplingParams(**sampling_of(request, temperature=temperature, end=self.end))
            for request in requests
        ]
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
