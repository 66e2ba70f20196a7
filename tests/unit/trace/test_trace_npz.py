import errno
import io
import logging
import pickle
import zipfile

import numpy as np
import pytest

from equilibra.core.errors import InputError, TraceFormatError
from equilibra.trace import open as open_module
from equilibra.trace.open import load_trace, read_npz, write_npz


@pytest.fixture
def plain():
    return {
        "ids": np.arange(24, dtype=np.int64).reshape(6, 2, 2) % 8,
        "offsets": np.array([0, 2, 6]),
        "num_experts": np.array(8),
    }


@pytest.fixture
def save(tmp_path, plain):
    def saved(**changes):
        arrays = {**plain, **changes}
        path = tmp_path / "a.npz"
        np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
        return path

    return saved


def test_what_is_written_is_read(full_trace, tmp_path, same):
    write_npz(full_trace, tmp_path / "a.npz")
    same(read_npz(tmp_path / "a.npz"), full_trace)
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]


def test_numpy_reads_what_is_written(full_trace, tmp_path):
    write_npz(full_trace, tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz", allow_pickle=False) as arrays:
        assert np.array_equal(arrays["ids"], full_trace.ids)
        assert np.array_equal(arrays["offsets"], full_trace.offsets)
        assert int(arrays["num_experts"]) == 16


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.dtype(">i4"), np.int64, np.uint64])
def test_any_integer_type_is_read(save, plain, dtype):
    trace = read_npz(save(ids=plain["ids"].astype(dtype), offsets=plain["offsets"].astype(np.int32)))
    assert trace.ids.dtype == np.uint8
    assert np.array_equal(trace.ids, plain["ids"])


def test_fortran_order_is_read(save, plain):
    assert np.array_equal(read_npz(save(ids=np.asfortranarray(plain["ids"]))).ids, plain["ids"])


def test_minus_one_means_not_recorded(save, plain):
    ids = plain["ids"].copy()
    ids[1] = -1
    recorded = np.array([1, 1, 1, 1, 1, 0])
    assert read_npz(save(ids=ids)).recorded.tolist() == [True, False, True, True, True, True]
    assert read_npz(save(ids=ids, recorded=recorded)).recorded.tolist() == [
        True,
        False,
        True,
        True,
        True,
        False,
    ]


def test_unknown_number_of_experts_is_guessed_and_said(save, caplog):
    with caplog.at_level(logging.WARNING, "equilibra.trace"):
        assert read_npz(save(num_experts=None)).num_experts == 8
    assert "taking 8" in caplog.text
    caplog.clear()
    assert read_npz(save(num_experts=None), num_experts=32).num_experts == 32
    assert caplog.text == ""
    with pytest.raises(TraceFormatError, match="8 experts, not of the 32"):
        load_trace(save(), num_experts=32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": None}, "must hold the arrays ids"),
        ({"offsets": None}, "must hold the arrays ids"),
        ({"ids": np.zeros((6, 2, 2))}, "whole numbers"),
        ({"ids": np.full((6, 2, 2), np.nan)}, "whole numbers"),
        ({"ids": np.zeros((6, 2, 2), dtype=np.bool_)}, "whole numbers"),
        ({"ids": np.zeros((6, 4), dtype=np.int8)}, r"\[tokens, layers, k\]"),
        ({"ids": np.zeros((0, 2, 2), dtype=np.int8), "offsets": np.array([0])}, "all > 0"),
        ({"ids": np.full((6, 2, 2), 8)}, "8 is out of range"),
        ({"ids": np.full((6, 2, 2), 2**40)}, "out of range"),
        ({"ids": np.full((6, 2, 2), -2)}, "-2 is out of range"),
        ({"ids": np.full((6, 2, 2), None)}, "Python objects"),
        ({"offsets": np.array([0.0, 6.0])}, "offsets must be whole numbers"),
        ({"offsets": np.array([[0, 6]])}, "offsets must be whole numbers"),
        ({"offsets": np.array([0, 2**63], dtype=np.uint64)}, "fit int64"),
        ({"offsets": np.array([0, 5])}, "from 0 to 6"),
        ({"offsets": np.array([0, 2**63 - 1, -(2**63), -(2**62), 0, 6])}, "offsets must grow"),  # differences wrap
        ({"num_experts": np.array([8, 8])}, "one whole number"),
        ({"num_experts": np.array(8.5)}, "one whole number"),
        ({"num_experts": np.array(-8)}, "num_experts must be"),
        ({"num_experts": np.array(2**40)}, "num_experts must be"),
        ({"recorded": np.ones(5, dtype=np.bool_)}, "6 tokens need"),
        ({"segment_offsets": np.array([0, 6])}, "must come together"),
    ],
)
def test_what_cannot_be_a_trace_is_refused(save, changes, message):
    read_npz(save())
    with pytest.raises(TraceFormatError, match=message):
        read_npz(save(**changes))


