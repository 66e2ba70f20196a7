"""Runs on disk: they come back, and folders that are damaged, hostile or of something else are refused."""

import json
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
from tests.references.runs import TINY, make_run

from equilibra.core.errors import InputError
from equilibra.events.run import Run, load_run, save_run
from equilibra.events.schema import EVENT, Events, event_table


@pytest.fixture(scope="module")
def run() -> Run:
    return make_run(TINY, ("static", "equilibra"))


@pytest.fixture
def folder(run, tmp_path):
    save_run(run, tmp_path / "run")
    return tmp_path / "run"


def change_arrays(folder, **changes) -> None:
    with np.load(folder / "static.npz") as archive:
        arrays = dict(archive)
    for name, value in changes.items():
        if value is None:
            del arrays[name]
        else:
            arrays[name] = value(arrays[name])
    np.savez(folder / "static.npz", **arrays)


def change_json(folder, **changes) -> None:
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**about, **changes}))


def first(value):
    def changed(array):
        array = array.copy()
        array.flat[0] = value
        return array

    return changed


def event(**columns):
    def changed(rows):
        rows = rows.copy()
        for name, value in columns.items():
            rows[name][0] = value
        return rows

    return changed


def test_it_comes_back(run, folder):
    read = load_run(folder)
    assert read.about == run.about
    for name, record in run.planners.items():
        other = read.planners[name]
        assert (other.metrics, other.memory) == (record.metrics, record.memory)
        for field in record.__dataclass_fields__:
            if isinstance(value := getattr(record, field), np.ndarray):
                assert np.array_equal(getattr(other, field), value)
                assert getattr(other, field).dtype == value.dtype
        assert np.array_equal(other.events.rows, record.events.rows)


def test_it_is_not_overwritten_unasked_and_never_over_something_else(run, folder, tmp_path):
    with pytest.raises(InputError, match="exists"):
        save_run(run, folder)
    save_run(run, folder, overwrite=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").write_text("x")
    with pytest.raises(InputError, match="not the same kind of folder"):
        save_run(run, tmp_path / "other", overwrite=True)
    assert (tmp_path / "other" / "precious").read_text() == "x"
    with pytest.raises(InputError, match="does not exist"):
        save_run(run, tmp_path / "missing" / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run"]  # nothing half-written stays


@pytest.mark.parametrize("missing", ["run.json", "static.npz"])
def test_missing_files(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(InputError, match=missing):
        load_run(folder)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rank_tokens_LMR": lambda a: a.astype(np.float64)}, "rank_tokens_LMR cannot hold float64"),
        ({"rank_tokens_LMR": lambda a: a[0]}, "must be"),
        ({"rank_tokens_LMR": lambda a: a[:, :, :, None]}, "must be"),
        ({"rank_tokens_LMR": first(-1)}, "rank_tokens_LMR must be from 0 to .*, not -1"),
        ({"home_of_expert_LE": first(2)}, "home_of_expert_LE must be from 0 to 1"),
        ({"home_of_expert_LE": first(-1)}, "home_of_expert_LE must be from 0 to 1"),
        ({"home_of_expert_LE": lambda a: a.astype("U5")}, "cannot hold"),
        ({"layer_us_PLM": first(np.nan)}, "layer_us_PLM must be from 0"),
        ({"layer_us_PLM": first(np.inf)}, "layer_us_PLM must be from 0"),
        ({"layer_us_PLM": lambda a: a.astype(complex)}, "cannot hold"),
        ({"layer_us_PLM": lambda a: a[:2]}, "must have shape"),
        ({"bound_LM": None}, "bound_LM"),
        ({"flash_first_of_problem": first(3)}, "flash_first_of_problem must rise"),
        ({"flash_rank": lambda _: np.zeros(5, np.int32)}, "must have shape"),
        ({"standing_tokens_CM": lambda _: np.zeros((7, 1), np.int32)}, "must have shape"),
        ({"events": lambda _: np.zeros(3, np.int32)}, "events must be one table"),
        ({"events": lambda a: a.reshape(1, -1)}, "events must be one table"),
        ({"events": event(start_us=np.nan)}, "finite"),
        ({"events": event(end_us=-1)}, "end before"),
        ({"events": event(kind=200)}, "unknown kind"),
        ({"events": event(rank=2)}, "rank of events must be from -1 to 1, not 0 to 2"),
        ({"events": event(rank=-2)}, "rank of events .*, not -2"),
        ({"events": event(layer=100)}, "layer of events"),
        ({"events": event(micro_batch=10**6)}, "micro_batch of events"),
        ({"events": event(expert=4)}, "expert of events"),
        ({"events": event(peer=99)}, "peer of events"),
        ({"events": event(tokens=-5)}, "tokens of events .*, not -5"),
        ({"events": event(bytes=-5)}, "bytes of events .*, not -5"),
    ],
)
def test_wrong_values(folder, changes, match):
    change_arrays(folder, **changes)
    with pytest.raises(InputError, match=match):
        load_run(folder)


def test_pickled_objects_are_never_loaded(folder):
    change_arrays(folder, bound_LM=lambda a: np.array([[{}]], dtype=object))
    with pytest.raises(InputError, match="allow_pickle"):
        load_run(folder)


def test_a_file_that_is_no_archive(folder):
    for content in (b"", b"PK", b"not a zip", b"\x93NUMPY"):
        (folder / "static.npz").write_bytes(content)
        with pytest.raises(InputError):
            load_run(folder)
    with (folder / "static.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(InputError):
        load_run(folder)


def test_flipped_bytes_are_an_error_or_harmless(folder):
    """Whatever zip, zlib and numpy raise on damage becomes one kind of error."""
    whole, rng = (folder / "static.npz").read_bytes(), random.Random(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 2, 8])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        (folder / "static.npz").write_bytes(bytes(damaged[: rng.choice([len(damaged), rng.randrange(len(damaged))])]))
        try:
            load_run(folder)
        except InputError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '{"format": "other"}', "[" * 100_000, "\udcff"])
