import errno
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from equilibra.core.errors import InputError, TraceFormatError
from equilibra.trace import routing, store
from equilibra.trace.count import sequence_loads
from equilibra.trace.routing import PolicySegments, RoutingTrace
from equilibra.trace.store import open_trace, trace_writer, write_trace


@pytest.fixture
def stored(full_trace, tmp_path):
    path = tmp_path / "full.eqtrace"
    write_trace(full_trace, path, shard_bytes=12 * 17)
    return path


def read_all(path, **options):
    return sequence_loads(open_trace(path, **options))


def rewrite(path, change):
    """Change a manifest and sign it again, so that only its content is wrong."""
    file = path / "manifest.json"
    body = json.loads(file.read_text())
    body.pop("sha256")
    change(body)
    body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps(body))


@pytest.mark.parametrize("shard_bytes", [1, 12 * 7, 12 * 50, 1 << 30])
def test_what_is_written_is_read(full_trace, tmp_path, same, shard_bytes, monkeypatch):
    monkeypatch.setattr(routing, "PIECE_BYTES", 12 * 9)
    write_trace(full_trace, tmp_path / "a.eqtrace", shard_bytes=shard_bytes)
    stored = open_trace(tmp_path / "a.eqtrace")
    same(stored.load(), full_trace)
    assert np.array_equal(sequence_loads(stored).tokens_SLE, sequence_loads(full_trace).tokens_SLE)
    assert len(stored.manifest.shards) == -(-50 // max(1, shard_bytes // 12))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.eqtrace"]


def test_a_trace_without_optional_fields(tmp_path, same):
    trace = RoutingTrace(ids=np.ones((2, 1, 1), dtype=np.uint16), offsets=np.array([0, 2]), num_experts=999)
    write_trace(trace, tmp_path / "a.eqtrace")
    same(open_trace(tmp_path / "a.eqtrace").load(), trace)


def test_sequences_can_be_appended_one_by_one(full_trace, tmp_path, same):
    with trace_writer(tmp_path / "a.eqtrace", num_layers=3, top_k=4, num_experts=16, shard_bytes=100) as sink:
        for s, versions in enumerate(([(0, 6), (12, 7)], [(0, 7)], [(0, 7)])):
            tokens = slice(full_trace.offsets[s], full_trace.offsets[s + 1])
            ids = full_trace.ids[tokens]
            starts = [start for start, _ in versions]
            sink.append(
                ids.astype(np.int32),
                recorded=full_trace.recorded[tokens],
                prompt_length=int(full_trace.prompt_length_of_sequence[s]),
                group=int(full_trace.group_of_sequence[s]),
                segments=PolicySegments(
                    offsets=np.array([*starts, len(ids)]),
                    version_of_segment=np.array([v for _, v in versions]),
                ),
            )
    ids = np.where(full_trace.recorded[:, None, None], full_trace.ids, 0)
    clean = RoutingTrace(
        **{name: getattr(full_trace, name) for name in full_trace.__dataclass_fields__ if name != "ids"},
        ids=ids,
    )
    same(open_trace(tmp_path / "a.eqtrace").load(), clean)


def test_what_is_given_for_one_sequence_is_given_for_all(tmp_path):
    def write():
        with trace_writer(tmp_path / "a.eqtrace", num_layers=1, top_k=1, num_experts=2) as sink:
            sink.append(np.zeros((1, 1, 1), dtype=np.int8), group=0)
            sink.append(np.zeros((1, 1, 1), dtype=np.int8))

    with pytest.raises(InputError, match="1 of 2 sequences"):
        write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (np.zeros((3, 1, 2), dtype=np.int8), {}, "a sequence must be"),
        (np.zeros((0, 1, 1), dtype=np.int8), {}, "a sequence must be"),
        (np.zeros((3, 1, 1)), {}, "whole numbers"),
        (np.full((3, 1, 1), 2), {}, "2 is out of range"),
        (np.zeros((3, 1, 1), dtype=np.int8), {"recorded": np.ones(2, dtype=np.bool_)}, "recorded must be"),
        (np.zeros((3, 1, 1), dtype=np.int8), {"prompt_length": 4}, "longer than its sequence"),
        (
            np.zeros((3, 1, 1), dtype=np.int8),
            {"segments": PolicySegments(offsets=np.array([0, 4]), version_of_segment=np.array([0]))},
            "must cover the 3 tokens",
        ),
    ],
)
def test_bad_sequences_leave_nothing_behind(tmp_path, ids, options, message):
    with (
        pytest.raises(InputError, match=message),
        trace_writer(tmp_path / "a.eqtrace", num_layers=1, top_k=1, num_experts=2) as sink,
    ):
        sink.append(ids, **options)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_trace_is_not_written(tmp_path):
    with (
        pytest.raises(InputError, match="empty"),
        trace_writer(tmp_path / "a.eqtrace", num_layers=1, top_k=1, num_experts=2),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
@pytest.mark.parametrize("there", [False, True])
def test_an_interrupted_write_leaves_things_as_they_were(full_trace, tmp_path, monkeypatch, same, error, there):
    path = tmp_path / "a.eqtrace"
    if there:
        write_trace(full_trace, path)

    def fail(_):
        raise error

    monkeypatch.setattr(store, "to_json", fail)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else InputError
    with pytest.raises(expected):
        write_trace(full_trace, path, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == (["a.eqtrace"] if there else [])
    if there:
        same(open_trace(path).load(), full_trace)


def test_a_failed_rename_brings_the_old_trace_back(stored, full_trace, monkeypatch, same):
    rename = Path.rename

    def refuse(self, target):
        if (self / "manifest.json").is_file() and target == stored and ".part" in self.name and not stored.exists():
            monkeypatch.undo()
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(InputError, match="Input/output error"):
        write_trace(full_trace, stored, overwrite=True)
    assert [file.name for file in stored.parent.iterdir()] == [stored.name]
    same(open_trace(stored).load(), full_trace)


def test_nothing_is_overwritten_unasked(stored, full_trace, tmp_path, same):
    small = RoutingTrace(ids=np.ones((2, 1, 1), dtype=np.uint8), offsets=np.array([0, 2]), num_experts=4)
    with pytest.raises(InputError, match="it exists"):
        write_trace(small, stored)
    same(open_trace(stored).load(), full_trace)
    write_trace(small, stored, overwrite=True)
    same(open_trace(stored).load(), small)
    other = tmp_path / "other.eqtrace"
    other.mkdir()
    (other / "precious").write_text("x")
    with pytest.raises(InputError, match="not the same kind of folder"):
        write_trace(small, other, overwrite=True)
    assert (other / "precious").read_text() == "x"


@pytest.mark.parametrize("name", ["a.npz", "a", "missing/a.eqtrace"])
def test_names_that_cannot_be_written(full_trace, tmp_path, name):
    with pytest.raises(InputError, match="cannot write"):
        write_trace(full_trace, tmp_path / name)


@pytest.mark.parametrize(
    "file",
    ["ids-00000.bin", "ids-00002.bin", "offsets.bin", "recorded.bin", "segment_offsets.bin", "manifest.json"],
)
@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "remove", "folder"])
def test_damage_is_noticed(stored, file, damage):
    target = stored / file
    content = bytearray(target.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        target.write_bytes(content)
    elif damage == "truncate":
        target.write_bytes(content[:-2])
    elif damage == "extend":
        target.write_bytes(content + b"}")
    else:
        target.unlink()
        if damage == "folder":
            target.mkdir()
    with pytest.raises(TraceFormatError, match=file if file != "manifest.json" else "manifest"):
        read_all(stored)


def test_checksums_can_be_left_out_but_ids_are_still_checked(stored):
    content = bytearray((stored / "ids-00000.bin").read_bytes())
    content[0] ^= 1
    (stored / "ids-00000.bin").write_bytes(content)
    read_all(stored, verify=False)
    content[0] = 16
    (stored / "ids-00000.bin").write_bytes(content)
    with pytest.raises(TraceFormatError, match=r"ids-00000\.bin: expert id 16 is out of range"):
        read_all(stored, verify=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(version=2), "version 2"),
        (lambda body: body.update(format="other"), "not the manifest"),
        (lambda body: body.pop("num_experts"), "num_experts"),
        (lambda body: body.update(num_experts=-1), "num_experts"),
        (lambda body: body.update(num_experts=True), "num_experts"),
        (lambda body: body.update(num_experts=10**30), "num_experts"),
        (lambda body: body.update(num_experts=300), "does not fit its tokens"),
        (lambda body: body.update(num_experts=3), "4 experts per token"),
        (lambda body: body.update(num_tokens=float("nan")), "num_tokens"),
        (lambda body: body.update(num_tokens=51), "50 tokens, not 51"),
        (lambda body: body.update(num_layers=4), "does not fit its tokens"),
        (lambda body: body.update(shards=[]), "0 tokens"),
        (lambda body: body.update(shards=7), "contradicts itself"),
        (lambda body: body.update(shards=[7]), "contradicts itself"),
        (lambda body: body["shards"].reverse(), "does not follow"),
        (lambda body: body["shards"][0].update(name="../full.eqtrace/ids-00000.bin"), "name must match"),
        (lambda body: body["shards"][0].update(name="/etc/passwd"), "name must match"),
        (lambda body: body["shards"][0].update(name=body["shards"][1]["name"]), "same file"),
        (lambda body: body["shards"][0].update(sha256="0"), "sha256"),
        (lambda body: body["shards"][0].update(num_tokens=-5), "num_tokens"),
        (lambda body: body.update(arrays={}), "offsets are missing"),
        (lambda body: body["arrays"].update(reward=body["arrays"]["offsets"]), "unknown array"),
        (lambda body: body["arrays"].pop("version_of_segment"), "must come together"),
        (lambda body: body["arrays"]["offsets"].update(length=3), "does not fit its 3 elements"),
    ],
)
def test_a_manifest_that_lies_is_refused(stored, change, message):
    rewrite(stored, lambda body: None)
    read_all(stored)
    rewrite(stored, change)
    with pytest.raises(TraceFormatError, match=message):
        read_all(stored)


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, "7", "null", '{"format": 1}', '{"a": ' + "9" * 5000 + "}", "\x00"]
)
def test_a_manifest_that_is_none_is_refused(stored, text):
    (stored / "manifest.json").write_text(text)
    with pytest.raises(TraceFormatError):
        open_trace(stored)


