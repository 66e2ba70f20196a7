"""The embedded rollout engine: a whole transformers model per rank that samples in batches with a KV cache.

Symbols: B requests of a batch, T tokens of the longest prompt, L MoE layers, K experts per token.

Requests with the same prompt share its prefill. Prompts are padded on the left, so that all answers grow in one column;
finished requests leave the batch once they are half of it. The experts of every processed token are recorded. Each
request brings its own noise, so up to rounding its answer does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from equilibra.core.errors import InputError
from equilibra.execute.experts import Activation, expert_math
from equilibra.execute.kernels import ExpertParts
from equilibra.execute.state.published import Naming
from equilibra.integrations.hf.families import moe_layers
from equilibra.integrations.hf.folder import ModelFolder, dense_weights
from equilibra.rl.engine import Generation, Request
from equilibra.rl.mismatch import unit_roundoff
from equilibra.rollout.scheduler import draw

EXPERTS = "equilibra-plain"
"""our implementation of experts for sampling: one matrix product per expert, in any floating-point type"""


class Replica:
    """Samples answers on one rank and returns the routing of every token."""

    def __init__(
        self, folder: ModelFolder, *, dtype: torch.dtype, device: torch.device, end: int, pad: int, batch: int = 256
    ) -> None:
        """Build the model; `load_weights` fills it. end, pad: tokens. batch: most requests answered at a time."""
        self.folder, self.device, self.end, self.pad, self.batch = folder, device, end, pad, batch
        self.model = folder.build(dtype).to(device).eval().requires_grad_(requires_grad=False)
        # transformers' own `grouped_mm` lacks float64, and its `eager` is slow; gpt-oss keeps experts transposed
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
        self.model.set_experts_implementation("eager" if folder.family.returns_scores else EXPERTS)
        self.blocks = {number: layer.mlp for number, layer in moe_layers(self.model).items()}
        self.naming: Naming = folder.family.naming_for(list(self.blocks))
        self._tensor_of_name = self._published()
        self.version: int | None = None
        """version of the weights"""
        self._seen: list[Tensor] = []
        """experts of one forward pass, layer by layer"""

    @property
    def roundoff(self) -> float:
        return unit_roundoff(self.model.dtype, self.device.type)

    # --- weights ---

    def _published(self) -> dict[str, Tensor]:
        """Views into the model's parameters, by published name."""
        found, spec, naming = dense_weights(self.model, self.folder, self.blocks), self.folder.spec, self.naming
        for layer, block in enumerate(self.blocks.values()):
            experts = block.experts
            if naming.stacked:  # published as transformers keeps them
                kept = [experts.gate_up_proj, experts.down_proj, experts.gate_up_proj_bias, experts.down_proj_bias]
                found.update(zip(naming.names_of_expert(spec, layer, 0), kept, strict=True))
                continue
            for expert in range(spec.num_experts):
                parts = ExpertParts(experts.gate_up_proj[expert], experts.down_proj[expert])
                found.update((entry.name, entry.value) for entry in naming.entries(spec, layer, expert, parts))
        return found

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int = 0) -> None:
        missing = set(self._tensor_of_name)
        for name, value in weights:
            tensor = self._tensor_of_name.get(name)
            if tensor is None or tensor.shape != value.shape:
                wanted = "no such weight" if tensor is None else f"shape {tuple(tensor.shape)}"
                raise InputError(f"weight {name} came with shape {tuple(value.shape)}, but the engine has {wanted}")
            tensor.copy_(value)
            missing.discard(name)
        if missing:
            raise InputError(f"{len(missing)} weights are missing, among them {min(missing)}: all must come")
        self.version = version

    # --- sampling ---

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], *, temperature: float) -> list[Generation]:
        order = sorted(range(len(requests)), key=lambda i: (requests[i].tokens.size, requests[i].tokens.tobytes()))
        done: dict[int, Generation] = {}
        with self._capture():
            for first in range(0, len(order), self.batch):
                chosen = order[first : first + self.batch]
                answers = self._batch([requests[i] for i in chosen], temperature)
                done.update(zip(chosen, answers, strict=True))
        return [done[i] for i in range(len(requests))]

    @contextmanager
    def _capture(self) -> Iterator[None]:

        def keep(_module: nn.Module, _inputs: object, output: tuple[Tensor, ...]) -> None:
            self._seen.append(output[2])

        routers = [getattr(block, self.folder.family.router) for block in self.blocks.values()]
        hooks = [router.register_forward_hook(keep) for router in routers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _forward(self, tokens_BT: Tensor, mask: Tensor, cache: DynamicCache) -> tuple[Tensor, NDArray[np.int32]]:
        """Logits [B, V] of the last tokens, and experts [B, T, L, K] of all tokens."""
        self._seen.clear()
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens_BT.shape[1] :]
        out = self.model(
            input_ids=tokens_BT, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        experts = torch.stack([seen.view(*tokens_BT.shape, -1) for seen in self._seen], dim=2)
        return out.logits[:, -1], experts.to(torch.int32).cpu().numpy()

    def _batch(self, requests: list[Request], temperature: float) -> list[Generation]:
        """Prefill each distinct prompt once, then decode all answers."""
        prompts, of_request = _distinct(requests)
        longest = max(prompt.size for prompt in prompts)
        tokens = torch.full((len(prompts), longest), self.pad)
        mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - prompt.size :] = torch.from_numpy(prompt)
            mask[row, longest - prompt.size :] = 1
        cache = DynamicCache(config=self.model.config)
        mask = mask.to(self.device)
        logits, experts = self._forward(tokens.to(self.device), mask, cache)
        growing = [_Growing(request, experts[row, longest - request.tokens.size :])
                   for request, row in zip(requests, of_request.tolist(), strict=True)]  # fmt: skip
        rows = torch.from_numpy(of_request).to(self.device)
        cache.batch_select_indices(rows)
        logits, mask, active = logits[rows], mask[rows], list(growing)
        while True:
            chosen, logprobs = draw(logits, [one.next_noise() for one in active], temperature)
            for one, token, logprob in zip(active, chosen.tolist(), logprobs.tolist(), strict=True):
                one.add(token, logprob, self.end)
            going = [row for row, one in enumerate(active) if not one.through]
            if not going:
                return [one.generation(self.version) for one in growing]
            if 2 * len(going) <= len(active):
                kept = torch.tensor(going, device=self.device)
                cache.batch_select_indices(kept)
                mask, chosen, active = mask[kept], chosen[kept], [active[row] for row in going]
            mask = torch.cat([mask, mask.new_ones(len(active), 1)], dim=1)
            logits, experts = self._forward(chosen[:, None], mask, cache)
            for one, of_token in zip(active, experts, strict=True):
                one.processed(of_token)


