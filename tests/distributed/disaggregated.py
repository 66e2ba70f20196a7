"""Engines of a small model, and what the embedded one answers."""

from pathlib import Path

import numpy as np
import torch
from tests.references.hf_models import save_small

from equilibra.integrations.hf import Replica, open_model_folder
from equilibra.integrations.hf.disaggregated import pool_model, weights_of_folder
from equilibra.rl.engine import Request
from equilibra.rollout import Pool, PoolSetting

CPU = torch.device("cpu")
END = 1


class Small:
    """A model on disk, some requests, and the embedded engine's answers to them."""

    def __init__(self, family: str, folder: Path, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        save_small(family, folder, dtype=dtype)
        self.folder, self.dtype = open_model_folder(folder), dtype
        random = np.random.default_rng(seed)
        self.requests = [
            Request(tokens=prompt, noise=random.random(random.integers(1, 14)))
            for prompt in (random.integers(2, 300, random.integers(3, 12)) for _ in range(5))
            for _ in range(3)
        ]
        self.embedded = Replica(self.folder, dtype=dtype, device=CPU, end=END, pad=0)
        self.embedded.load_weights(self.weights(), version=4)
        self.answers = self.embedded.generate(self.requests, temperature=1.0)

    def weights(self):
        return weights_of_folder(self.folder, self.dtype)

    def pool(self, *, timeout_s: float = 60.0, **setting) -> Pool:
        model = pool_model(self.folder, dtype=self.dtype, device=CPU, end=END)
        pool = Pool(PoolSetting(**setting), model, timeout_s=timeout_s)
        pool.load_weights(self.weights(), version=4)
        return pool


def same(found, wanted, *, tolerance: float) -> bool:
    """Whether tokens and routing are the same, and log-probabilities to a tolerance."""
    return len(found) == len(wanted) and all(
        one.tokens.tolist() == other.tokens.tolist()
        and np.array_equal(one.experts, other.experts)
        and (one.ended, one.version) == (other.ended, other.version)
        and np.abs(one.logprobs - other.logprobs).max(initial=0.0) < tolerance
        for one, other in zip(found, wanted, strict=True)
    )
