"""Files of models and machines: what is written is read, what is wrong is named."""

import json
from dataclasses import asdict, replace

import pytest
from tests.references.machines import round_hardware

from equilibra.core.errors import InputError
from equilibra.core.model import model_named
from equilibra.cost.presets import load_model, load_prices, prices_named, prices_names, prices_toml, read_table

COMMON = {"vocab_size": 151_936, "model_type": "m"}
QWEN = {**COMMON, "hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128}  # fmt: skip
DEEPSEEK = {"vocab_size": 129_280, "hidden_size": 7168, "moe_intermediate_size": 2048, "intermediate_size": 18_432,
            "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "num_hidden_layers": 61,
            "first_k_dense_replace": 3, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}  # fmt: skip
CONFIGS = {
    "qwen3-30b-a3b": QWEN,
    "qwen3-235b-a22b": {**QWEN, "hidden_size": 4096, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
                        "num_attention_heads": 64},
    "deepseek-v3": DEEPSEEK,
    "kimi-k2": {**DEEPSEEK, "vocab_size": 163_840, "n_routed_experts": 384, "first_k_dense_replace": 1,
                "num_attention_heads": 64},
    "moonlight": {**DEEPSEEK, "vocab_size": 163_840, "hidden_size": 2048, "moe_intermediate_size": 1408,
                  "intermediate_size": 11_264, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2,
                  "num_hidden_layers": 27, "first_k_dense_replace": 1, "num_attention_heads": 16, "q_lora_rank": None},
    "glm-4.5-air": {**COMMON, "vocab_size": 151_552, "hidden_size": 4096, "moe_intermediate_size": 1408,
                    "intermediate_size": 10_944, "n_routed_experts": 128, "num_experts_per_tok": 8,
                    "n_shared_experts": 1, "num_hidden_layers": 46, "first_k_dense_replace": 1,
                    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128},
    "gpt-oss-20b": {**COMMON, "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880,
                    "num_local_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 24,
                    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
                    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12},
    "olmoe": {**COMMON, "vocab_size": 50_304, "hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64,
              "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16},
}  # fmt: skip
MODEL = "num_layers = 2\nhidden = 64\nexpert_ffn = 32\nnum_experts = 8\ntop_k = 2\n"


def write(path, content) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hugging_face_configuration_is_the_preset(name, tmp_path):
    found, preset = asdict(load_model(write(tmp_path / "config.json", CONFIGS[name]))), asdict(model_named(name))
    found.pop("name")
    preset.pop("name")
    assert found == preset


def test_names_of_models_from_files(tmp_path):
    assert load_model(write(tmp_path / "config.json", QWEN)).name == "m"
    (tmp_path / "folder").mkdir()
    nameless = {key: value for key, value in QWEN.items() if key != "model_type"}
    assert load_model(write(tmp_path / "folder" / "config.json", nameless)).name == "folder"
    assert load_model(write(tmp_path / "mine.toml", MODEL)).name == "mine"
    next_ = {**QWEN, "full_attention_interval": 4, "shared_expert_intermediate_size": 512}
    assert load_model(write(tmp_path / "config.json", next_)).quadratic_share == 0.25


def test_a_model_survives_json_and_toml(tmp_path):
    model = model_named("moonlight")
    assert load_model(write(tmp_path / "m.json", asdict(model))) == model
    lines = [f"{key} = {json.dumps(value)}" for key, value in asdict(model).items()]
    assert load_model(write(tmp_path / "m.toml", "\n".join(lines))) == model
    assert load_model("moonlight") is model


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (MODEL + "hiden = 3", "unknown key 'hiden'; did you mean 'hidden'"),
        (MODEL + "zzz = 3", "unknown key 'zzz'; valid are name, num_layers"),
        ("hidden = 64", "num_layers, expert_ffn, num_experts, top_k missing"),
        (MODEL.replace("64", "64.0"), "hidden must be a whole number"),
        (MODEL.replace("64", "'wide'"), "hidden must be a whole number"),
        (MODEL.replace("top_k = 2", "top_k = 9"), "top-9 of 8"),
        (MODEL + "name = 3", "name must be text"),
        (MODEL + "quadratic_share = '1'", "quadratic_share"),
        ("hidden = ", "not valid TOML"),
        ("\x00", "not valid TOML"),
    ],
)
def test_bad_models(content, match, tmp_path):
    with pytest.raises(InputError, match=match):
        load_model(write(tmp_path / "bad.toml", content))


@pytest.mark.parametrize("change", [
    {"hidden_size": "wide"}, {"num_attention_heads": "32"}, {"num_attention_heads": None}, {"vocab_size": -1},
    {"vocab_size": "many"}, {"head_dim": 1.5}, {"num_hidden_layers": "48"}, {"num_hidden_layers": True},
    {"first_k_dense_replace": "x"}, {"first_k_dense_replace": 48}, {"n_shared_experts": []}, {"num_experts": None},
    {"moe_intermediate_size": {}}, {"num_key_value_heads": -1}, {"num_experts_per_tok": 1000}, {"kv_lora_rank": 512},
    {"num_hidden_layers": 0},
])  # fmt: skip
def test_bad_configurations(change, tmp_path):
    with pytest.raises(InputError):
        load_model(write(tmp_path / "config.json", {**QWEN, **change}))


