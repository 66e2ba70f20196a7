"""What the fork server loads before the first rank starts."""

import importlib.util
import warnings
from pathlib import Path

import pytest

import equilibra.train.preload
import equilibra.train.worker

__all__ = ["equilibra", "pytest"]

HAS_GPU = any(Path("/dev").glob("nvidia*"))
"""Megatron's modules ask CUDA for the GPU; processes forked after that cannot use it"""

if importlib.util.find_spec("megatron") is not None and not HAS_GPU:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron says at length what it does without
        for name in ("models.gpt", "optimizer", "dist_checkpointing"):
            importlib.import_module(f"megatron.core.{name}")
