"""The disaggregated engine with boxes and trays in GPU memory: same answers as the embedded engine on the GPU."""

import numpy as np
import pytest
import torch
from tests.references.hf_models import save_small

from equilibra.integrations.hf import Replica, open_model_folder
from equilibra.integrations.hf.disaggregated import pool_model, weights_of_folder
from equilibra.rl.engine import Request
from equilibra.rollout import Pool, PoolSetting

END = 1


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(("attention", "experts", "micro_batches"), [(1, 1, 1), (2, 2, 3)])
def test_answers_are_those_of_the_embedded_engine(family, attention, experts, micro_batches, tmp_path):
    device = torch.device("cuda", 0)
    save_small(family, tmp_path / "model", dtype=torch.float64)
    folder = open_model_folder(tmp_path / "model")
    random = np.random.default_rng(0)
    requests = [
        Request(tokens=prompt, noise=random.random(random.integers(1, 14)))
        for prompt in (random.integers(2, 300, random.integers(3, 12)) for _ in range(6))
        for _ in range(3)
    ]
    embedded = Replica(folder, dtype=torch.float64, device=device, end=END, pad=0)
    embedded.load_weights(weights_of_folder(folder, torch.float64))
    wanted = embedded.generate(requests, temperature=1.0)
    setting = PoolSetting(attention=attention, experts=experts, micro_batches=micro_batches, kv_tokens=256, places=8)
    with Pool(setting, pool_model(folder, dtype=torch.float64, device=device, end=END), timeout_s=120.0) as pool:
        pool.load_weights(weights_of_folder(folder, torch.float64))
        for _ in range(2):
            found = pool.generate(requests, temperature=1.0)
            for one, other in zip(found, wanted, strict=True):
                assert one.tokens.tolist() == other.tokens.tolist()
                assert np.array_equal(one.experts, other.experts)
                assert np.abs(one.logprobs - other.logprobs).max() < 1e-6
            pool.rebalance()
