"""Presets of machines and models: all build, are ordered as the data sheets are, and have the size that is known."""

from dataclasses import fields

import pytest

from equilibra.core.errors import InputError
from equilibra.core.model import MODELS, MoEModel, model_named
from equilibra.core.plan import Stage
from equilibra.cost.presets import default_prices, measured_h200, name_for_device, prices_named, prices_names, prices_of
from equilibra.cost.prices import KernelPrices
from equilibra.cost.rates import rates_for

FACTS = {  # MoE layers, hidden, expert FFN, experts, top-k, MiB per expert, parameters in billions
    "qwen3-30b-a3b": (48, 2048, 768, 128, 8, 9, 30.5),
    "qwen3-235b-a22b": (94, 4096, 1536, 128, 8, 36, 235),
    "deepseek-v3": (58, 7168, 2048, 256, 8, 84, 671),
    "kimi-k2": (60, 7168, 2048, 384, 8, 84, 1040),
    "glm-4.5-air": (45, 4096, 1408, 128, 8, 33, 106),
    "gpt-oss-20b": (24, 2880, 2880, 32, 4, 47.5, 20.9),
    "gpt-oss-120b": (36, 2880, 2880, 128, 4, 47.5, 116.8),
    "olmoe": (16, 2048, 1024, 64, 8, 12, 6.9),
    "moonlight": (26, 2048, 1408, 64, 6, 16.5, 16),
    "qwen3-next": (48, 2048, 512, 512, 10, 6, 80),
    "mixtral-8x22b": (56, 6144, 16_384, 8, 2, 576, 141),
    "dbrx": (40, 6144, 10_752, 16, 4, 378, 132),
    "scaled-moe-317b": (48, 8192, 8192, 32, 4, 384, 317),
}


def test_every_model_has_a_preset():
    assert set(MODELS) == set(FACTS)


@pytest.mark.parametrize("name", FACTS)
def test_shapes_and_sizes_are_those_that_are_known(name):
    layers, hidden, ffn, experts, top_k, mib, billions = FACTS[name]
    model = model_named(name)
    assert (model.num_layers, model.hidden, model.expert_ffn) == (layers, hidden, ffn)
    assert (model.num_experts, model.top_k) == (experts, top_k)
    assert model.expert_bytes / 2**20 == pytest.approx(mib, rel=0.002)
    total = layers * (experts * model.expert_parameters + model.dense_parameters)
    total += model.outer_parameters + model.embedding_parameters
    assert total / 1e9 == pytest.approx(billions, rel=0.02)  # the worst is 1.3 % off
    assert model.expert_gradient_bytes == 2 * model.expert_bytes
    assert model.expert_home_bytes == 7 * model.expert_bytes


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_newer_machines_are_faster(model):
    laws = [(of.experts_forward, of.experts_backward) for of in map(prices_named, ("a100", "h100", "h200", "b200"))]
    for rows, instances in ((64, 8), (4096, 8), (131_072, 16)):
        for backward in (False, True):
            times = [law[backward].time_us(model, rows=rows, instances=instances, backward=backward) for law in laws]
            assert times == sorted(times, reverse=True), (rows, backward)
            assert times[0] > times[-1]


def test_machines_are_complete_and_name_their_source():
    assert prices_names() == ["a100", "h100", "h200", "b200", "nvl72", "a800", "h20", "l40s"]
    for name in prices_names():
        machine = prices_named(name)
        assert machine.name == name
        assert len(machine.source) > 20
        assert machine.flash_gb_per_s <= machine.nvlink_gb_per_s
        assert machine.nic_gb_per_s < machine.nvlink_gb_per_s
        assert machine.host_link_gb_per_s < machine.nvlink_gb_per_s
        assert machine.attention_tflops < 2600
    assert prices_named("h200") is prices_named("h200")  # fitted once
    for older, newer in (("a100", "h100"), ("h100", "h200"), ("h200", "b200")):
        for field in ("dense_tflops", "hbm_gb_per_s", "nvlink_gb_per_s", "nic_gb_per_s", "memory_bytes"):
            assert getattr(prices_named(older), field) <= getattr(prices_named(newer), field), (newer, field)
    with pytest.raises(InputError, match="no hardware is named 'h201'; use one of a100, h100"):
        prices_named("h201")


def test_the_h200_says_what_was_measured():
    """Three of the figures in the facts, measured before the fit: 0.652 ms, 3.967 ms and 2.12 ms forward."""
    machine = prices_named("h200")
    for name, rows, instances, us in (("qwen3-30b-a3b", 32_768, 16, 652), ("qwen3-235b-a22b", 65_536, 16, 3967),
                                      ("deepseek-v3", 16_384, 8, 2120)):  # fmt: skip
        predicted = machine.experts_forward.time_us(model_named(name), rows=rows, instances=instances, backward=False)
        assert predicted == pytest.approx(us, rel=0.1), name
    assert machine.host_link_gb_per_s == pytest.approx(55, rel=0.02)
    assert len(measured_h200()) > 250


