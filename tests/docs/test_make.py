"""What the Makefile would install, and what it says before: nothing is installed here."""

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.conftest import REPOSITORY

if shutil.which("make") is None:
    pytest.skip("there is no make", allow_module_level=True)


def made(*words: str) -> str:
    done = subprocess.run(
        ["make", "--no-print-directory", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def installs(*words: str) -> list[str]:
    """What pip is told in an environment that is not there yet."""
    lines = made("-n", *words, "VENV=nowhere").replace("\\\n", " ").splitlines()
    return [line.partition("--constraint constraints.txt ")[2] for line in lines if "pip install" in line]


def test_running_installs_what_running_needs():
    assert installs("run") == ["--editable '.[train]'"]
    assert any(".[dev]" in line for line in installs("setup")), "the control: the tests need more"


def test_the_documentation_needs_no_torch_and_the_tests_build_it():
    assert installs("docs") == ["--editable '.[docs]'"]
    assert "mkdocs build --strict" in made("-n", "test", "VENV=nowhere")


def test_torch_for_cpus_comes_from_its_own_index_and_nothing_else_does():
    first, *others = installs("setup", "TORCH=cpu")
    assert first == "--no-deps --index-url https://download.pytorch.org/whl/cpu torch"
    assert others
    assert not any("--index-url" in line for line in [*others, *installs("setup")])


def test_the_cost_is_said_and_the_way_around_it_where_there_is_no_gpu():
    has_gpu = any(Path("/dev").glob("nvidia*")) or shutil.which("nvidia-smi") is not None
    assert "GB to download" in made("notice")
    assert ("make run TORCH=cpu" in made("notice")) is not has_gpu
    assert "no GPU" not in made("notice", "TORCH=cpu")