def test_damaged_descriptions(folder, text):
    (folder / "run.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError):
        load_run(folder)


def test_other_versions_and_formats(folder):
    change_json(folder, format_version=2)
    with pytest.raises(InputError, match="version 2 of the run format, this program reads 1"):
        load_run(folder)
    change_json(folder, format_version=1, format="equilibra plan")
    with pytest.raises(InputError, match="not an equilibra run"):
        load_run(folder)


def test_hostile_planners(folder):
    record = json.loads((folder / "run.json").read_text())["planners"]["static"]
    shutil.copytree(folder, folder.parent / "outside")
    for planners in (
        [], None, {"static": None}, {"static": []}, {"static": {}}, {"static": {"metrics": {}}},
        {"static": {"metrics": [], "memory": {}}}, {"static": {"metrics": {"step_time_s": "fast"}, "memory": {}}},
        {"static": {"metrics": {"a": None}, "memory": {}}}, {"../outside/static": record}, {"a\0b": record},
        {"x" * 300: record}, {"": record}, {"/etc/passwd": record},
    ):  # fmt: skip
        change_json(folder, planners=planners)
        with pytest.raises(InputError):
            load_run(folder)
    text = (folder / "run.json").read_text()
    (folder / "run.json").write_text(text.replace(json.dumps({"/etc/passwd": record}), '{"static": {"metrics": '
                                                  '{"step_time_s": NaN}, "memory": {}}}'))  # fmt: skip
    with pytest.raises(InputError, match="finite"):
        load_run(folder)


def test_names_of_planners_are_file_names(run):
    record = run.planners["static"]
    for name in ("../x", "a/b", "", ".hidden", "a\nb", "x" * 200):
        with pytest.raises(InputError, match="cannot be named"):
            Run(about={}, planners={name: record})
    assert Run(about={}, planners={"eplb-oracle 2.0+x": record}).planners


def test_records_check_themselves(run):
    record = run.planners["equilibra"]
    for name, value in (("metrics", {"x": float("nan")}), ("memory", {"x": "y"})):
        with pytest.raises(InputError, match="x must be a finite number"):
            replace(record, **{name: value})
    with pytest.raises(InputError, match="bound_LM must have shape"):
        replace(record, bound_LM=np.zeros((9, 9), np.int64))


def test_events_are_sorted_and_chosen_by_columns():
    late, early = event_table(2, rank=[0, 1], start_us=5.0, end_us=6.0), event_table(1, kind=1, start_us=1.0, end_us=2)
    events = Events.of(late, early)
    assert events.rows["start_us"].tolist() == [1, 5, 5]
    assert events.rows["layer"].tolist() == [-1, -1, -1]
    assert events.where(kind=0, rank=1).size == 1
    assert Events.of().rows.dtype == EVENT
    with pytest.raises(ValueError, match="read-only"):
        events.rows["rank"][0] = 3
