"""From measurements to a hardware file."""

import pytest

from equilibra.core.errors import InputError
from equilibra.cost.presets import load_prices, prices_named, prices_toml
from equilibra.doctor import measure
from equilibra.doctor.finding import Finding, Measured, State
from equilibra.doctor.measure import MEASUREMENTS, measured_of, preset_of, summary

GIB = 2**30


def gpus(name: str, count: int = 1) -> list[Finding]:
    values = {"device": name, "total_bytes": 80 * GIB, "free_bytes": 79 * GIB, "capability": [9, 0]}
    return [Finding(name=f"gpu {i}", state=State.OK, text="", values={**values, "index": i}) for i in range(count)]


def rate(kind: str, per_s: float, *, amount: str = "bytes", fixed_us: float = 5.0) -> Measured:
    """A measurement of a device that moves or computes so much a second."""
    sizes = (10**8, 10**9) if amount == "bytes" else (10**11, 10**12)
    cases = [{"kind": kind, amount: size, **summary([fixed_us + size / per_s * 1e6] * 5)} for size in sizes]
    return measured_of(kind, cases, amount=amount)


def h200() -> list[Measured]:
    return [
        rate("dense", 700e12, amount="flop"), rate("device_copy", 4e12), rate("memory", 3.6e12),
        rate("host_copy", 55e9), rate("host_copy_back", 50e9),
    ]  # fmt: skip


def test_one_h200_keeps_the_measured_laws():
    found = preset_of(gpus("NVIDIA H200"), h200(), name="mine")
    made, base = found.hardware, prices_named("h200")
    assert found.base == "h200"
    assert made.dense_tflops == pytest.approx(700, rel=1e-6)
    assert made.hbm_gb_per_s == pytest.approx(3600, rel=1e-6)  # permuted rows, not the plain copy
    assert made.host_link_gb_per_s == pytest.approx(55, rel=1e-6)
    assert made.memory_bytes == 80 * GIB
    assert made.experts_forward == base.experts_forward
    for name in ("nvlink_gb_per_s", "copy_engine_gb_per_s", "ranks_per_node", "nic_gb_per_s", "nvlink_latency_us"):
        assert getattr(made, name) == getattr(base, name)
        assert name not in found.measured


def test_pairs_of_gpus_give_the_links_and_not_the_latency():
    pairs = [rate("nvlink", 380e9), rate("nvlink", 380e9)]
    found = preset_of(gpus("NVIDIA H200", 8), h200() + pairs, name="mine")
    assert found.hardware.nvlink_gb_per_s == pytest.approx(380, rel=1e-6)
    assert found.hardware.copy_engine_gb_per_s == pytest.approx(380, rel=1e-6)
    assert found.hardware.nvlink_latency_us == prices_named("h200").nvlink_latency_us
    assert found.hardware.ranks_per_node == 8


@pytest.mark.parametrize(
    ("device", "base"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA B200", "b200"),
     ("NVIDIA GB200", "nvl72"), ("NVIDIA GH200 480GB", "h200")],
)  # fmt: skip
def test_the_preset_is_the_device_s_own(device, base):
    assert preset_of(gpus(device), h200(), name="mine").base == base


def test_an_unknown_device_scales_the_nearest_preset():
    slow = [rate("dense", 230e12, amount="flop"), rate("memory", 1e12)]
    found = preset_of(gpus("NVIDIA RTX A6000"), slow, name="mine")
    base = prices_named("a100")
    assert found.base == "a100"
    factor = found.hardware.dense_tflops / base.dense_tflops
    assert found.hardware.experts_forward.tflops == pytest.approx(base.experts_forward.tflops * factor, rel=1e-3)
    assert found.hardware.attention_tflops == pytest.approx(base.attention_tflops * factor, rel=1e-3)


def test_without_gpus_memory_stands_for_the_links():
    found = preset_of([], [rate("dense", 1e11, amount="flop"), rate("memory", 20e9)], name="laptop")
    made = found.hardware
    assert made.dense_tflops == pytest.approx(0.1, rel=1e-6)
    assert made.hbm_gb_per_s == pytest.approx(20, rel=1e-6)
    assert made.nvlink_gb_per_s == made.host_link_gb_per_s == pytest.approx(10, rel=1e-6)
    assert made.ranks_per_node >= 2
    assert "without GPUs" in made.source


def test_the_file_says_what_was_measured_and_is_read_back(tmp_path):
    found = preset_of(gpus("NVIDIA H200"), h200(), name="mine")
    (tmp_path / "mine.toml").write_text(prices_toml(found.hardware))
    back = load_prices(str(tmp_path / "mine.toml"))
    assert back.dense_tflops == pytest.approx(found.hardware.dense_tflops, rel=1e-5)
    for word in ("NVIDIA H200", "dense_tflops", "host_link_gb_per_s", "nvlink_gb_per_s", "as in", "preset h200"):
        assert word in back.source
    measured, _, kept = back.source.partition("experts and attention")
    assert "nvlink_gb_per_s" in kept
    assert "nvlink_gb_per_s" not in measured


def test_timings_that_do_not_grow_give_the_rate_of_the_largest():
    flat = Measured(
        name="x", value=1, unit="GB/s", low=1, high=1, repeats=5,
        cases=[{"kind": "host_copy", "bytes": size, "us": 10.0} for size in (10**6, 10**9)],
    )  # fmt: skip
    found = preset_of(gpus("NVIDIA H200"), [rate("dense", 7e14, amount="flop"), flat], name="mine")
    assert found.hardware.host_link_gb_per_s == pytest.approx(1e9 / 10 * 1e-3)


def test_noise_cannot_give_more_than_was_seen():
    disturbed = Measured(
        name="x", value=1, unit="GB/s", low=1, high=1, repeats=5,
        cases=[{"kind": "host_copy", "bytes": size, "us": us} for size, us in ((10**8, 10_000.0), (10**9, 20_000.0))],
    )  # fmt: skip
    made = preset_of(gpus("NVIDIA H200"), [disturbed], name="mine").hardware
    assert made.host_link_gb_per_s == pytest.approx(1.1 * 50)  # the fit alone would say 90


def test_nothing_measured_is_nothing_to_write():
    with pytest.raises(InputError, match="nothing could be measured"):
        preset_of(gpus("NVIDIA H200"), [], name="mine")


@pytest.mark.parametrize("name", [name for name in MEASUREMENTS if name.startswith("host/")])
def test_this_machine_is_measured(monkeypatch, name):
    small = {"HOST_PRODUCTS": (32, 64), "HOST_COPIES": (2**16, 2**18), "HOST_CASE_S": 0.01}
    for constant, value in small.items():
        monkeypatch.setattr(measure, constant, value)
    found = MEASUREMENTS[name]()
    assert 0 < found.low <= found.value <= found.high
    assert found.repeats >= 5
    assert len(found.cases) == 2
