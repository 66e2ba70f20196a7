"""What the fork server loads before the first rank starts: ranks then load nothing for themselves."""

import gc
import importlib
import importlib.util
import warnings
from pathlib import Path

import pytest

import equilibra.plan.registry
import equilibra.train.preload
import equilibra.train.worker

__all__ = ["equilibra", "pytest"]

HAS_GPU = any(Path("/dev").glob("nvidia*"))
"""Megatron's modules ask CUDA for the GPU; processes forked after that cannot use it"""

for name in ("mini_batches", "rl_runs", "training"):
    importlib.import_module(f"tests.distributed.{name}")
if importlib.util.find_spec("megatron") is not None and not HAS_GPU:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron says at length what it does without
        torch._dynamo.list_backends()  # Megatron compiles functions
        for name in ("models.gpt.gpt_layer_specs", "models.gpt", "optimizer", "dist_checkpointing"):
            importlib.import_module(f"megatron.core.{name}")
        for name in ("gpt_runs", "layer_runs"):
            importlib.import_module(f"tests.megatron_core.{name}")
        importlib.import_module("equilibra.integrations.megatron")
gc.freeze()
