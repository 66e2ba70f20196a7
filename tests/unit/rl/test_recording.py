"""Rollouts on disk and back: other ranks, other models, damaged and hostile files, and as traces."""

import io
import json
import pickle
import random
import zipfile
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from equilibra.cli.main import main
from equilibra.core.errors import InputError
from equilibra.rl import recording
from equilibra.rl.engine import Sample
from equilibra.rl.recording import (
    ModelShape,
    convert_rollout,
    load_rollout,
    read_about,
    read_samples,
    recorded_steps,
    save_rollout,
    to_trace,
    write_samples,
)
from equilibra.trace.open import load_trace

LAYERS, TOP_K, EXPERTS, VOCABULARY = 2, 2, 16, 50
MODEL = ModelShape(
    family="qwen3_moe", num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, vocabulary=VOCABULARY, tokenizer="abc" * 10
)
ABOUT = {"task": "sums", "seed": 3}


def sample_of(
    group: int, number: int, *, windows: tuple[int, ...] = (5,), prompt: int = 4, experts: int = EXPERTS
) -> Sample:
    """A sample whose answer grew by `windows`, each under its own weights."""
    rng = np.random.default_rng([group, number])
    grown = Sample(problem=group + 100, group=group, number=number, prompt=rng.integers(0, VOCABULARY, prompt))
    for version, size in enumerate(windows):
        rows = prompt + grown.answer.size + size - 1
        ids = np.stack([rng.permutation(experts)[:TOP_K] for _ in range(rows * LAYERS)]).reshape(rows, LAYERS, TOP_K)
        grown = grown.grown(
            answer=rng.integers(0, VOCABULARY, size), logprobs=-rng.random(size), experts=ids.astype(np.int32),
            version=10 + version, finished=version == len(windows) - 1,
        )  # fmt: skip
    return replace(grown, reward=float(rng.random()))


def rollout(groups: int = 5, answers: int = 3) -> list[Sample]:
    windows = ((5,), (3, 1), (2, 4, 6), (1,))
    return [sample_of(g, n, windows=windows[(g + n) % 4]) for g in range(groups) for n in range(answers)]


def told(sample: Sample) -> str:
    """Everything in a sample, with types."""
    arrays = [sample.prompt, sample.answer, sample.logprobs, *(s.experts for s in sample.segments)]
    plain = [sample.problem, sample.group, sample.number, sample.finished, sample.reward]
    cuts = [(s.version, s.start, s.end, s.first_row) for s in sample.segments]
    return repr((plain, cuts, [(a.dtype.str, a.shape, a.tolist()) for a in arrays]))


def save(folder, samples, *, step=0, world_size=1, model=MODEL, about=ABOUT):
    for rank in reversed(range(world_size)):
        save_rollout(
            folder, step, samples[rank::world_size], rank=rank, world_size=world_size, model=model, about=about
        )  # fmt: skip


@pytest.fixture
def path(tmp_path):
    """A file of samples."""
    write_samples(tmp_path / "samples.npz", rollout())
    return tmp_path / "samples.npz"


# --- there and back ---


def test_samples_come_back_as_they_were(path):
    samples = rollout()
    samples[2] = replace(samples[2], finished=False, reward=0.0)
    samples.append(Sample(problem=1, group=9, number=0, prompt=np.array([3])))
    partly = samples[0].segments[0].experts.copy()
    partly[1, 0], partly[2] = -1, -1
    samples[0] = replace(samples[0], segments=(replace(samples[0].segments[0], experts=partly),))
    write_samples(path, samples, overwrite=True)
    found = read_samples(path, model=MODEL)
    assert [told(sample) for sample in found] == [told(sample) for sample in samples]
    assert told(found[3]) != told(samples[4])  # the control: it tells samples apart
    assert len(found[2].segments) == 3
    assert [s.first_row for s in found[2].segments] == [0, 5, 0]  # routing of older windows is kept


def test_nothing_is_also_a_file(tmp_path):
    write_samples(tmp_path / "none.npz", [])
    assert read_samples(tmp_path / "none.npz", model=MODEL) == []


