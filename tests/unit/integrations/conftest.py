"""A small model folder and its weights, which tests of rollout engines share."""

import pytest
import torch
from tests.references.hf_models import small_config

from equilibra.integrations.hf import Replica, open_model_folder

END = 17


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small Qwen3-MoE with a dense layer in the middle."""
    folder = tmp_path_factory.mktemp("model")
    config = small_config("qwen3_moe")
    config.initializer_range = 0.08
    config.save_pretrained(folder)
    return open_model_folder(folder)


@pytest.fixture(scope="module")
def weights(model):
    torch.manual_seed(3)
    source = Replica(model, dtype=torch.float64, device=torch.device("cpu"), end=END, pad=0)
    return {name: value.clone() for name, value in source._tensor_of_name.items()}
