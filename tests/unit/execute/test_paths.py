"""Paths of flash copies that a machine cannot have are refused before anything runs."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

torch = pytest.importorskip("torch")


from equilibra.core.errors import InputError  # noqa: E402
from equilibra.core.placement import Cluster, contiguous  # noqa: E402
from equilibra.core.plan import Stage  # noqa: E402
from equilibra.core.visit import VisitKey  # noqa: E402
from equilibra.cost.rates import Rates  # noqa: E402
from equilibra.execute.copies.copies import Copies  # noqa: E402
from equilibra.execute.copies.device import DeviceEngine  # noqa: E402
from equilibra.execute.copies.device_paths import share_a_gpu  # noqa: E402
from equilibra.execute.copies.transfer import Path  # noqa: E402
from equilibra.execute.experts import MoESpec  # noqa: E402
from equilibra.execute.group import Ready, join_expert_group  # noqa: E402
from equilibra.execute.moe import BalancedMoE  # noqa: E402
from equilibra.execute.runtime import CopySetting, Runtime  # noqa: E402
from equilibra.execute.steps.balancer import Balancer, BalancerSetting  # noqa: E402
from equilibra.trace.routing import RoutingTrace  # noqa: E402

ALONE = Cluster(num_nodes=1, ranks_per_node=1)


def balancer_on(path: Path) -> Balancer:
    setting = CopySetting(path=dict.fromkeys(Stage, path))
    runtime = Runtime(join_expert_group(ALONE), contiguous(ALONE, num_layers=1, num_experts=4), setting)
    BalancedMoE(MoESpec(hidden=8, expert_ffn=8, num_experts=4, top_k=2), runtime)
    return Balancer(runtime, BalancerSetting(tokens_per_rank=8, rates=Rates.free()))


@pytest.mark.parametrize("path", [Path.IPC, Path.BOTH])
def test_paths_between_gpus_are_refused_without_them(path):
    ids = np.array([[[0, 1]], [[2, 3]]], np.uint8)
    routing = RoutingTrace(ids=ids, offsets=np.array([0, 2], np.int64), num_experts=4)
    with pytest.raises(InputError, match="needs GPUs, and experts are on cpu: use collective or host"):
        balancer_on(path).begin(routing)


def test_auto_without_gpus_is_collective():
    ids = np.array([[[0, 1]], [[2, 3]]], np.uint8)
    balancer = balancer_on(Path.AUTO)
    balancer.begin(RoutingTrace(ids=ids, offsets=np.array([0, 2], np.int64), num_experts=4))
    assert set(balancer.runtime._copies._engines) == {Path.COLLECTIVE}


@pytest.mark.parametrize(("late", "works", "chosen"), [
    (frozenset(), True, ["ipc", "ipc"]), ({Stage.UPDATE}, True, ["ipc", "both"]),
    (set(Stage), False, ["host", "collective"]),
])  # fmt: skip
def test_auto_on_gpus_follows_the_plan(late, works, chosen):
    copies = Copies.__new__(Copies)
    copies._row, copies._ipc_works = SimpleNamespace(device=torch.device("cuda")), works
    copies.armed = SimpleNamespace(late=late)
    assert [copies._chosen(Path.AUTO, stage) for stage in Stage] == chosen
    assert copies._chosen(Path.COLLECTIVE, Stage.UPDATE) is Path.COLLECTIVE


class Engine:
    """Writes down what a DeviceEngine would queue."""

    def __init__(self):
        self.told, self.queued = [], False

    def gradient_slots(self, copies):
        return torch.zeros(0, 1)

    def give_back(self, copies):
        return SimpleNamespace(wait=lambda: self._add(copies)) if copies.num_in_node else Ready()

    def _add(self, copies):
        self.finish_sums()
        self.told.append(f"sum {copies.layer}")
        self.queued = True

    def finish_sums(self):
        if self.queued:
            self.told.append("waited")
        self.queued = False


def test_nothing_is_added_to_a_layer_while_its_copies_are():
    copies, engine = Copies.__new__(Copies), Engine()
    copies._engines, copies._path = {Path.IPC: engine}, dict.fromkeys(Stage, Path.IPC)
    copies._returning, copies._summing, copies.recorder = None, set(), MagicMock()
    copies._row, copies.weights = torch.zeros(1), MagicMock()
    nothing = np.zeros(0, np.int32)
    copies.list_of = lambda where: SimpleNamespace(
        layer=where.layer, num_in_node=3 * (where.layer == 2), held_expert=nothing, held_origin=nothing
    )
    for micro_batch in range(2):
        for layer in (2, 1, 0):  # only the last layer has copies
            where = VisitKey(Stage.UPDATE, micro_batch, layer)
            copies.flash_gradients(where)
            engine.told.append(f"compute {layer}")
            copies.send_gradients(where)
    copies.finish_returns()
    assert engine.told == 2 * ["compute 2", "sum 2", "compute 1", "compute 0", "waited"]


@pytest.mark.parametrize("share", [0.0, 1.0, 2, "a"])
def test_a_share_of_the_host_link_must_be_a_part(share):
    with pytest.raises(InputError, match="host_share must be a number more than 0 and below 1"):
        CopySetting(host_share=share)


def test_streams_that_wait_for_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(InputError, match="unset it, or use the collective path"):
        DeviceEngine(join_expert_group(ALONE), torch.zeros(2, 1, 4), torch.zeros(4), path=None)


@pytest.mark.parametrize(("names", "shared"), [("aaab", False), ("bbaa", True), ("aaaa", True), ("abab", False)])
def test_ranks_share_a_gpu_if_all_of_the_node_name_the_same(monkeypatch, names, shared):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=f"GPU-{names[2]}"))
    said = []

    def gather_text(text, what):
        said.append(text)
        return [f"GPU-{name}" for name in names]

    cluster = Cluster(num_nodes=2, ranks_per_node=2)
    group = SimpleNamespace(index=0, num_ranks=4, first_of_node=2, cluster=cluster, gather_text=gather_text)
    assert share_a_gpu(group, torch.zeros(1)) is shared  # of ranks 2 and 3
    assert said == [f"GPU-{names[2]}"]


def test_more_slots_than_anything_could_hold_are_refused():
    assert CopySetting(spare_slots=4096, prefetch_depth=0).spare_slots == 4096
    for wrong in ({"spare_slots": 4097}, {"prefetch_depth": 4097}, {"spare_slots": -1}):
        with pytest.raises(InputError, match="4096"):
            CopySetting(**wrong)