def test_rates_follow_from_the_machine():
    model = model_named("qwen3-30b-a3b")
    rates = {name: rates_for(model, prices_named(name), num_nodes=2) for name in prices_names()}
    assert rates["a100"].row_us[Stage.UPDATE] > rates["h200"].row_us[Stage.UPDATE] > rates["b200"].row_us[Stage.UPDATE]
    h200 = rates["h200"]
    assert h200.row_us[Stage.UPDATE] > 2 * h200.row_us[Stage.LOGPROB]
    assert h200.standing_copy_us == pytest.approx(3 * model.expert_bytes * 1e-3 / 45)
    assert h200.move_us == pytest.approx(7 * model.expert_bytes * 1e-3 / 45)
    # an NVLink copy pays back after FLOPS / bandwidth rows: 500 to 2,000 (the facts say about 890 for 400 TFLOP/s)
    assert 500 < h200.flash_copy_us[Stage.LOGPROB] / h200.row_us[Stage.LOGPROB] < 2000


@pytest.mark.parametrize("change", [
    {"hidden": 0}, {"hidden": True}, {"hidden": 2.0}, {"num_layers": -1}, {"top_k": 9}, {"quadratic_share": 1.5},
    {"quadratic_share": float("nan")}, {"dense_parameters": -1}, {"weight_bytes": 0}, {"hidden": 2**50},
])  # fmt: skip
def test_models_that_make_no_sense(change):
    shape = {"num_layers": 1, "hidden": 8, "expert_ffn": 8, "num_experts": 8, "top_k": 2}
    with pytest.raises(InputError, match=next(iter(change)) if "top_k" not in change else "top-9 of 8"):
        MoEModel(name="x", **{**shape, **change})


@pytest.mark.parametrize("name", ["gpt-oss-20b", "qwen3-30b-a3b", "deepseek-v3"])
def test_copies_cost_by_their_size_in_our_kernels(name):
    model, prices = model_named(name), prices_named("h200")
    rates, size = rates_for(model, prices), model.expert_bytes * 1e-6
    free = {Stage.LOGPROB: 0.0}
    assert rates.row_us[Stage.UPDATE] == pytest.approx(6 * model.expert_parameters / 650e6)
    assert rates.hold_us == {**free, Stage.UPDATE: pytest.approx(1.0 * size)}
    assert rates.move_beside_us == {**free, Stage.UPDATE: pytest.approx(0.27 * size)}
    assert rates.add_beside_us == {**free, Stage.UPDATE: pytest.approx(0.51 * size)}
    assert rates.serve_us == {**free, Stage.UPDATE: 0.0}
    assert (rates.tile_rows, rates.hold_rows(Stage.UPDATE) > 100) == (128, True)


def test_without_our_kernels_only_rows_cost():
    model, prices = model_named("qwen3-30b-a3b"), prices_named("h200")
    plain = rates_for(model, prices.without_kernels())
    assert plain == rates_for(model) == rates_for(model, default_prices())
    for name in ("hold_us", "serve_us", "move_beside_us", "add_beside_us"):
        assert set(getattr(plain, name).values()) == {0.0}
    assert plain.tile_rows == 1
    priced = rates_for(model, prices)
    others = [one.name for one in fields(priced) if not one.name.endswith(("hold_us", "_beside_us", "tile_rows"))]
    assert all(getattr(priced, name) == getattr(plain, name) for name in others if name != "row_us")


def test_kernels_of_other_devices_are_the_h200s_scaled():
    h200, h100 = prices_named("h200").kernels, prices_named("h100").kernels
    assert (h100.tflops, h100.tile_rows) == (650.0, 128)
    assert h100.hold_us_per_mb == pytest.approx(h200.hold_us_per_mb * 4800 / 3350)
    assert prices_named("b200").kernels.tflops == pytest.approx(650 * 2250 / 989)
    assert prices_named("h200").without_kernels().scaled(compute=2, memory=2).kernels is None


@pytest.mark.parametrize(("device", "name"), [
    ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"),
    ("NVIDIA B200", "b200"), ("NVIDIA GB200", "nvl72"), ("NVIDIA RTX A1000", None), ("NVIDIA GH200 480GB", "h200"),
    ("Tesla T4", None), ("", None), ("NVIDIA A800-SXM4-80GB", "a800"), ("NVIDIA H20", "h20"), ("NVIDIA L40S", "l40s"),
])  # fmt: skip
def test_auto_takes_the_list_of_the_device(device, name):
    assert name_for_device(device) == name
    found = prices_of("auto", device)
    assert found is (default_prices() if name is None else prices_named(name))
    assert prices_of(found) is found
    assert prices_of("a100", device) is prices_named("a100")
    assert prices_of("auto") is default_prices()


@pytest.mark.parametrize("change", [
    {"tflops": 0}, {"hold_us_per_mb": -1.0}, {"add_beside_us_per_mb": float("inf")}, {"tile_rows": 0},
    {"tile_rows": 1.5}, {"serve_us_per_mb": True},
])  # fmt: skip
def test_kernels_that_make_no_sense(change):
    with pytest.raises(InputError, match=f"kernels: {next(iter(change))} must be a"):
        KernelPrices(**{"tflops": 1.0, **change})