class _Growing:
    """An unfinished answer; once `through`, it ignores further tokens of its row."""

    def __init__(self, request: Request, experts: NDArray[np.int32]) -> None:
        self.request, self.experts, self.ended = request, [experts], False
        self.tokens: list[int] = []
        self.logprobs: list[float] = []

    @property
    def through(self) -> bool:
        return self.ended or len(self.tokens) == self.request.max_new

    def next_noise(self) -> float:
        return 0.0 if self.through else float(self.request.noise[len(self.tokens)])

    def add(self, token: int, logprob: float, end: int) -> None:
        if not self.through:
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.ended = token == end

    def processed(self, experts: NDArray[np.int32]) -> None:
        if not self.through:
            self.experts.append(experts)

    def generation(self, version: int | None) -> Generation:
        return Generation(
            tokens=np.array(self.tokens, np.int64), logprobs=np.array(self.logprobs, np.float64),
            experts=np.concatenate(self.experts), ended=self.ended, version=version,
        )  # fmt: skip


def _distinct(requests: list[Request]) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """The distinct prompts, and the index of each request's."""
    prompts: dict[bytes, int] = {}
    found = [prompts.setdefault(request.tokens.tobytes(), len(prompts)) for request in requests]
    return [np.frombuffer(raw, np.int64).copy() for raw in prompts], np.array(found, np.int64)


def _experts(module: Any, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:  # noqa: ANN401
    """Weighted sum of every token's experts, without gradients."""
    top_k = experts_TK.shape[-1]
    order = experts_TK.flatten().argsort(stable=True)
    sizes = torch.bincount(experts_TK.flatten(), minlength=len(module.down_proj)).tolist()
    instances = [ExpertParts(g, d) for g, d in zip(module.gate_up_proj, module.down_proj, strict=True)]
    rows_ND, _ = expert_math.forward(Activation.SWIGLU, hidden_TD[order // top_k], sizes, instances)
    results = torch.empty_like(rows_ND)
    results[order] = rows_ND
    results_TKD = results.view(-1, top_k, hidden_TD.shape[-1])
    return (results_TKD * weights_TK.to(results.dtype)[:, :, None]).sum(dim=1)
