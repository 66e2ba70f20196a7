"""The ipc path without GPUs: on which device memory is opened, and what is said where GPUs cannot reach each other."""

from types import SimpleNamespace

import pytest
import torch

from equilibra.core.errors import ExecuteError
from equilibra.execute.copies import device_paths


def test_memory_is_opened_on_the_own_device_not_at_the_senders_number(monkeypatch):
    asked = []

    def new_shared(device, *rest):
        asked.append((device, rest))
        return torch.zeros(6).untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", new_shared, raising=False)
    handle = {"storage": [3, "AAE=", 24, 0, "Ag==", 0, "Aw==", True], "offset": 2, "shape": [2, 2]}
    found = device_paths.opened(handle, torch.float32, torch.device("cuda", 1))
    assert asked == [(1, (b"\x00\x01", 24, 0, b"\x02", 0, b"\x03", True))]
    assert found.shape == (2, 2)
    assert found.storage_offset() == 2


def node(names: list[str], rank: int) -> SimpleNamespace:
    """A group as far as `check_peers` knows it: the ranks of one node, and what they say."""
    return SimpleNamespace(
        rank=rank, index=0, num_ranks=len(names), first_of_node=0, cluster=SimpleNamespace(ranks_per_node=len(names)),
        gather_text=lambda _mine, what: names,
        all_succeed=lambda attempt, what: attempt(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("names", "seen", "pairs", "wrong"),
    [
        (["a", "b"], ["a", "b"], {(0, 1), (1, 0)}, ""),
        (["a", "b"], ["a", "b"], set(), "rank 0 (GPU 0) cannot read the memory of rank 1 (GPU 1)"),
        (["a", "b"], ["b", "a"], {(1, 0)}, ""),  # another order of the same GPUs: names count
        (["a", "b"], ["a"], set(), ""),  # the other one cannot be seen: opening its memory tells
        (["a", "a"], ["a", "b"], set(), ""),  # both ranks are on one GPU
    ],
)
def test_peer_access_is_asked_for_where_it_can_be(names, seen, pairs, wrong, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=seen[getattr(i, "index", i)])
    )
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: (own, peer) in pairs)
    device = torch.device("cuda", seen.index(names[0]))
    if wrong:
        with pytest.raises(ExecuteError, match="no peer access") as error:
            device_paths.check_peers(node(names, 0), device)
        assert wrong in str(error.value)
    else:
        device_paths.check_peers(node(names, 0), device)