def test_the_bytes_depend_on_the_samples_alone(tmp_path, path):
    write_samples(tmp_path / "again.npz", rollout())
    assert (tmp_path / "again.npz").read_bytes() == path.read_bytes()


def test_many_experts_fit(tmp_path):
    sample = sample_of(0, 0, experts=40_000)
    sample.segments[0].experts[0, 0, 0] = 39_999
    write_samples(tmp_path / "wide.npz", [sample])
    assert told(read_samples(tmp_path / "wide.npz")[0]) == told(sample)


def test_a_file_is_not_replaced_unless_asked(path):
    before = path.read_bytes()
    with pytest.raises(InputError, match="exists"):
        write_samples(path, [])
    other_model = sample_of(0, 0).grown(
        answer=np.array([1]), logprobs=np.array([-1.0]), experts=np.zeros((9, 1, 1), np.int32), version=1, finished=True
    )
    with pytest.raises(InputError, match="of one model"):
        write_samples(path, [other_model], overwrite=True)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["samples.npz"]


# --- rollouts ---


@pytest.mark.parametrize("wrote", [1, 2, 3, 7])
@pytest.mark.parametrize("reads", [1, 2, 4, 6])
def test_another_number_of_ranks(tmp_path, wrote, reads):
    samples = rollout()
    random.Random(1).shuffle(samples)
    save(tmp_path, samples, step=12, world_size=wrote)
    shares = [load_rollout(tmp_path, 12, model=MODEL, rank=rank, world_size=reads) for rank in range(reads)]
    in_order = sorted(samples, key=lambda s: (s.group, s.number))
    for rank, share in enumerate(shares):
        assert [told(s) for s in share] == [told(s) for s in in_order if s.group % reads == rank]
    assert sum(map(len, shares)) == 15


def test_groups_with_gaps_are_dealt_out_in_turn(tmp_path):
    save(tmp_path, [sample_of(group, 0) for group in (40, 10, 30, 20)])
    groups = [[s.group for s in load_rollout(tmp_path, 0, model=MODEL, rank=rank, world_size=2)] for rank in range(2)]
    assert groups == [[10, 30], [20, 40]]


def test_only_the_groups_asked_for_are_kept(tmp_path, monkeypatch):
    save(tmp_path, rollout(groups=6, answers=1))
    kept = []
    rows = recording._rows
    monkeypatch.setattr(
        recording,
        "_rows",
        lambda array, *mask: kept.append((array.name, len(rows(array, *mask)))) or rows(array, *mask),
    )
    shares = [
        sum(s.num_rows for s in load_rollout(tmp_path, 0, model=MODEL, rank=rank, world_size=6)) for rank in range(6)
    ]
    assert max(size for name, size in kept if name == "experts") < sum(shares) / 2


def test_steps_and_what_they_are_of(tmp_path):
    for step in (3, 0, 10**9):
        save(tmp_path / "deep" / "folder", rollout(2), step=step, world_size=2)
    folder = tmp_path / "deep" / "folder"
    (folder / "notes.txt").write_text("mine")
    assert recorded_steps(folder) == [0, 3, 10**9]
    assert (read_about(folder).model, read_about(folder).about) == (MODEL, ABOUT)
    assert len(load_rollout(folder, 10**9, model=MODEL)) == 6
    with pytest.raises(InputError, match="no recording of step 1: it has steps 0 to 1000000000"):
        load_rollout(folder, 1, model=MODEL)


def test_a_step_done_again_replaces_the_old_one(tmp_path):
    save(tmp_path, rollout(4), world_size=4)
    save(tmp_path, rollout(2), world_size=2)
    assert len(load_rollout(tmp_path, 0, model=MODEL)) == 6
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_of_another_number_of_ranks(tmp_path):
    save(tmp_path, rollout(4), world_size=4)
    save_rollout(tmp_path, 0, rollout(2), rank=1, world_size=2, model=MODEL, about=ABOUT)
    with pytest.raises(InputError, match=r"step 0 from runs of \[2, 4\] ranks"):
        load_rollout(tmp_path, 0, model=MODEL)


