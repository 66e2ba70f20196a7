"""Tests here run whole programs (verl's trainer, Ray, vLLM) in an environment of their own; elsewhere they say so."""

import importlib.util

import pytest

NEEDED = ("vllm", "ray", "verl", "mbridge", "megatron")


@pytest.fixture(autouse=True, scope="session")
def stacks() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed here: `make test-stacks` installs them and runs these tests")
