"""Memory that ranks of a node share: others find it by process and descriptor, and it never has a name."""

import mmap
import os
from types import SimpleNamespace

import pytest

from equilibra.core.errors import ExecuteError
from equilibra.execute.copies import segment
from equilibra.execute.copies.segment import _open_of_node, create_segment


@pytest.fixture
def made():
    descriptor = create_segment(8192, user="the host path", instead="use the collective path")
    yield descriptor
    os.close(descriptor)


def test_a_segment_has_no_name_from_the_beginning(made):
    assert os.fstat(made).st_size == 8192
    assert os.fstat(made).st_nlink == 0, "a process that is killed now would leave it behind"


def test_another_process_of_the_machine_opens_the_same_memory(made):
    opened = _open_of_node(os.getpid(), made, os.fstat(made).st_ino)
    with mmap.mmap(made, 8192) as mine, mmap.mmap(opened, 8192) as theirs:
        mine[5000] = 7
        assert theirs[5000] == 7
    os.close(opened)


def test_what_is_not_the_segment_is_refused(made):
    with pytest.raises(ExecuteError, match=r"cannot open /proc/\d+/fd/\d+.*it is another file.*ranks_per_node"):
        _open_of_node(os.getpid(), made, os.fstat(made).st_ino + 1)
    with pytest.raises(ExecuteError, match="No such file or directory"):
        _open_of_node(os.getpid(), 999_999, 0)


def test_a_machine_without_shared_memory_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(segment, "SHARED_MEMORY", str(tmp_path / "missing"))
    with pytest.raises(ExecuteError, match=r"cannot make a shared-memory segment in .*missing: No such file"):
        create_segment(8192, user="the host path", instead="use the collective path")


def test_signals_stand_side_by_side():
    signals, stream = segment.Signals.__new__(segment.Signals), SimpleNamespace(cuda_stream=5)
    signals._address = 0x7F08
    found = [signals._arguments(number, 9, stream) for number in range(600)]
    assert [at.value for _, at, *_ in found] == list(range(0x7F08, 0x7F08 + 8 * 600, 8))
    assert {(queue.value, value.value) for queue, _, value, _ in found} == {(5, 9)}