def test_a_missing_rank_and_a_copied_one(tmp_path):
    save(tmp_path, rollout(), world_size=4)
    names = sorted(file.name for file in tmp_path.glob("*.npz"))
    content = (tmp_path / names[2]).read_bytes()
    (tmp_path / names[2]).unlink()
    with pytest.raises(InputError, match=r"3 files of step 0 for 4 ranks: ranks \[2\] are missing"):
        load_rollout(tmp_path, 0, model=MODEL)
    (tmp_path / names[2]).write_bytes((tmp_path / names[1]).read_bytes())
    with pytest.raises(InputError, match="step 0 has answer 1 of group 0 twice"):
        load_rollout(tmp_path, 0, model=MODEL)
    (tmp_path / names[2]).write_bytes(content)
    assert len(load_rollout(tmp_path, 0, model=MODEL)) == 15


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("family", "olmoe", "of the family 'qwen3_moe', yours is of 'olmoe'"),
        ("num_layers", 3, "with 2 MoE layers, yours has 3"),
        ("num_experts", 64, "with 16 experts, yours has 64"),
        ("top_k", 4, "with 2 experts per token, yours has 4"),
        ("vocabulary", 51, "with 50 token ids, yours has 51"),
        ("tokenizer", "xyz", "with the tokenizer abcabcabcabc, yours is xyz"),
    ],
)
def test_a_recording_of_another_model(tmp_path, field, value, message):
    save(tmp_path, rollout(1))
    yours = replace(MODEL, **{field: value})
    with pytest.raises(InputError, match=message) as caught:
        load_rollout(tmp_path, 0, model=yours)
    assert str(tmp_path) in str(caught.value)
    assert ";" not in str(caught.value)  # one difference
    with pytest.raises(InputError, match=f"{message}; choose another folder"):
        save(tmp_path, rollout(1), model=yours)


def test_all_differences_are_said_at_once(tmp_path):
    save(tmp_path, rollout(1))
    with pytest.raises(InputError, match="with 16 experts, yours has 64; with 2 experts per token, yours has 8"):
        load_rollout(tmp_path, 0, model=replace(MODEL, num_experts=64, top_k=8))


def test_a_folder_of_another_run(tmp_path):
    save(tmp_path, rollout(1), about={"task": "sums", "options": (1, 2)})
    save(tmp_path, rollout(1), about={"options": [1, 2], "task": "sums"}, step=1)
    with pytest.raises(InputError, match="choose another folder"):
        save(tmp_path, rollout(1), about={"task": "products", "options": (1, 2)})
    with pytest.raises(InputError, match="plain values"):
        save(tmp_path / "new", rollout(1), about={"task": object()})
    assert not (tmp_path / "new" / "about.json").exists()


@pytest.mark.parametrize(
    "changes", [{"family": 3}, {"num_experts": 0}, {"num_layers": True}, {"vocabulary": 1.5}, {"top_k": 17}]
)
def test_shapes_that_no_model_has(changes):
    with pytest.raises(InputError):
        replace(MODEL, **changes)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"\xff", b"[" * 60_000, b"{}", b" " * 70_000,
        b'{"format": "equilibra-rollout", "version": 1}',
        b'{"format": "equilibra-rollout", "version": 1, "model": {}, "about": {}}',
        b'{"format": "equilibra-rollout", "version": 1, "model": {"family": 1}, "about": {}}',
        b'{"format": "equilibra-rollout", "version": 1, "model": [], "about": {}}',
    ],
)  # fmt: skip
def test_a_damaged_description(tmp_path, content):
    save(tmp_path, rollout(1))
    (tmp_path / "about.json").write_bytes(content)
    with pytest.raises(InputError, match=r"about\.json is damaged"):
        load_rollout(tmp_path, 0, model=MODEL)


def test_a_description_of_another_version(tmp_path):
    save(tmp_path, rollout(1))
    body = json.loads((tmp_path / "about.json").read_text())
    (tmp_path / "about.json").write_text(json.dumps({**body, "version": 2}))
    with pytest.raises(InputError, match="version 1"):
        read_about(tmp_path)


def test_folders_that_are_no_recordings(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError, match=r"not a recording of rollouts \(no about\.json\)"):
            load_rollout(folder, 0, model=MODEL)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        save(tmp_path / "file", [])
    with pytest.raises(InputError, match="cannot read"):
        recorded_steps(tmp_path / "none")