def test_files_that_are_no_tables(tmp_path):
    for content in ("[]", "3", "null", "{", "[" * 100_000):
        with pytest.raises(InputError, match="cannot read"):
            read_table(tmp_path / write(tmp_path / "x.json", content))
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "x.toml", tmp_path / "missing.toml", tmp_path):
        with pytest.raises(InputError, match="cannot read"):
            load_model(str(path) + ("/" if path == tmp_path else ""))
    with pytest.raises(InputError, match=r"no model is named 'nobody'; use one of qwen3.*or a \.toml or \.json file"):
        load_model("nobody")
    with pytest.raises(InputError, match="no hardware is named 'nothing'"):
        load_prices("nothing")


@pytest.mark.parametrize("name", [*prices_names(), "round"])
def test_hardware_survives_a_round_trip(name, tmp_path):
    machine = round_hardware(source='a "quoted"\nline \\ 1') if name == "round" else prices_named(name)
    read = load_prices(write(tmp_path / "h.toml", prices_toml(machine)))
    for key, value in asdict(machine).items():
        other = asdict(read)[key]
        if isinstance(value, dict) and "factor_of_shape" in value:
            assert value.pop("factor_of_shape") == pytest.approx(other.pop("factor_of_shape"), rel=1e-5)
        exact = isinstance(value, str | None)
        assert other == (value if exact else pytest.approx(value, rel=1e-5)), key
    again = load_prices(write(tmp_path / "again.toml", prices_toml(read)))
    assert again == read


def test_a_base_gives_what_is_not_said(tmp_path):
    file = write(tmp_path / "mine.toml", "base = 'h200'\nnic_gb_per_s = 25\n[experts_forward]\ntflops = 500\n")
    machine, base = load_prices(file), prices_named("h200")
    assert (machine.name, machine.nic_gb_per_s) == ("mine", 25)
    assert machine.experts_forward.tflops == 500
    assert machine.experts_forward.fixed_us == base.experts_forward.fixed_us
    assert machine.experts_backward == base.experts_backward
    assert machine.kernels == base.kernels
    assert "based on h200" in machine.source
    copies = write(tmp_path / "copies.toml", "base = 'h200'\n[kernels]\nhold_us_per_mb = 2\n")
    assert load_prices(copies).kernels == replace(base.kernels, hold_us_per_mb=2)
    named = write(tmp_path / "named.toml", "base = 'b200'\nname = 'ours'\nsource = 'us'")
    assert (load_prices(named).name, load_prices(named).source) == ("ours", "us")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("nic_gb_per_s = 25", "memory_bytes, .* missing"),
        ("base = 'h201'", "no hardware is named 'h201'; base must be a100"),
        ("base = 3", "no hardware is named 3"),
        ("base = 'h200'\nnic_gb_s = 25", "unknown key 'nic_gb_s'; did you mean 'nic_gb_per_s'"),
        ("base = 'h200'\nnic_gb_per_s = 0", "nic_gb_per_s must be a number"),
        ("base = 'h200'\nnic_gb_per_s = -1", "nic_gb_per_s must be a number"),
        ("base = 'h200'\nnic_gb_per_s = inf", "nic_gb_per_s must be a number"),
        ("base = 'h200'\nnic_gb_per_s = nan", "nic_gb_per_s must be a number"),
        ("base = 'h200'\nnic_gb_per_s = true", "nic_gb_per_s must be a number"),
        ("base = 'h200'\nnic_gb_per_s = 'fast'", "nic_gb_per_s must be a number"),
        ("base = 'h200'\nnic_latency_us = -1", "nic_latency_us must be a number from 0"),
        ("base = 'h200'\nmemory_bytes = 1.5", "memory_bytes must be a whole number"),
        ("base = 'h200'\nranks_per_node = 0", "ranks_per_node must be a whole number"),
        ("base = 'h200'\nname = 3", "name must be text"),
        ("base = 'h200'\nexperts_forward = 3", "experts_forward must be a table"),
        ("base = 'h200'\n[experts_forward]\ntflop = 3", "experts_forward: unknown key 'tflop'; did you mean 'tflops'"),
        ("base = 'h200'\n[experts_forward]\ntflops = -3", "tflops must be a number from 0"),
        ("base = 'h200'\n[experts_forward]\ntflops = true", "tflops must be a number from 0"),
        ("base = 'h200'\n[experts_forward]\ntflops = 0\nrow_gb_per_s = 0", "rows must cost something"),
        ("base = 'h200'\n[experts_forward]\nfactor_of_shape = 3", "factor_of_shape must be a table"),
        ("base = 'h200'\n[experts_forward.factor_of_shape]\n'2048x768' = 99", "factor_of_shape must be a table"),
    ],
)
def test_bad_hardware(content, match, tmp_path):
    with pytest.raises(InputError, match=match):
        load_prices(write(tmp_path / "bad.toml", content))
