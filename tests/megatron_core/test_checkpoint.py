"""Checkpoints and exported weights of balanced Megatron models have logical numbers."""

from pathlib import Path

import numpy as np
import pytest
from tests.distributed.ranks import run_ranks
from tests.megatron_core import checkpoint_runs


def loads(world: int, folder: Path) -> None:
    for found in run_ranks(world, checkpoint_runs.permuted_to_identity, str(folder)):
        assert found["plain"] == found["moved"] == 0
        trained, plain, moved = found["losses"]
        np.testing.assert_allclose(plain, trained, rtol=1e-6)
        np.testing.assert_allclose(moved, trained, rtol=1e-6)
        assert len(found["refused"]) == 2
        assert all("dp_reshardable" in said for said in found["refused"])


def test_saved_with_moved_homes_and_loaded_without(tmp_path: Path) -> None:
    loads(2, tmp_path)


@pytest.mark.slow
def test_with_two_replicas(tmp_path: Path) -> None:
    loads(4, tmp_path)


@pytest.mark.slow
def test_slots_for_numbers_are_noticed(tmp_path: Path) -> None:
    found = run_ranks(2, checkpoint_runs.permuted_to_identity, str(tmp_path), True)
    assert all(one["plain"] > 1e-2 for one in found)


def test_exporters_get_logical_numbers() -> None:
    for found in run_ranks(2, checkpoint_runs.exported):
        assert found["gap"] == 0
        assert found["count"] > 18
        assert found["same homes"]
        assert min(found["by rank"]) > 1e-2, "the control: numbers by rank are of other experts"
        assert found["said"] == [
            "InputError: experts have lent weights for an export: finish or close it before the next pass"
        ]
        assert any(homes != sorted(homes) for homes in found["homes"])


def test_homes_go_back_after_an_exporter_failed_unless_a_move_was_cut_off() -> None:
    for rank, found in enumerate(run_ranks(2, checkpoint_runs.export_fails)):
        assert found["same homes"]
        assert found["moved"]
        assert found["gap"] == 0
        first, said = (found["said"][:1], found["said"][1:]) if rank == 0 else ([], found["said"])
        assert first == ["OSError: the disk is full"][: 1 - rank]
        assert said[0] == "RankLostError: cut off"
        assert all(one.startswith("BrokenStateError: a move of homes was cut off") for one in said[1:])
        assert len(said) == 3


def test_the_switch_brings_homes_back() -> None:
    for found in run_ranks(2, checkpoint_runs.switched_off):
        assert found["moved"]
        assert found["back"]
        assert found["copies"] == 0
        assert found["gap"] < 1e-5
        np.testing.assert_allclose(*found["losses"], rtol=2e-6)