# --- damaged and hostile files ---


def arrays_of(path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name].copy() for name in file.files}


def write_arrays(path, arrays, *, method=zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array, allow_pickle=True)
            archive.writestr(f"{name}.npy", content.getvalue())


def test_the_control_files_written_by_numpy_are_read(path):
    before = [told(sample) for sample in read_samples(path)]
    write_arrays(path, arrays_of(path))
    assert [told(sample) for sample in read_samples(path, model=MODEL)] == before


def test_a_file_cut_off_anywhere(path):
    content = path.read_bytes()
    for end in sorted({*range(60), *np.linspace(60, len(content) - 1, 60).astype(int).tolist()}):
        path.write_bytes(content[:end])
        with pytest.raises(InputError, match=r"samples\.npz"):
            read_samples(path)


def test_a_bit_flipped_anywhere_is_noticed_or_harmless(path):
    content, before, noticed = path.read_bytes(), [told(sample) for sample in read_samples(path)], 0
    rng = random.Random(0)
    for place in rng.sample(range(len(content)), 800):
        damaged = bytearray(content)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            assert [told(sample) for sample in read_samples(path)] == before
        except InputError as error:
            assert "samples.npz" in str(error)  # noqa: PT017 - either is right
            noticed += 1
    assert noticed > 400


class Bomb:
    """Leaves a file when it is unpickled."""

    def __init__(self, trace) -> None:
        self.trace = trace

    def __reduce__(self):
        return (type(self.trace).touch, (self.trace,))


@pytest.mark.parametrize("name", ["problem", "reward", "prompt", "experts", "version"])
def test_nothing_is_unpickled(path, name):
    trace = path.parent / "unpickled"
    bomb = np.array([Bomb(trace)], dtype=object)
    write_arrays(path, {**arrays_of(path), name: bomb})
    with pytest.raises(InputError, match=r"samples\.npz.*Python objects"):
        read_samples(path)
    assert not trace.exists()
    pickle.loads(pickle.dumps(bomb))  # the control: it does go off
    assert trace.exists()


def changed(name, change):
    def apply(arrays):
        array = arrays[name].copy()
        return {**arrays, name: change(array)}

    return apply


def put(place, value):
    def change(array):
        array[place] = value
        return array

    return change


