"""Tests that need a GPU; without one they are skipped with a reason."""

import pytest


def pytest_collection_modifyitems(items):
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu/" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="there is no GPU"))