def test_there_must_be_a_folder(tmp_path):
    with pytest.raises(TraceFormatError, match="no such folder"):
        open_trace(tmp_path / "a.eqtrace")


def test_a_large_recording_is_summarised_in_little_memory(tmp_path):
    path = tmp_path / "large.eqtrace"
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 128, size=(20_000, 48, 8), dtype=np.uint8)
    with trace_writer(path, num_layers=48, top_k=8, num_experts=128, shard_bytes=200 << 20) as sink:
        for _ in range(35):  # 269 MB
            sink.append(ids)
    program = f"""
import re, sys
from equilibra.core.placement import Cluster
from equilibra.trace.count import sequence_loads
from equilibra.trace.open import load_trace
from equilibra.trace.count import summarize
from equilibra.trace.synth import SynthKnobs, SynthShape, synthesize
small = SynthShape(num_prompts=1, answers_per_prompt=1, num_layers=2, num_experts=8, top_k=1)
summarize(synthesize(small, SynthKnobs()), Cluster(), 8192)
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
trace = load_trace({str(path)!r})
trace = trace.load() if sys.argv[1] == "all" else trace
summary = summarize(trace, Cluster(), 8192)
assert summary.tokens == 700_000, summary.tokens
print((peak() - before) >> 10)
"""
    more = {
        how: int(
            subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, check=True).stdout
        )
        for how in ("streamed", "all")
    }
    assert more["streamed"] < 100, "MiB more than before it was opened"
    assert more["all"] > 200, "the control: loading it shows"