def test_what_is_no_archive_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    with pytest.raises(TraceFormatError, match="No such file"):
        read_npz(path)
    for content in (b"", b"PK", b"hello", pickle.dumps({"ids": 1})):
        path.write_bytes(content)
        with pytest.raises(TraceFormatError, match="not a readable"):
            read_npz(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(TraceFormatError, match="directory"):
        read_npz(path)


def test_every_truncation_is_refused(save):
    path = save()
    content = path.read_bytes()
    for size in range(0, len(content), 7):
        path.write_bytes(content[:size])
        with pytest.raises(TraceFormatError):
            read_npz(path)


def test_a_flipped_bit_is_noticed_or_harmless(full_trace, tmp_path, same):
    path = tmp_path / "a.npz"
    write_npz(full_trace, path)
    content = path.read_bytes()
    noticed = 0
    for at in range(0, len(content), 3):
        broken = bytearray(content)
        broken[at] ^= 1 << (at % 8)
        path.write_bytes(broken)
        try:
            trace = read_npz(path)
        except TraceFormatError:
            noticed += 1
        else:
            assert np.array_equal(trace.ids, full_trace.ids)
            assert np.array_equal(trace.offsets, full_trace.offsets)
    assert noticed > len(content) // 3 // 2


def header(shape, dtype="<i8"):
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


@pytest.mark.parametrize("shape", [(10**12, 48, 8), (6, 2, 3), (5, 2, 2), (2**62, 2, 2), (-6, 2, 2)])
def test_a_header_that_lies_allocates_nothing(tmp_path, plain, shape):
    path = tmp_path / "a.npz"
    np.savez(path, offsets=plain["offsets"])
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("ids.npy", header(shape) + plain["ids"].tobytes())
    with pytest.raises(TraceFormatError, match="says it is"):
        read_npz(path)


DAMAGED_HEADERS = ("{'descr': (), 'fortran_order': False, 'shape': (6, 2, 2), }", "(((", "{1: 2, 'a': 3}", "{{}: 1}")


@pytest.mark.parametrize("text", DAMAGED_HEADERS)
def test_a_damaged_header_is_refused(tmp_path, plain, text):
    path, header = tmp_path / "a.npz", text.encode().ljust(117) + b"\n"
    np.savez(path, offsets=plain["offsets"])
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("ids.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(TraceFormatError, match="not a readable"):
        read_npz(path)


def test_a_member_of_another_name_is_not_taken_for_an_array(tmp_path, plain):
    path = tmp_path / "a.npz"
    np.savez(path, offsets=plain["offsets"])
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("ids", header((6, 2, 2)) + plain["ids"].tobytes())
    with pytest.raises(TraceFormatError, match="must hold the arrays ids"):
        read_npz(path)


def test_an_archive_that_explodes_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, ids=np.zeros((4000, 48, 8), dtype=np.uint8), offsets=np.array([0, 4000]), num_experts=8)
    assert read_npz(path).num_tokens == 4000
    monkeypatch.setattr(open_module, "BOMB_BYTES", 1 << 20)
    with pytest.raises(TraceFormatError, match="no recording does"):
        read_npz(path)


def test_nothing_is_overwritten_unasked(full_trace, tmp_path, same):
    path = tmp_path / "a.npz"
    path.write_text("precious")
    with pytest.raises(InputError, match="it exists"):
        write_npz(full_trace, path)
    assert path.read_text() == "precious"
    write_npz(full_trace, path, overwrite=True)
    same(read_npz(path), full_trace)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_an_interrupted_write_leaves_things_as_they_were(full_trace, tmp_path, monkeypatch, error):
    (tmp_path / "a.npz").write_text("precious")

    def fail(_):
        raise error

    monkeypatch.setattr(open_module, "index_arrays", fail)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else InputError):
        write_npz(full_trace, tmp_path / "a.npz", overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]
    assert (tmp_path / "a.npz").read_text() == "precious"
