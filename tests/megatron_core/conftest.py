"""Tests here need megatron-core; they say so where it is missing."""

import importlib.util

import pytest


@pytest.fixture(autouse=True)
def megatron() -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: make setup installs it")
