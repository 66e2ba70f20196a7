"""What the fork server loads before the first rank starts."""

import pytest

import equilibra.train.preload
import equilibra.train.worker

__all__ = ["equilibra", "pytest"]
