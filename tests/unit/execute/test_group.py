"""A group's calls on one rank: which of them are watched, and what a machine without a GPU is asked."""

from time import monotonic, sleep

import pytest
import torch
import torch.distributed as dist

from equilibra.core.errors import RankLostError
from equilibra.core.placement import Cluster
from equilibra.execute.group import Channel, ExpertGroup, device_name
from equilibra.execute.watch import Watch


class Backend:
    """As far as a group knows gloo or NCCL."""

    def __init__(self, name):
        self.said = name

    def _get_backend(self, _device):
        return self

    def name(self):
        return self.said

    def get_error(self):
        return "ErrorType.SUCCESS"

    def abort(self): ...


def call(backend, takes_s):
    """A collective whose call takes so long on the host, as NCCL's do while they connect ranks."""
    watch = Watch(rank=0, world=2, timeout_s=0.1, tick_s=0.01)
    channels = {Channel.DISPATCH: Backend(backend)}
    group = ExpertGroup(cluster=Cluster(ranks_per_node=2), channels=channels, watch=watch)
    made = []

    def collective(**_):
        end = monotonic() + takes_s
        while monotonic() < end and watch.cause is None:
            sleep(0.01)
        made.append(1)

    group._start(Channel.DISPATCH, "dispatching", (torch.zeros(1),), collective, lambda *_: None)
    assert made == [1]
    try:
        watch.check("the next call")
    finally:
        watch.close()


def test_a_call_of_nccl_that_does_not_return_is_noticed():
    call(dist.Backend.NCCL, 0.0)
    with pytest.raises(RankLostError, match=r"rank 0 waited for dispatching longer than the timeout of 0\.1 s"):
        call(dist.Backend.NCCL, 5.0)


def test_a_call_of_gloo_has_its_own_timeout():
    call(dist.Backend.GLOO, 0.3)


def test_only_gpus_have_names():
    assert device_name(None) is None
    assert device_name(torch.device("cpu")) is None
    assert device_name(torch.device("meta")) is None


def test_a_process_alone_is_rank_zero():
    group = ExpertGroup(cluster=Cluster(ranks_per_node=1), channels={})
    assert "planning did not finish: rank 0 cannot finish planning" in str(group.watch.lost("planning"))
