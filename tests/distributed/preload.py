"""What the fork server loads before the first rank starts."""

import importlib.util
import warnings

import pytest

import equilibra.train.preload
import equilibra.train.worker

__all__ = ["equilibra", "pytest"]

if importlib.util.find_spec("megatron") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron says at length what it does without
        for name in ("models.gpt", "optimizer", "dist_checkpointing"):
            importlib.import_module(f"megatron.core.{name}")
