"""Where routing recordings are: $EQUILIBRA_TRACES, or ../shared/traces beside the repository."""

import gc
import os
import signal
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(REPOSITORY), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
).strip(os.pathsep)
"""processes that tests start find this package `tests` wherever they stand, not one that a framework has installed"""
os.environ.setdefault("OMP_NUM_THREADS", "1")  # where tests share cores, torch's threads would spin
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores Ctrl-C for what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def traces() -> Path:
    folder = Path(os.environ.get("EQUILIBRA_TRACES", REPOSITORY.parent / "shared" / "traces"))
    if not folder.is_dir():
        pytest.skip(f"no routing recordings in {folder}; set EQUILIBRA_TRACES")
    return folder


def pytest_collection_finish() -> None:
    gc.freeze()  # collections during tests need not look at torch and all test modules
