"""The folder of a run: never overwritten, never shared, reopened as it was."""

import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime

import pytest

from equilibra.core.errors import InputError
from equilibra.train.config import RunConfig, TrainConfig
from equilibra.train.run_folder import FolderLock, RunFolder, begin_run, default_output, reopen_run

CONFIG = TrainConfig(run=RunConfig(steps=7))


def test_a_new_run_has_its_configuration_and_a_lock(tmp_path):
    folder, lock = begin_run(tmp_path / "a" / "b", CONFIG)
    again, config = reopen_run(folder.path)
    assert (again.path, config) == (folder.path, CONFIG)
    with pytest.raises(InputError, match=rf"in use by another run \(process {os.getpid()} on "):
        FolderLock(folder, patience_s=0)
    lock.close()
    FolderLock(folder, patience_s=0).close()


def test_a_run_is_never_overwritten(tmp_path):
    folder, lock = begin_run(tmp_path / "run", CONFIG)
    lock.close()
    folder.metrics.write_text("{}\n")
    with pytest.raises(InputError, match=r"it holds a run; continue it with equilibra train --resume .*run, or give"):
        begin_run(folder.path, TrainConfig())
    assert reopen_run(folder.path)[1] == CONFIG
    FolderLock(folder, patience_s=0).close()  # the refused one does not hold it


def test_other_folders_and_files_are_not_touched(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(InputError, match="it exists and is not empty"):
        begin_run(tmp_path, CONFIG)
    with pytest.raises(InputError, match="it is a file; give the name of a folder"):
        begin_run(tmp_path / "mine.txt", CONFIG)
    assert (tmp_path / "mine.txt").read_text() == "x"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match=r"cannot write .*: Permission denied"):
        begin_run(tmp_path / "run", CONFIG)


def test_a_path_that_cannot_be_a_folder(tmp_path):
    with pytest.raises(InputError, match=r"cannot write .*: File name too long"):
        begin_run(tmp_path / ("x" * 300), CONFIG)
    with pytest.raises(InputError, match=r"cannot write "):
        begin_run(tmp_path / "file" / "run" if (tmp_path / "file").write_text("") == 0 else tmp_path, CONFIG)


def test_a_run_that_did_nothing_is_taken_again(tmp_path):
    folder, lock = begin_run(tmp_path / "run", TrainConfig())
    lock.close()
    folder.log.write_text("start\n")
    folder.metrics.write_text("")
    folder.checkpoints.mkdir()
    folder, lock = begin_run(tmp_path / "run", CONFIG)
    assert reopen_run(folder.path)[1] == CONFIG
    assert not folder.log.exists()
    lock.close()
    folder.discard_if_worthless()
    assert not folder.path.exists()


def test_what_a_run_did_is_not_thrown_away(tmp_path):
    folder, lock = begin_run(tmp_path / "run", TrainConfig())
    lock.close()
    assert not folder.has_checkpoint
    (folder.checkpoints / "policy" / "step-00000010.ab12.part").mkdir(parents=True)
    assert not folder.has_checkpoint
    (folder.checkpoints / "policy" / "step-00000010").mkdir(parents=True)
    assert folder.has_checkpoint
    folder.discard_if_worthless()
    assert folder.has_checkpoint


def test_only_runs_are_resumed(tmp_path):
    with pytest.raises(InputError, match=r"cannot resume .*: not a folder of equilibra train \(no config\.toml\)"):
        reopen_run(tmp_path)
    (tmp_path / "config.toml").write_text("[rum]\n")
    with pytest.raises(InputError, match=r"config\.toml: unknown section \[rum\]"):
        reopen_run(tmp_path)


def test_the_default_folder_is_named_after_the_time(tmp_path):
    now = datetime(2026, 1, 31, 14, 5, 9, tzinfo=UTC)
    first = default_output(now, tmp_path)
    assert first.name == "2026-01-31-14.05.09"
    first.mkdir()
    assert default_output(now, tmp_path).name == "2026-01-31-14.05.09-2"
    assert re.fullmatch(r"runs/[-0-9.]+", str(default_output(datetime.now(UTC))))


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path):
    folder = RunFolder(path=tmp_path)
    code = (
        "import sys, time; from pathlib import Path; from equilibra.train.run_folder import *; "
        "lock = FolderLock(RunFolder(path=Path(sys.argv[1]))); print('held', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert owner.stdout.readline() == b"held\n"
    began = time.monotonic()
    with pytest.raises(InputError, match=rf"process {owner.pid} on "):
        FolderLock(folder, patience_s=30)
    assert time.monotonic() - began < 5  # a living owner is not waited for
    owner.kill()
    owner.wait()
    owner.stdout.close()
    FolderLock(folder, patience_s=0).close()
