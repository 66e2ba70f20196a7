"""Streamed weights: the names, order and numbers of the export, on every rank, wherever homes are."""

from __future__ import annotations

from pathlib import Path
from time import sleep

import pytest
import torch
from tests.distributed.ranks import collect, run_ranks, start_ranks
from tests.distributed.states import EXPERTS, LAYERS, digest
from tests.distributed.test_safetensors import SPECS, all_of, dense_of, error_of, export, world_of
from torch import Tensor

from equilibra.core.errors import BrokenStateError, InputError, StaleError
from equilibra.execute.state.published import logical_weights, naming_of


def stream_world(folder: Path, nodes: int, per_node: int) -> dict[str, list[tuple[str, str]]]:
    """What every family streams under moved homes, kept until the end, and its export to compare with."""
    found = {}
    for family in SPECS:
        world, naming = world_of(family, nodes, per_node, placement_seed=5), naming_of(family).with_layers([3, 4, 6])
        kept = list(logical_weights(world.runtime, naming, dense_of(world, naming)))
        with torch.no_grad():
            for parameter in world.model.parameters():
                parameter.zero_()
        found[family] = [(name, digest(value)) for name, value in kept]
        assert all(value.is_contiguous() and not value.requires_grad for _, value in kept)
    for family in SPECS:
        export(world_of(family, nodes, per_node, placement_seed=5), folder / family, family)
    return found


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (1, 2)], ids=["2 nodes of 2", "2 groups of 2"])
def test_every_rank_gets_what_is_exported(tmp_path: Path, nodes: int, per_node: int) -> None:
    results = run_ranks(4, stream_world, tmp_path, nodes, per_node)
    for family in SPECS:
        files = all_of(tmp_path / family)
        for result in results:
            assert dict(result[family]) == {name: digest(value) for name, value in files.items()}
            assert result[family] == results[0][family]
            assert len(result[family]) == len(files), "a name came twice"
        names = [name for name, _ in results[0][family]]
        assert names[:3] == ["model.embed.weight", "model.embed.bias", "model.scale"]
        experts = [name for name in names if ".experts." in name]
        assert names[-len(experts) :] == experts
        per_layer = 4 if family == "gpt-oss" else 3 * EXPERTS
        assert len(experts) == per_layer * LAYERS
        layers = [int(name.split(".")[2]) for name in experts]
        assert layers == sorted(layers)
        if family != "gpt-oss":
            assert [int(name.split(".")[5]) for name in experts[:per_layer:3]] == list(range(EXPERTS))


def stream_and_fail() -> str:
    """Rank 1 fails in the middle of the second layer, and lives on without a word."""
    world, naming = world_of("qwen3-moe", 1, 4, timeout_s=2.0), naming_of("qwen3-moe")

    def stream() -> None:
        for name, _ in logical_weights(world.runtime, naming, {}):
            if world.runtime.group.rank == 1 and name.startswith("model.layers.1."):
                raise InputError("the engine is full")

    text = error_of(stream)
    sleep(5 if world.runtime.group.rank == 1 else 0)
    return text


def test_a_rank_that_fails_ends_the_stream_everywhere() -> None:
    processes, pipes, _ = start_ranks(4, stream_and_fail)
    outcomes = collect(processes, pipes, 60)
    assert [outcome.value.partition(":")[0] for outcome in outcomes] == [
        "RankLostError", "InputError", "RankLostError", "RankLostError",
    ]  # fmt: skip
    assert all(outcome.seconds < 4.5 for rank, outcome in enumerate(outcomes) if rank != 1)


def disagree() -> str:
    world, naming = world_of("qwen3-moe", 1, 2), naming_of("qwen3-moe")
    dense = {"a": torch.ones(2 + world.runtime.group.rank)}
    return error_of(lambda: list(logical_weights(world.runtime, naming, dense)))


def test_ranks_with_other_dense_tensors_disagree() -> None:
    assert all(text.startswith("MismatchError") and "weights to stream" in text for text in run_ranks(2, disagree))


def test_what_cannot_be_streamed_says_why() -> None:
    world, naming = world_of("qwen3-moe"), naming_of("qwen3-moe")

    def stream(name: str = "a", family: str = "qwen3-moe") -> list[tuple[str, Tensor]]:
        return list(logical_weights(world.runtime, naming_of(family), {name: torch.ones(1)}))

    assert len(stream()) == 1 + 3 * EXPERTS * LAYERS
    with pytest.raises(InputError, match=r"two tensors would be called model.layers.2.mlp.experts.7.up_proj.weight"):
        stream("model.layers.2.mlp.experts.7.up_proj.weight")
    with pytest.raises(InputError, match="no model layer for MoE layer 1"):
        list(logical_weights(world.runtime, naming.with_layers([1]), {}))
    under_way = logical_weights(world.runtime, naming, {"a": torch.ones(1)})
    next(under_way)
    world.runtime.weights_changed()
    with pytest.raises(StaleError, match="between steps"):
        next(under_way)
    world.runtime.broken = "a migration was cut off"
    with pytest.raises(BrokenStateError, match="cannot stream"):
        stream()
