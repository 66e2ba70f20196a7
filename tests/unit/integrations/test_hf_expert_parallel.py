"""transformers' own expert parallelism under plans: losses and gradients are those without one."""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.distributed.ranks import run_ranks
from tests.references.hf_models import save_small

if importlib.util.find_spec("accelerate") is None:
    pytest.skip("transformers distributes models with accelerate only: pip install accelerate", allow_module_level=True)

from tests.distributed.hf_parallel import check, reference
from transformers import AutoModelForCausalLM
from transformers.distributed.expert_parallel import EpDispatchExpertsParallel

from equilibra.core.errors import InputError
from equilibra.core.placement import Cluster, Placement
from equilibra.core.visit import VisitKey, only_homes
from equilibra.integrations.hf.expert_parallel import known_or_live, register_expert_parallel, to_slots
from equilibra.integrations.planned import SlotCounts, slot_table

CLOSE = 2e-5
"""float32, sums in another order"""


def run(family, world, ep, folder, runs):
    save_small(family, folder)
    wanted = reference(folder, world)
    return wanted, run_ranks(world, check, folder, world, ep, wanted, runs, timeout_s=200)


def close(found):
    assert found.get("live", 0.0) == 0.0, "without a step nothing is different"
    return max(found[kind] for kind in ("loss", "experts", "dense")) < CLOSE


def test_two_ranks_train_as_without_a_plan(tmp_path):
    runs = ["planned, checkpointing, refusals", "dropped", "remedy"]
    _, every = run("qwen3_moe", 2, 2, tmp_path, runs)
    for found in every:
        assert close(found["unplanned"]), found
        assert close(found[runs[0]]), found
        assert found[runs[0]]["copies"] > 0
        assert found[runs[0]]["imbalance"] < 1.1
        assert found["dropped"]["experts"] > 0.1, "gradients of copies matter"
        assert close(found["remedy"]), found
        refused = found[runs[0]]["refusals"]
        assert "planned already" in refused["twice"]
        assert "register_expert_parallel() first" in refused["plain"]
        assert "has routing of 1 layers" in refused["layers"]
        assert "arm the one that begin() returned last" in refused["over"]
        assert "got 24 tokens, 5 were given" in refused["tokens"]
        assert "forward 2 of MoE layer 0 has no plan" in refused["too many"]
        assert "run backward of each micro-batch once before" in refused["two at once"]
        assert "after its end(): call" in refused["ended"]


def test_four_ranks_in_two_groups_train_and_save_as_one_process(tmp_path):
    (_, _, weights), every = run("qwen3_moe", 4, 2, tmp_path, ["planned, saved"])
    for found in every:
        assert close(found["unplanned"]), found
        assert close(found["planned, saved"]), found
        assert found["planned, saved"]["copies"] > 0
    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).named_parameters())
    assert saved.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(saved[name].detach(), weight, rtol=1e-4, atol=1e-5)


def test_experts_with_biases(tmp_path):
    _, every = run("gpt_oss", 2, 2, tmp_path, ["planned", "static"])
    for found in every:
        assert close(found["planned"]), found
        assert found["planned"]["copies"] > 0
        assert found["static"]["copies"] == 0
        assert close(found["static"]), found


def test_another_transformers_is_refused(monkeypatch):
    def renamed(self, hidden_states, routing): ...

    monkeypatch.setattr(EpDispatchExpertsParallel, "_dispatch_tokens", renamed)
    with pytest.raises(InputError, match="its _dispatch_tokens takes"):
        register_expert_parallel()
    monkeypatch.delattr(EpDispatchExpertsParallel, "_dispatch_tokens")
    with pytest.raises(InputError, match="takes None"):
        register_expert_parallel()


def test_pairs_go_to_the_slots_of_their_experts():
    # two ranks of two homes and one copy slot: a copy of expert 0 on rank 1 takes 2 pairs, the other slot is empty
    homes = np.array([[0, 0, 1, 1]], np.int32)
    plain = only_homes(Placement(home_of_expert=homes, cluster=Cluster(ranks_per_node=2)), VisitKey.once(0))
    visit = replace(
        plain, flash_expert=np.array([0], np.int32), flash_rank=np.array([1], np.int32),
        flash_origin=np.array([0], np.int32), flash_tokens_FR=np.array([[2, 0]], np.int32),
    )  # fmt: skip
    slots = slot_table(visit, np.array([[0, 1], [2, 3]], np.int32), SlotCounts(standing=0, flash=1), 0, range(2))
    assert slots.flash.served_expert.tolist() == [0]
    assert slots.flash.served_sizes == [0, 1]
    experts = torch.tensor([[0, 2], [3, 0], [0, 1], [1, 3], [2, 0]])
    assert to_slots(experts, slots).tolist() == [[5, 3], [4, 5], [0, 1], [1, 4], [3, 0]]
    assert to_slots(experts[:0], slots).shape == (0, 2)
    few = torch.tensor([[0, 3]])
    assert to_slots(few, slots).tolist() == [[5, 4]], "fewer pairs than planned"


def test_rows_without_known_experts_are_routed_live():
    ids = torch.tensor([[0, 2], [1, 1], [-1, 3], [3, 1]], dtype=torch.int32)
    assert known_or_live(ids).tolist() == [[0, 2], [-1, -1], [-1, -1], [3, 1]]
