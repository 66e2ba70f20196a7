"""Every check, on this machine, on pretended ones, and with what it needs made to fail."""

import sys
import types

import pytest
import torch

from equilibra.doctor import devices, memory, node, software
from equilibra.doctor.finding import Ask, Finding, State, first_line, guarded

GIB = 2**30
NEED_GPU = [
    "gpu",
    "sharing a gpu",
    "peer access",
    "nvlink",
    "pinned memory",
    "registering",
    "cuda ipc",
    "stream values",
]


def check(name: str, ask: Ask | None = None) -> list[Finding]:
    found = node.answer(name, ask or Ask())["findings"]
    return [Finding(**{**one, "state": State(one["state"])}) for one in found]


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine that says it has two GPUs; nothing can be run on them."""
    about = types.SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((70 if index else 10) * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)


@pytest.mark.parametrize("name", NEED_GPU)
def test_without_a_gpu_nothing_is_claimed(no_gpu, name):
    (found,) = check(name)
    assert (found.state, found.text) == (State.NOT_TESTED, "no GPU here")


@pytest.mark.parametrize("name", sorted(node.CHECKS))
def test_a_check_that_raises_is_a_finding(monkeypatch, name):
    def breaks(*_):
        raise RuntimeError("\n  the device fell off the bus\nat line 3")

    monkeypatch.setitem(node.CHECKS, name, node.CHECKS[name]._replace(run=breaks, on_gpu=False))
    (found,) = check(name)
    assert found.name == name
    assert found.state is node.CHECKS[name].on_error
    assert found.text == "RuntimeError: the device fell off the bus"


@pytest.mark.parametrize("name", sorted(set(node.CHECKS) - {"python", "locked memory", "shared memory"}))
def test_without_torch_every_check_still_answers(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "torch", None)
    for module in [one for one in sys.modules if one.startswith(("torch.", "equilibra.execute"))]:
        monkeypatch.delitem(sys.modules, module)
    (found,) = check(name)
    assert found.state is State.MISSING
    assert "torch" in found.text


def test_without_torch_shared_memory_is_still_looked_at(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (found,) = check("shared memory", Ask(model="olmoe"))
    assert found.values["ranks_per_node"] == memory.RANKS_WITHOUT_GPUS


@pytest.mark.parametrize("name", ["pinned memory", "registering", "cuda ipc", "stream values", "nccl"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="these fail only without a GPU")
def test_what_is_tried_and_fails_is_missing(two_gpus, name):
    (found,) = check(name)
    assert found.state is State.MISSING
    assert found.text


def test_python_and_torch_here():
    assert check("python")[0].state is State.OK
    assert check("torch")[0].state in (State.OK, State.WARNING)
    assert torch.__version__ in check("torch")[0].text


@pytest.mark.parametrize(
    ("version", "state"), [("2.10.1+cu128", State.MISSING), ("2.11.0", State.OK), ("3.0", State.OK)]
)
def test_an_old_torch_is_missing(monkeypatch, version, state):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(software, "_has_driver", lambda: False)
    assert check("torch")[0].state is state


def test_a_torch_without_cuda_on_a_machine_with_a_driver(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(software, "_has_driver", lambda: True)
    found = check("torch")[0]
    assert found.state is State.WARNING
    assert "built for CUDA" in found.advice


def test_an_old_python(monkeypatch):
    monkeypatch.setattr(software, "LEAST_PYTHON", (9, 0))
    assert check("python")[0].state is State.MISSING


@pytest.mark.parametrize(
    ("driver_is", "runtime", "state"),
    [
        ((13, 0), "13.0", State.OK),
        ((12, 8), "12.9", State.OK),
        ((12, 8), "13.0", State.MISSING),
        ((12, 8), None, State.OK),
    ],
)
def test_the_driver_against_the_runtime(monkeypatch, driver_is, runtime, state):
    monkeypatch.setattr(software, "load_driver", object)
    monkeypatch.setattr(software, "driver_version", lambda _: driver_is)
    monkeypatch.setattr(torch.version, "cuda", runtime)
    assert check("cuda")[0].state is state


def test_no_driver(monkeypatch):
    monkeypatch.setattr(devices, "LIBRARY", "libno-such-thing.so.1")
    assert check("cuda")[0].state is State.NOT_TESTED


@pytest.mark.parametrize("name", ["is_available", "is_gloo_available"])
def test_gloo_tried_and_not_there(monkeypatch, name):
    assert check("gloo")[0].state is State.OK
    monkeypatch.setattr(torch.distributed, name, lambda: False)
    assert check("gloo")[0].state is State.MISSING


def test_a_gloo_that_sums_wrongly_or_not_at_all(monkeypatch):
    monkeypatch.setattr(software, "_gloo_sum", lambda store, rank: 2.0)
    assert "[2.0, 2.0]" in check("gloo")[0].text
    assert check("gloo")[0].state is State.MISSING

    def refused(store, rank):
        raise RuntimeError("[enforce fail at device.cc] unable to find interface for: 0.0.0.0")

    monkeypatch.setattr(software, "_gloo_sum", refused)
    assert check("gloo")[0].state is State.MISSING
    assert "unable to find interface" in check("gloo")[0].text


def test_two_gpus_are_two_findings_and_a_busy_one_is_a_warning(two_gpus):
    found = check("gpu")
    assert [(one.name, one.state) for one in found] == [("gpu 0", State.WARNING), ("gpu 1", State.OK)]
    assert "NVIDIA H100 80GB HBM3, 70.0 of 80.0 GiB free, sm_90" in found[1].text


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees the GPU")
def test_a_driver_that_torch_cannot_use_is_said(no_gpu, monkeypatch):
    monkeypatch.setattr(devices, "load_driver", object)
    (found,) = check("gpu")
    assert found.state is State.MISSING
    assert "there is an NVIDIA driver, but" in found.text
    assert found.advice


def test_peers(two_gpus, monkeypatch):
    assert devices.check_peers().state is State.OK
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) != (1, 0))
    found = devices.check_peers()
    assert found.state is State.MISSING
    assert "1 of 2 pairs have none: 1→0" in found.text
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert devices.check_peers().state is State.NOT_TESTED


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({}, ""),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, ""),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"}, "PYTORCH_ALLOC_CONF"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_expandable_segments(monkeypatch, setting, said):
    for name in devices.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    assert devices.expandable_segments() == said


def test_ipc_that_works_fails_or_is_in_doubt(two_gpus, monkeypatch):
    for name in devices.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "_shared", lambda: "shared")
    assert devices.check_ipc().state is State.OK
    monkeypatch.setenv(devices.SETTINGS[0], "expandable_segments:True")
    assert devices.check_ipc().state is State.WARNING

    def fails():
        raise RuntimeError("CUDA error: invalid resource handle\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(devices, "_shared", fails)
    found = devices.check_ipc()
    assert found.state is State.MISSING
    assert "invalid resource handle" in found.text
    assert "expandable_segments" in found.advice


class FakeDriver:
    """Records calls; answers with a code."""

    def __init__(self, code: int, names: tuple[str, ...]) -> None:
        self.calls: list[str] = []
        self.cuGetErrorName = lambda code, word: 1
        for name in names:
            setattr(self, name, lambda *arguments, name=name: (self.calls.append(name), code)[1])


def test_the_driver_is_asked_by_its_second_version_where_there_is_one():
    stream, flag = types.SimpleNamespace(cuda_stream=1), torch.zeros(1, dtype=torch.int64)
    both = FakeDriver(0, ("cuStreamWaitValue64", "cuStreamWaitValue64_v2"))
    devices._value(both, "Wait", stream, flag, 0)
    assert both.calls == ["cuStreamWaitValue64_v2"]
    first = FakeDriver(801, ("cuStreamWriteValue64",))
    with pytest.raises(devices.DriverError, match=r"cuStreamWriteValue64 returned 801 \(unknown\)"):
        devices._value(first, "Write", stream, flag, 0)


def test_a_stream_that_never_moves_is_given_up(monkeypatch):
    monkeypatch.delenv(devices.QUEUES, raising=False)
    assert (devices._stuck().state, devices._stuck().advice) == (State.MISSING, "")
    monkeypatch.setenv(devices.QUEUES, "1")
    assert "unset it" in devices._stuck().advice
    assert not devices._happens(types.SimpleNamespace(query=lambda: False), 0.02)
    assert devices._happens(types.SimpleNamespace(query=lambda: True), 0.02)


def test_errors_in_one_line():
    assert first_line(RuntimeError("a\nb")) == "RuntimeError: a"
    assert first_line("\n\n  x \n y") == "x"
    assert len(first_line("x" * 1000)) == 200
    assert first_line("") == ""


def test_an_import_that_fails_is_missing_even_where_things_are_only_read():
    def check():
        raise ImportError("No module named 'triton'")

    assert guarded("x", check, on_error=State.NOT_TESTED)[0].state is State.MISSING
    with pytest.raises(KeyboardInterrupt):
        guarded("x", lambda: (_ for _ in ()).throw(KeyboardInterrupt), on_error=State.MISSING)
