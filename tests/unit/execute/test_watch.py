"""The watch: a rank that is lost becomes an error with its cause, on every rank, in time."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from time import monotonic, sleep

import pytest
import torch
import torch.distributed as dist

from equilibra.core.errors import RankLostError
from equilibra.execute import watch as watch_module
from equilibra.execute.group import lost_rank_is_an_error
from equilibra.execute.watch import Watch

TIMEOUT_S = 0.4


@pytest.fixture
def ranks():
    store = dist.HashStore()
    watches = [Watch(rank=rank, world=3, timeout_s=TIMEOUT_S, store=store, tick_s=0.01) for rank in range(3)]
    yield watches
    for watch in watches:
        watch.close()


def error_of(watch: Watch, what: str = "dispatch", limit_s: float = 5.0) -> str:
    """What the next calls of a group would raise."""
    end = monotonic() + limit_s
    while monotonic() < end:
        try:
            watch.check(what)
        except RankLostError as error:
            return str(error)
        sleep(0.01)
    raise AssertionError("nothing was noticed")


def test_all_ranks_hear_why_one_failed(ranks):
    for watch in ranks:
        watch.expect("dispatch", "dispatching tokens", lambda: False)
    ranks[1].fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."))
    for rank in (0, 2):
        said = error_of(ranks[rank])
        assert "rank 1 failed with OutOfMemoryError: CUDA out of memory. Tried to allocate" in said
        assert "alive" not in said, "which rank failed is known: there is nobody to ask for"
        assert "does not answer" not in said


def test_a_call_that_cannot_finish_is_a_cause(ranks):
    assert "planning did not finish: rank 1 cannot finish planning; look for" in str(ranks[1].lost("planning"))
    assert "saving did not finish: rank 1 cannot finish planning" in str(ranks[2].lost("saving"))


def test_a_rank_that_never_used_a_device_asks_nobody(ranks):
    """Ranks without threads answer no roll call: all would seem gone."""
    assert "does not answer" not in str(ranks[0].lost("planning", "waited too long"))


def test_what_takes_longer_than_the_timeout_is_named(ranks):
    ranks[0].expect("dispatch", "dispatching tokens of MoE layer 3", lambda: False)
    for rank in (1, 2):
        ranks[rank].expect("dispatch", "something that is done", lambda: True)
    start = monotonic()
    text = error_of(ranks[0])
    assert monotonic() - start >= TIMEOUT_S / 2
    assert "waited for dispatching tokens of MoE layer 3 longer than the timeout of 0.4 s" in text
    assert "the processes of all ranks are alive" in text
    assert "rank 0 waited for dispatching tokens of MoE layer 3" in error_of(ranks[2])


def test_ranks_that_do_not_answer_are_named(ranks):
    ranks[0].expect("dispatch", "dispatching tokens", lambda: False)
    ranks[2].expect("dispatch", "dispatching tokens", lambda: False)
    assert "rank 1 does not answer" in error_of(ranks[0])


STORE = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("planned", [True, False])
def test_a_store_whose_process_is_stopped_holds_up_nobody(planned, monkeypatch):
    """A TCPStore's own timeout does not end a call to a stopped process."""
    monkeypatch.setattr(watch_module, "STORE_S", 0.5)
    command = [sys.executable, "-c", STORE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        store = dist.TCPStore("127.0.0.1", int(process.stdout.readline()))
        store.set_timeout(timedelta(seconds=0.5))
        watch = Watch(rank=1, world=2, timeout_s=TIMEOUT_S, store=store, tick_s=0.01)
        process.send_signal(signal.SIGSTOP)
        if planned:  # the thread that looks for causes must not wait for the store either
            watch.expect("dispatch", "dispatching tokens", lambda: False)
        said = queue.Queue()
        threading.Thread(target=lambda: said.put(watch.lost("dispatch")), daemon=True).start()
        try:
            assert "dispatch did not finish: rank 1 cannot finish dispatch" in str(said.get(timeout=20))
        finally:
            watch.close()
            process.kill()


def test_time_is_counted_from_when_the_last_one_was_done(ranks):
    done: list[bool] = []
    for number in range(4):
        ranks[0].expect("dispatch", f"exchange {number}", lambda number=number: len(done) > number)
    for _ in range(4):
        sleep(TIMEOUT_S / 2)
        ranks[0].check("dispatch")
        done.append(True)
    sleep(1.5 * TIMEOUT_S)
    ranks[0].check("dispatch")


def test_signals_are_raised_again_and_again_until_they_are_forgotten(ranks):
    released: list[float] = []
    release = lambda: released.append(monotonic())  # noqa: E731
    ranks[0].release_with(release)
    ranks[0].expect("returns", "gradients", lambda: False)
    ranks[1].fail(ValueError("a defect"))
    error_of(ranks[0])
    before = len(released)
    sleep(0.1)
    assert len(released) > before > 0  # what a stream writes later must not make others wait again
    ranks[0].forget(release)
    sleep(0.05)
    after = len(released)
    sleep(0.1)
    assert len(released) == after


def test_the_host_waits_no_longer_than_the_timeout(ranks):
    start = monotonic()
    with pytest.raises(RankLostError, match="publishing weights did not finish: rank 2 waited for publishing weights"):
        ranks[2].until(lambda: False, "publishing weights")
    assert TIMEOUT_S <= monotonic() - start < TIMEOUT_S + 3
    assert "planning did not finish: rank 2 waited for publishing weights" in str(ranks[0].lost("planning"))


def test_a_device_that_does_not_answer_is_noticed():
    asked = threading.Event()
    watch = Watch(rank=0, world=2, timeout_s=TIMEOUT_S, tick_s=0.01)
    watch.expect("dispatch", "dispatching", lambda: asked.wait(30))  # CUDA, while it loads a kernel
    start = monotonic()
    assert "rank 0 waited for dispatching longer than the timeout" in error_of(watch)
    assert monotonic() - start < TIMEOUT_S + 3
    asked.set()
    watch.close()


def test_a_call_of_the_host_that_does_not_return_is_noticed():
    watch = Watch(rank=0, world=2, timeout_s=TIMEOUT_S, tick_s=0.01)
    with watch.during("connecting two ranks", torch.device("cpu")):
        assert "rank 0 waited for connecting two ranks longer than the timeout" in error_of(watch)
    watch.close()
    quick = Watch(rank=0, world=2, timeout_s=TIMEOUT_S, tick_s=0.01)
    with quick.during("connecting two ranks", torch.device("cpu")):
        pass
    sleep(3 * TIMEOUT_S)
    quick.check("the next call")
    quick.close()


def test_without_a_store_every_rank_is_on_its_own():
    watch = Watch(rank=0, world=2, timeout_s=TIMEOUT_S, tick_s=0.01)
    watch.expect("dispatch", "dispatching", lambda: False)
    assert "rank 0 waited for dispatching" in error_of(watch)
    watch.close()


def test_a_store_that_is_gone_is_no_failure():
    class Gone:
        def check(self, _keys):
            raise dist.DistNetworkError("connection reset by peer")

    watch = Watch(rank=0, world=2, timeout_s=60, store=Gone(), tick_s=0.01)
    watch.expect("dispatch", "dispatching", lambda: False)
    sleep(0.1)
    watch.check("dispatch")
    watch.close()
    assert not any(thread.name.startswith("equilibra-watch") for thread in threading.enumerate())


def test_a_device_that_fails_is_the_cause():
    def failed() -> bool:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    watch = Watch(rank=3, world=4, timeout_s=60, tick_s=0.01)
    watch.expect("dispatch", "dispatching", failed)
    assert "rank 3 failed with AcceleratorError: CUDA error: an illegal memory access" in error_of(watch)
    watch.close()


class Communicator:
    """As far as the watch knows NCCL."""

    def __init__(self, met: threading.Barrier, error: str = "ErrorType.SUCCESS") -> None:
        self.met, self.error, self.aborted = met, error, False

    def get_error(self) -> str:
        return self.error

    def abort(self) -> None:
        self.met.wait(5)  # each waits for the device, which waits for the others
        self.aborted = True


def test_all_communicators_are_aborted_when_one_is_broken():
    met = threading.Barrier(2)
    backends = [Communicator(met), Communicator(met, "ErrorType.COMM_ERROR")]
    watch = Watch(rank=2, world=4, timeout_s=60, backends=backends, tick_s=0.01)
    watch.expect("dispatch", "dispatching", lambda: False)
    assert "rank 2 found a communicator broken (COMM_ERROR)" in error_of(watch)
    watch.close()  # the watch may still be aborting when the error is raised
    assert all(backend.aborted for backend in backends)


def test_nothing_is_aborted_where_nothing_is_wrong():
    backend = Communicator(threading.Barrier(1))
    watch = Watch(rank=2, world=4, timeout_s=60, backends=[backend], tick_s=0.01)
    watch.expect("dispatch", "dispatching", lambda: False)
    sleep(0.1)
    watch.check("dispatch")
    watch.close()
    assert not backend.aborted


def test_out_of_memory_is_no_lost_rank():
    nccl = "NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"
    with pytest.raises(dist.DistBackendError, match="out of memory"), lost_rank_is_an_error("dispatching tokens"):
        raise dist.DistBackendError(nccl)
    with pytest.raises(torch.OutOfMemoryError, match="20 GiB"), lost_rank_is_an_error("dispatching tokens"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    with pytest.raises(RankLostError, match="dispatching tokens"), lost_rank_is_an_error("dispatching tokens"):
        raise dist.DistBackendError("NCCL communicator was aborted")
