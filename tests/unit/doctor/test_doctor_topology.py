"""What nvidia-smi prints, read tolerantly."""

import subprocess

import pytest

from equilibra.doctor import devices
from equilibra.doctor.devices import check_nvlink, check_sharing, link_rates
from equilibra.doctor.finding import State

FOUR_H100 = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tNV18\tPIX\tNODE\t0-55,112-167\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNV18\tNODE\tNODE\t0-55,112-167\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tNV18\tSYS\tSYS\t56-111,168-223\t1\t\tN/A\n"
    "GPU3\tNV18\tNV18\tNV18\t X \tSYS\tSYS\t56-111,168-223\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tSYS\tSYS\t X \tNODE\t\t\t\t\n"
    "NIC1\tNODE\tNODE\tSYS\tSYS\tNODE\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
    "  NV#  = Connection traversing a bonded set of # NVLinks\n\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"
)
TWO_PCIE = (
    "        GPU0    GPU1    CPU Affinity    NUMA Affinity\n"
    "GPU0     X      SYS     0-15            0\n"
    "GPU1    SYS      X      16-31           1\n"
)
ONE = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n"
LINKS = (
    "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0d5e7f0c-1111-2222-3333-444455556666)\n"
    "\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n\t Link 2: <inactive>\n"
    "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1d5e7f0c-1111-2222-3333-444455556666)\n"
    "\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
)
GARBAGE = "\x00\xff Failed to initialize NVML: Unknown Error\nGPU\nGPUx NV\nLink 9: lots GB/s\nGPU7"


def test_a_node_with_nvlink_everywhere():
    found = devices.topology(FOUR_H100)
    assert len(found) == 12
    assert set(found.values()) == {"NV18"}
    assert (0, 0) not in found


def test_a_node_without_nvlink():
    assert devices.topology(TWO_PCIE) == {(0, 1): "SYS", (1, 0): "SYS"}


@pytest.mark.parametrize("report", [ONE, "", GARBAGE, GARBAGE + "\n" + GARBAGE])
def test_one_gpu_and_garbage_have_no_pairs(report):
    assert devices.topology(report) == {}


def test_a_cut_off_matrix_gives_what_is_there():
    cut = FOUR_H100[: FOUR_H100.index("GPU2\tNV18")] + "GPU2\tNV18"
    assert devices.topology(cut)[2, 0] == "NV18"
    assert (2, 1) not in devices.topology(cut)


def test_rates_of_links():
    assert link_rates(LINKS) == {0: [26.562, 26.562], 1: [26.562, 26.562]}
    assert link_rates("") == link_rates(GARBAGE) == {}


@pytest.fixture
def says(monkeypatch):
    """A machine whose nvidia-smi says something."""

    def install(report_of_word: dict[str, str]):
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)

        def run(words, **_):
            text = report_of_word.get(words[1])
            return subprocess.CompletedProcess(words, 9 if text is None else 0, text or "", "Unknown option\n")

        monkeypatch.setattr(subprocess, "run", run)

    return install


def test_nvlink_everywhere_is_ok(says):
    says({"topo": FOUR_H100, "nvlink": LINKS})
    found = check_nvlink()
    assert found.state is State.OK
    assert "12 of 12 pairs (NV18)" in found.text
    assert "53.1 GB/s" in found.text
    assert len(found.values["pairs"]) == 12


def test_pcie_is_a_warning_and_no_report_of_links_is_no_harm(says):
    says({"topo": TWO_PCIE})
    found = check_nvlink()
    assert found.state is State.WARNING
    assert "0 of 2 pairs (SYS)" in found.text
    assert found.advice


@pytest.mark.parametrize("report", [ONE, GARBAGE])
def test_nothing_to_see_is_not_tested(says, report):
    says({"topo": report})
    assert check_nvlink().state is State.NOT_TESTED


def test_compute_modes(says):
    says({"--query-gpu=compute_mode": "Default\nDefault\n"})
    assert check_sharing().state is State.OK
    says({"--query-gpu=compute_mode": "Default\nExclusive_Process\n"})
    assert check_sharing().state is State.WARNING


@pytest.mark.parametrize("check", [check_nvlink, check_sharing])
@pytest.mark.parametrize(
    ("error", "word"),
    [
        (FileNotFoundError("nvidia-smi"), "not installed"),
        (subprocess.TimeoutExpired("nvidia-smi", 15), "did not answer"),
        (PermissionError(13, "Permission denied"), "cannot be run"),
    ],
)
def test_a_tool_that_fails_is_not_tested(monkeypatch, check, error, word):
    def run(*_, **__):
        raise error

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", run)
    found = check()
    assert found.state is State.NOT_TESTED
    assert word in found.text


def test_a_tool_that_ends_badly_is_not_tested(says):
    says({})
    assert "exited with 9: Unknown option" in check_nvlink().text