HOSTILE = {
    "an array is missing": (lambda a: {k: v for k, v in a.items() if k != "reward"}, "must hold the arrays"),
    "one too many": (lambda a: {**a, "more": np.zeros(1)}, "must hold the arrays"),
    "other type": (changed("problem", lambda a: a.astype(np.int32)), "problem must be <i8"),
    "text": (changed("problem", lambda a: a.astype("U8")), "problem must be <i8"),
    "other byte order": (changed("prompt", lambda a: a.astype(">i8")), "prompt must be <i8"),
    "two dimensions": (changed("reward", lambda a: a[:, None]), "reward must be <f8 in one dimension"),
    "no dimension": (changed("reward", lambda a: np.array(1.0)), "reward must be <f8 in one dimension"),
    "flat routing": (changed("experts", lambda a: a.reshape(-1)), "experts must be whole numbers"),
    "no layers": (changed("experts", lambda a: a[:, :0]), "experts must be whole numbers"),
    "float routing": (changed("experts", lambda a: a.astype(np.float32)), "experts must be whole numbers"),
    "other layers": (changed("experts", lambda a: a[:, :1]), "routing must have"),
    "fewer rewards": (changed("reward", lambda a: a[1:]), "must have one length"),
    "fewer ends": (changed("end", lambda a: a[1:]), "must have one length"),
    "fewer log-probabilities": (changed("logprobs", lambda a: a[1:]), "must have one length"),
    "fewer tokens": (changed("prompt", lambda a: a[1:]), "prompt_length adds up to"),
    "fewer rows": (changed("experts", lambda a: a[1:]), "num_rows adds up to"),
    "negative length": (changed("prompt_length", put(0, -1)), "prompt_length must be from 0 to"),
    "endless length": (changed("prompt_length", put(0, 2**63 - 1)), "prompt_length must be from 0 to"),
    "lengths that overflow": (changed("answer_length", put(slice(2), 2**62)), "answer_length must be from 0 to"),
    "negative segments": (changed("num_segments", put(0, -1)), "num_segments must be from 0 to"),
    "segments of a neighbour": (changed("num_segments", put(slice(2), [0, 3])), "cover the answer"),
    "no prompt": (changed("prompt_length", put(slice(2), [0, 8])), "cover the answer"),
    "negative group": (changed("group", put(0, -1)), "group must be from 0"),
    "negative problem": (changed("problem", put(0, -7)), "problem must be from 0"),
    "negative version": (changed("version", put(0, -1)), "version must be from 0"),
    "negative row": (changed("first_row", put(0, -1)), "first_row must be from 0"),
    "row far away": (changed("first_row", put(0, 1000)), "lies outside"),
    "segments that do not meet": (changed("end", put(0, 1)), "cover the answer"),
    "token too large": (changed("prompt", put(3, VOCABULARY)), "prompt must be from 0 to 49, not 50"),
    "negative token": (changed("answer", put(3, -1)), "answer must be from 0 to 49, not -1"),
    "expert too large": (changed("experts", put((3, 1, 1), EXPERTS)), "experts must be from -1 to 15, not 16"),
    "expert too small": (changed("experts", put((3, 1, 1), -2)), "experts must be from -1 to 15, not -2"),
    "log-probability nan": (changed("logprobs", put(0, np.nan)), "logprobs must be finite"),
    "reward infinite": (changed("reward", put(0, np.inf)), "reward must be finite"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_files_that_say_what_cannot_be(path, what):
    change, message = HOSTILE[what]
    write_arrays(path, change(arrays_of(path)))
    with pytest.raises(InputError, match=message) as caught:
        read_samples(path, model=MODEL)
    assert str(path) in str(caught.value)


def test_segments_that_run_backwards(tmp_path):
    write_samples(tmp_path / "one.npz", [sample_of(0, 0, windows=(2, 1))])
    arrays = arrays_of(tmp_path / "one.npz")
    arrays["end"][0] = arrays["start"][1] = 5
    write_arrays(tmp_path / "one.npz", arrays)
    with pytest.raises(InputError, match="lies outside"):
        read_samples(tmp_path / "one.npz")


def test_newest_routing_must_be_whole(tmp_path):
    write_samples(tmp_path / "one.npz", [sample_of(0, 0)])
    arrays = arrays_of(tmp_path / "one.npz")
    arrays["experts"], arrays["num_rows"][0] = arrays["experts"][1:], len(arrays["experts"]) - 1
    write_arrays(tmp_path / "one.npz", arrays)
    with pytest.raises(InputError, match="lacks the routing"):
        read_samples(tmp_path / "one.npz")


def test_what_is_compressed_is_refused(path):
    write_arrays(path, {**arrays_of(path), "prompt": np.zeros(10**7, np.int64)}, method=zipfile.ZIP_DEFLATED)
    with pytest.raises(InputError, match="it is compressed"):
        read_samples(path)


@pytest.mark.parametrize("shape", [(10**12,), (2**62, 2**62, 2**62), (-1,), (10**12, 2, 2)])
def test_sizes_that_are_not_there(path, shape):
    arrays = arrays_of(path)
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            claimed = shape if name == "experts" else array.shape
            header = {"descr": array.dtype.str, "fortran_order": False, "shape": claimed}
            np.lib.format.write_array_header_1_0(content, header)
            archive.writestr(f"{name}.npy", content.getvalue() + array.tobytes())
    with pytest.raises(InputError, match=r"samples\.npz.*says it is|experts must be"):
        read_samples(path)


def test_a_directory_of_the_archive_that_lies(path, monkeypatch):
    """Sizes in the zip's own directory are compared with the size of the file."""
    real = zipfile.ZipFile.infolist

    def inflated(archive):
        entries = real(archive)
        entries[0].file_size = entries[0].compress_size = 1 << 40
        return entries

    monkeypatch.setattr(zipfile.ZipFile, "infolist", inflated)
    with pytest.raises(InputError, match="claim more than its"):
        read_samples(path)


ODD_HEADERS = [
    "{[]: 1}", "{'descr': '<i8'", "{'descr': 'O', 'fortran_order': False, 'shape': (1,)}", "(" * 5000, "1L", '"""', "\\"
]  # fmt: skip


@pytest.mark.parametrize("header", ODD_HEADERS)
def test_headers_that_are_no_headers(path, header):
    arrays = arrays_of(path)
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array)
            text = header.encode() + b"\n"
            bad = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + array.tobytes()
            archive.writestr(f"{name}.npy", bad if name == "group" else content.getvalue())
    with pytest.raises(InputError, match=r"samples\.npz"):
        read_samples(path)


def test_things_that_are_no_files(tmp_path):
    for name in (tmp_path, tmp_path / "none.npz", "/dev/zero"):
        with pytest.raises(InputError, match="no such sample file"):
            read_samples(name)
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(InputError, match=r"text\.npz is not a readable sample file"):
        read_samples(tmp_path / "text.npz")


# --- traces ---


def test_a_trace_by_hand():
    sample = sample_of(7, 0, windows=(2, 1, 3), prompt=4)
    alone = sample_of(8, 0, windows=(1,), prompt=1)  # one row
    trace = to_trace([sample, alone, Sample(problem=0, group=9, number=0, prompt=np.array([1]))], EXPERTS)
    assert trace.offsets.tolist() == [0, 9, 10]  # 4 + 6 - 1 rows, then 1 + 1 - 1
    assert trace.prompt_length_of_sequence.tolist() == [4, 1]
    assert trace.group_of_sequence.tolist() == [7, 8]
    assert trace.segments.offsets.tolist() == [0, 6, 7, 9, 10]
    assert trace.segments.version_of_segment.tolist() == [10, 11, 12, 10]
    assert trace.recorded is None
    np.testing.assert_array_equal(trace.ids, np.concatenate([sample.experts, alone.experts]))


def test_a_last_window_of_one_token_has_no_rows_of_its_own():
    trace = to_trace([sample_of(0, 0, windows=(2, 1), prompt=3)], EXPERTS)
    assert trace.segments.offsets.tolist() == [0, 5]
    assert trace.segments.version_of_segment.tolist() == [10]


def test_unknown_routing_is_not_recorded():
    sample = sample_of(0, 0)
    sample.experts[1] = -1
    sample.experts[2, 0] = -1
    trace = to_trace([sample], EXPERTS)
    assert np.flatnonzero(~trace.recorded).tolist() == [1, 2]
    with pytest.raises(InputError, match="out of range"):
        to_trace([sample_of(0, 0)], 4)
    with pytest.raises(InputError, match="no sample of the rollout has an answer"):
        to_trace([Sample(problem=0, group=9, number=0, prompt=np.array([1, 2]))], EXPERTS)


@pytest.mark.parametrize("suffix", ["npz", "eqtrace"])
def test_simulate_takes_a_recorded_rollout(tmp_path, capsys, suffix):
    samples = rollout(groups=16, answers=4)
    save(tmp_path / "recording", samples, step=2, world_size=2)
    target = tmp_path / f"step2.{suffix}"
    convert_rollout(tmp_path / "recording", 2, target)
    (tmp_path / "tiny.toml").write_text(
        f"num_layers = {LAYERS}\nhidden = 256\nexpert_ffn = 128\nnum_experts = {EXPERTS}\ntop_k = {TOP_K}\n"
    )
    words = ["simulate", "--trace", target, "--model", tmp_path / "tiny.toml", "--ranks-per-node", 4]
    assert main([str(word) for word in (*words, "--tokens-per-microbatch", 512, "--json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sequences"] == 64
    assert found["tokens"] == sum(sample.num_rows for sample in samples)
    trace = load_trace(target)
    assert sorted(set(trace.segments.version_of_segment.tolist())) == [10, 11, 12]
    assert all(a <= b for a, b in pairwise(trace.group_of_sequence))
    with pytest.raises(InputError, match="exists"):
        convert_rollout(tmp_path / "recording", 2, target)
