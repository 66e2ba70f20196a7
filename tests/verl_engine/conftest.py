"""Tests here need verl, what it imports, and megatron-core; they say so where one is missing."""

import importlib.util

import pytest

NEEDED = ("verl", "tensordict", "omegaconf", "codetiming", "megatron")


@pytest.fixture(autouse=True)
def verl() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: make setup installs them")
