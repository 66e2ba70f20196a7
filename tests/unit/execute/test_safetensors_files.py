"""What stands beside exported weights, and what an import reads first."""

import json

import pytest

from equilibra.core.errors import InputError
from equilibra.execute.state.safetensors import write_others


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    write_others(tmp_path, {"config.json": b"{}", "notes.txt": b"two"})
    assert (tmp_path / "notes.txt").read_bytes() == b"two"
    assert json.loads((tmp_path / "config.json").read_bytes()) == {}
    with pytest.raises(InputError, match=r"cannot write .*missing/config.json"):
        write_others(tmp_path / "missing", {"config.json": b"{}"})
