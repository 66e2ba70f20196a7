"""Weights as safetensors: the names and layouts of published models, from any world into any other, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.distributed.ranks import run_ranks
from tests.distributed.states import EXPERTS, HIDDEN, LAYERS, World, make_world, merged
from torch import Tensor

from equilibra.core.errors import BrokenStateError, EquilibraError, InputError
from equilibra.execute.experts import Activation, MoESpec, RouterSpec
from equilibra.execute.experts.expert_math import activate
from equilibra.execute.state import safetensors as module
from equilibra.execute.state.published import Naming, dense_tensors, naming_of
from equilibra.execute.state.safetensors import export_safetensors, import_safetensors

FFN = 6
SHAPE = {"hidden": HIDDEN, "expert_ffn": FFN, "num_experts": EXPERTS, "top_k": 2}
SPECS = {
    "qwen3-moe": MoESpec(**SHAPE),
    "mixtral": MoESpec(**SHAPE),
    "deepseek": MoESpec(**SHAPE, shared_ffn=4, router=RouterSpec(selection_bias=True)),
    "gpt-oss": MoESpec(
        **SHAPE, expert_bias=True, activation=Activation.CLAMPED_SWIGLU, router=RouterSpec(bias=True)
    ),
}  # fmt: skip


def world_of(family: str, nodes: int = 1, per_node: int = 1, **setting: Any) -> World:
    return make_world(nodes, per_node, spec=SPECS[family], dtype=torch.float32, **setting)


def dense_of(world: World, naming: Naming) -> dict[str, Tensor]:
    model = world.model
    named = {"model.embed.weight": model.embed.weight, "model.embed.bias": model.embed.bias, "model.scale": model.scale}
    return {**named, **dense_tensors(model.moe, naming)}


def export(world: World, folder: Path, family: str, **setting: Any) -> None:
    naming = naming_of(family).with_layers([3, 4, 6])  # as if some layers were dense
    export_safetensors(folder, world.runtime, naming, dense_of(world, naming), **setting)


def read(world: World, folder: Path, family: str) -> None:
    naming = naming_of(family).with_layers([3, 4, 6])
    import_safetensors(folder, world.runtime, naming, dense_of(world, naming))


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except EquilibraError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# --- worlds of several ranks ---


def export_world(folder: Path) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Every family from four ranks with homes anywhere; then one rank's disk fails."""
    found, errors = {}, []
    for family in SPECS:
        world = world_of(family, 2, 2, placement_seed=3)
        small = 1200 if family == "mixtral" else 5 << 30
        export(world, folder / family, family, max_file_bytes=small)
        found[family] = world.digests()
    save, rank = module._save, world.runtime.group.rank

    def fails(path: Path, values: dict[str, Tensor]) -> None:
        if rank == 1:
            raise InputError(f"cannot write {path}: No space left on device")
        save(path, values)

    module._save = fails  # type: ignore[assignment]
    for family in ("gpt-oss", "qwen3-moe"):
        world = world_of(family, 2, 2)
        errors.append(error_of(lambda world=world, family=family: export(world, folder / "failed", family)))
    return found, errors


def import_world(folder: Path, nodes: int, per_node: int) -> dict[str, dict[str, str]]:
    found = {}
    for family in SPECS:
        world = world_of(family, nodes, per_node, placement_seed=7, seed=99)
        before, version = world.digests(), world.runtime.version
        read(world, folder / family, family)
        found[family] = world.digests()
        assert not set(before.values()) & set(found[family].values())
        assert world.runtime.version > version
        world.runtime.weights[0].check_version(0)
    return found


def test_any_world_imports_what_another_exported(tmp_path: Path) -> None:
    exported = run_ranks(4, export_world, tmp_path)
    for errors in (part[1] for part in exported):
        assert all(text.startswith("InputError") and "No space left" in text for text in errors)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(SPECS)  # nothing half, nothing left over
    for world, nodes, per_node in ((2, 1, 2), (4, 2, 1)):
        imported = run_ranks(world, import_world, tmp_path, nodes, per_node)
        for family in SPECS:
            assert merged(part[family] for part in imported) == merged(part[0][family] for part in exported)
    for family in SPECS:
        _check_folder(tmp_path / family, family)


def _check_folder(folder: Path, family: str) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    total = 0
    for name in files:
        with safe_open(folder / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert sorted(file.keys()) == sorted(key for key, value in index["weight_map"].items() if value == name)
            sizes = [file.get_tensor(key).nbytes for key in file.keys()]  # noqa: SIM118
            total += sum(sizes)
            if family == "mixtral":
                assert sum(sizes) <= 1200
    assert index["metadata"]["total_size"] == total
    expected = {"gpt-oss": 1 + LAYERS, "mixtral": len(files), "qwen3-moe": 5, "deepseek": 5}
    assert len(files) == expected[family]
    assert family != "mixtral" or len(files) > 10
    names = {
        "qwen3-moe": "model.layers.6.mlp.experts.5.up_proj.weight",
        "deepseek": "model.layers.3.mlp.shared_experts.up_proj.weight",
        "mixtral": "model.layers.4.block_sparse_moe.experts.7.w3.weight",
        "gpt-oss": "model.layers.6.mlp.experts.gate_up_proj_bias",
    }
    assert names[family] in index["weight_map"]


def others_world(folder: Path) -> list[str]:
    """Only world rank 0 gives files; bad ones are an error on all ranks, before anything is written."""
    world = world_of("qwen3-moe", 1, 2)
    first = world.runtime.group.rank == 0
    others = {"config.json": b"{}", "tokenizer.json": b"[1]"} if first else None
    export(world, folder / "model", "qwen3-moe", others=others)
    bad = {"model-9.safetensors": b""} if first else None
    return [error_of(lambda: export(world, folder / "bad", "qwen3-moe", others=bad))]


def test_other_files_are_written_by_the_first_rank(tmp_path: Path) -> None:
    for errors in run_ranks(2, others_world, tmp_path):
        assert all(text.startswith("InputError") and "model-9.safetensors" in text for text in errors)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == b"[1]"


# --- one process ---


def all_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def test_layouts_are_those_of_the_published_models(tmp_path: Path) -> None:
    """Computed as the models' own code does it, from the files alone."""
    tokens = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0))
    for family, spec in SPECS.items():
        world = world_of(family)
        export(world, tmp_path / family, family)
        files, weights = all_of(tmp_path / family), world.runtime.weights[1]
        for expert, parts in enumerate(weights.homes()):
            hidden = tokens @ parts.gate_up.t() + (0 if parts.gate_up_bias is None else parts.gate_up_bias)
            ours = activate(spec.activation, hidden) @ parts.down.t()
            if family == "gpt-oss":
                of = {name: files[f"model.layers.4.mlp.experts.{name}"][expert]
                      for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")}  # fmt: skip
                both = tokens @ of["gate_up_proj"] + of["gate_up_proj_bias"]
                gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
                theirs = ((up + 1) * (gate * torch.sigmoid(gate * 1.702))) @ of["down_proj"] + of["down_proj_bias"]
                assert parts.down_bias is not None
                ours = ours + parts.down_bias
            else:
                block, matrices = (
                    ("block_sparse_moe", ("w1", "w3", "w2")) if family == "mixtral"
                    else ("mlp", ("gate_proj", "up_proj", "down_proj"))
                )  # fmt: skip
                of_layer = f"model.layers.4.{block}.experts.{expert}"
                w1, w3, w2 = (files[f"{of_layer}.{name}.weight"] for name in matrices)
                theirs = (torch.nn.functional.silu(tokens @ w1.t()) * (tokens @ w3.t())) @ w2.t()
            torch.testing.assert_close(theirs, ours)
        if family == "deepseek":
            w1, w3, w2 = (
                files[f"model.layers.4.mlp.shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            theirs = (torch.nn.functional.silu(tokens @ w1.t()) * (tokens @ w3.t())) @ w2.t()
            torch.testing.assert_close(theirs, world.model.moe[1].shared(tokens))
        router = {"mixtral": "block_sparse_moe.gate", "gpt-oss": "mlp.router"}.get(family, "mlp.gate")
        assert torch.equal(files[f"model.layers.4.{router}.weight"], world.model.moe[1].router.weight)


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_what_cannot_be_imported_says_why_and_changes_nothing(tmp_path: Path, family: str) -> None:
    folder, world = tmp_path / "model", world_of(family)
    export(world, folder, family)
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    index, path = folder / "model.safetensors.index.json", folder / "model-00002-of-00002.safetensors"
    path = path if path.exists() else folder / "model-00003-of-00004.safetensors"
    name = (
        "model.layers.4.mlp.experts.gate_up_proj"
        if family == "gpt-oss"
        else "model.layers.4.mlp.experts.2.up_proj.weight"
    )
    other = world_of(family, seed=5)
    before = other.digests()

    def refused(words: str) -> None:
        with pytest.raises(InputError, match=words):
            read(other, folder, family)
        assert other.digests() == before
        assert other.runtime.broken is None
        for file, raw in whole.items():
            file.write_bytes(raw)

    def change(change: Callable[[dict[str, Tensor]], None]) -> None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    change(lambda tensors: tensors.update({name: tensors[name][:, :-1].contiguous()}))
    shape = r"\[8, 7, 12\], required is \[8, 8, 12\]" if family == "gpt-oss" else r"\[6, 7\], required is \[6, 8\]"
    refused(rf"cannot import {name} of .*{path.name}: its shape is {shape}")
    change(lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    refused(rf"cannot import {name} of .*: its type is F8_E4M3, required")
    change(lambda tensors: tensors.pop(name))
    refused(rf"cannot read .*{path.name}: File does not contain tensor {name}")
    path.write_bytes(whole[path][:-5])
    refused(rf"cannot read .*{path.name}")
    path.unlink()
    refused(rf"cannot read .*{path.name}")
    body = json.loads(whole[index])
    index.write_text(json.dumps({"weight_map": {k: v for k, v in body["weight_map"].items() if k != name}}))
    refused(rf"has no tensor {name}; it has \d+ tensors, such as model.layers.4")
    index.write_text(json.dumps({"weight_map": {**body["weight_map"], name: f"../{folder.name}/{path.name}"}}))
    refused("which is not in its folder")
    for text in ("[]", "{", '{"weight_map": 3}', "[" * 100_000):
        index.write_text(text)
        refused("no index of safetensors")
    index.unlink()
    refused("cannot read .*index.json, nor model.safetensors")
    with pytest.raises(InputError, match=r"has no tensor model.layers.*block_sparse|has biases of experts"):
        import_safetensors(folder, other.runtime, naming_of("mixtral"), {})
    # it is all there, also in one file, and also of another type
    read(other, folder, family)
    assert other.digests() == world.digests()
    alone = tmp_path / "alone"
    alone.mkdir()
    save_file({key: value.to(torch.bfloat16) for key, value in all_of(folder).items()}, alone / "model.safetensors")
    read(other, alone, family)
    rounded = other.runtime.weights[0].get_parameter("gate_up")
    assert torch.equal(rounded, world.runtime.weights[0].get_parameter("gate_up").bfloat16().float())
    assert other.digests() != world.digests()


def test_exports_with_other_files_replace_each_other_and_nothing_else(tmp_path: Path) -> None:
    folder, world = tmp_path / "model", world_of("qwen3-moe")
    export(world, folder, "qwen3-moe", others={"config.json": b"old", "tokenizer.json": b"{}"})
    with pytest.raises(InputError, match="it exists"):
        export(world, folder, "qwen3-moe", others={"config.json": b"new"})
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"it also holds notes.txt"):
        export(world, folder, "qwen3-moe", others={"notes.txt": b"", "config.json": b""}, overwrite=True)
    assert (folder / "config.json").read_bytes() == b"old"
    (folder / "notes.txt").unlink()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(tmp_path)
    with pytest.raises(InputError, match=r"it also holds tokenizer.json"):
        export(world, folder, "qwen3-moe", overwrite=True)
    (folder / "tokenizer.json").unlink()
    export(world, folder, "qwen3-moe", others={"config.json": b"new"}, overwrite=True)
    names = {path.name for path in folder.iterdir()}
    assert (folder / "config.json").read_bytes() == b"new"
    assert "tokenizer.json" not in names
    read(world_of("qwen3-moe", seed=5), folder, "qwen3-moe")
    index = folder / "model.safetensors.index.json"
    body = json.loads(index.read_text())
    assert body["metadata"]["other_files"] == ["config.json"]
    for text in ("{", json.dumps({**body, "metadata": {}}), json.dumps({**body, "metadata": {"other_files": 3}})):
        index.write_text(text)  # nobody says that config.json is ours
        with pytest.raises(InputError, match=r"it also holds config.json"):
            export(world, folder, "qwen3-moe", overwrite=True)
    weights = ["model.safetensors", "model-00001-of-00002.safetensors", "Model.safetensors.index.json"]
    for name in ("", ".", "..", "a/b", "/a", "a\0b", *weights):
        with pytest.raises(InputError, match="must be a plain file name"):
            export(world, tmp_path / "bad", "qwen3-moe", others={name: b""})
    with pytest.raises(InputError, match="its content is str, not bytes"):
        export(world, tmp_path / "bad", "qwen3-moe", others={"config.json": "{}"})
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_exports_replace_only_exports(tmp_path: Path) -> None:
    folder, world = tmp_path / "model", world_of("qwen3-moe")
    with pytest.raises(InputError, match="does not exist"):
        export(world, tmp_path / "no" / "model", "qwen3-moe")
    export(world, folder, "qwen3-moe")
    with pytest.raises(InputError, match="it exists"):
        export(world, folder, "qwen3-moe")
    with torch.no_grad():
        world.model.embed.weight.zero_()
    export(world, folder, "qwen3-moe", overwrite=True)
    assert not all_of(folder)["model.embed.weight"].any()
    (folder / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"it also holds config.json"):
        export(world, folder, "qwen3-moe", overwrite=True)
    assert (folder / "config.json").exists()
    (folder / "config.json").unlink()
    (folder / "model-00009-of-00009.safetensors").mkdir()
    with pytest.raises(InputError, match=r"it also holds model-00009"):
        export(world, folder, "qwen3-moe", overwrite=True)
    (folder / "model-00009-of-00009.safetensors").rmdir()
    for family, spec, words in (
        ("mixtral", "deepseek", "has a bias that chooses experts"),
        ("qwen3-moe", "gpt-oss", "has a bias of router logits"),
        ("gpt-oss", "deepseek", "has a bias that chooses experts"),
    ):
        with pytest.raises(InputError, match=words):
            export(world_of(spec), tmp_path / "other", family)
    biased = make_world(1, 1, spec=MoESpec(**SHAPE, expert_bias=True))
    with pytest.raises(InputError, match="has biases of experts, which this naming has no name for"):
        export(biased, tmp_path / "other", "qwen3-moe")
    naming = naming_of("olmoe").with_layers([1])
    with pytest.raises(InputError, match="no model layer for MoE layer 1"):
        export_safetensors(tmp_path / "other", world.runtime, naming, {})
    taken = {"model.layers.0.mlp.experts.0.up_proj.weight": torch.ones(1)}
    with pytest.raises(InputError, match=r"two tensors would be called model.layers.0"):
        export_safetensors(tmp_path / "other", world.runtime, naming_of("olmoe"), taken)
    with pytest.raises(InputError, match="no naming 'bert': use one of qwen3-moe, olmoe"):
        naming_of("bert")
    with pytest.raises(InputError, match="max_file_bytes"):
        export(world, tmp_path / "other", "qwen3-moe", max_file_bytes=0)
    world.runtime.broken = "a migration was cut off"
    with pytest.raises(BrokenStateError, match="cannot export"):
        export(world, tmp_path / "other", "qwen3-moe")
    with pytest.raises(BrokenStateError, match="cannot import"):
        read(world, folder, "qwen3-moe")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
