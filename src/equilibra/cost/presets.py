"""Price lists and models by name, or from a user's TOML or JSON file with the fields of `Prices` or `MoEModel`.

A price file may name a `base` preset and give only what differs. A model may also be the `config.json` of a Hugging
Face checkpoint. An unknown key is an error that names the nearest valid one.

The H200's prices are measured: `measured/h200.json` is fitted on first use, and `H200_KERNELS` prices rows and copies
in our kernels. The other presets are the H200's scaled by data-sheet ratios (dense bf16 FLOP/s, memory bandwidth),
which assumes equal efficiency. Links are data-sheet rates times 0.85 for NVLink and 0.9 for the network; latencies,
counts and copy engines are assumptions. Costs per hour are relative, as in MegaScale-Infer (arXiv 2504.02263, an L20
costs 1), for the devices it lists, and unknown for others.
"""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, asdict, fields, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from equilibra.core.atomic import read_values
from equilibra.core.checks import check_whole
from equilibra.core.errors import InputError
from equilibra.core.model import MODELS, Heads, Latent, MoEModel, model_named, moe_model
from equilibra.cost.calibrate import calibrate
from equilibra.cost.prices import ExpertLaw, KernelPrices, Prices

GB = 10**9
NVLINK, NETWORK = 0.85, 0.9
H200_TFLOPS, H200_HBM = 989.0, 4800.0
H200_KERNELS = KernelPrices(
    tflops=650.0, hold_us_per_mb=1.0, move_beside_us_per_mb=0.27, add_beside_us_per_mb=0.51, tile_rows=128
)
"""medians of fits to two runs of the GPU bench that were not kept; the fit to a run that was planned with them
(benchmarks/results/plan-prices.json) gives 0.91 to 1.07, 0.19 to 0.28 and 0.33 to 0.51. Tiles: `kernels.grouped.BM`"""
OF_DEVICE = {
    "GB200": "nvl72",
    "GH200": "h200",
    "B200": "b200",
    "H200": "h200",
    "H100": "h100",
    "A100": "a100",
    "A800": "a800",
    "H20": "h20",
    "L40S": "l40s",
}
"""preset by a word in the device name the driver reports"""


def prices_names() -> list[str]:
    """Names of the presets."""
    return list(_SHEETS)


@cache
def prices_named(name: str) -> Prices:
    """The preset of that name; InputError that lists the names if there is none."""
    if name not in _SHEETS:
        raise InputError(f"no hardware is named {name!r}; use one of {', '.join(_SHEETS)}, or a file of your own")
    sheet = _SHEETS[name]
    if sheet is None:
        return _h200()
    source = f"{sheet.source}; efficiencies as measured on an H200"
    compute, memory = sheet.tflops / H200_TFLOPS, sheet.hbm_gb_per_s / H200_HBM
    return _h200().scaled(compute=compute, memory=memory, name=name, source=source, **sheet.others)


def name_for_device(device_name: str) -> str | None:
    """The preset for a device name as the driver reports it ("NVIDIA H200"); None if there is none."""
    words = re.split(r"[^A-Z0-9]+", device_name.upper())
    return next((name for word, name in OF_DEVICE.items() if word in words), None)


@cache
def default_prices() -> Prices:
    """Prices for an unknown device: an H200's, with copies that cost nothing besides their rows."""
    return _h200().without_kernels()


def measured_h200() -> list[dict[str, object]]:
    """The measurements of one H200, as `calibrate` takes them."""
    text = files("equilibra.cost").joinpath("measured/h200.json").read_text()
    measurements: list[dict[str, object]] = json.loads(text)["measurements"]
    return measurements


@cache
def _h200() -> Prices:
    law = ExpertLaw(fixed_us=0.0, weight_gb_per_s=H200_HBM, row_gb_per_s=H200_HBM, tflops=H200_TFLOPS)
    sheet = Prices(
        name="h200", source="", memory_bytes=141 * GB, ranks_per_node=8, experts_forward=law, experts_backward=law,
        dense_tflops=H200_TFLOPS, attention_tflops=H200_TFLOPS, attention_backward_tflops=H200_TFLOPS,
        hbm_gb_per_s=H200_HBM, nvlink_gb_per_s=450 * NVLINK, nvlink_latency_us=15.0, nic_gb_per_s=50 * NETWORK,
        nic_latency_us=40.0, host_link_gb_per_s=64.0, copy_engine_gb_per_s=400.0, copy_loss_gb_per_s=H200_HBM,
        counts_us=30.0, planner_cores=32,
    )  # fmt: skip
    source = (
        "compute, memory and host link measured on one H200 (torch 2.11, bf16); NVLink 4 (450 GB/s a direction) and "
        "400 Gb/s a rank from NVIDIA's HGX H200 data sheet"
    )
    return replace(calibrate(measured_h200(), sheet, name="h200", source=source).hardware, kernels=H200_KERNELS)


class _Sheet(NamedTuple):
    """A vendor's data sheet; `others` are fields besides compute and memory rates."""

    tflops: float
    hbm_gb_per_s: float
    source: str
    others: dict[str, object]


_SHEETS: dict[str, _Sheet | None] = {
    "a100": _Sheet(
        312.0, 2039.0,
        "NVIDIA A100 SXM 80 GB data sheet: 312 TFLOP/s, 2.04 TB/s, NVLink 300 GB/s a direction; 200 Gb/s a rank",
        {"memory_bytes": 80 * GB, "nvlink_gb_per_s": 300 * NVLINK, "nic_gb_per_s": 25 * NETWORK,
         "host_link_gb_per_s": 25.0, "copy_engine_gb_per_s": 250.0},
    ),
    "h100": _Sheet(
        989.0, 3350.0,
        "NVIDIA H100 SXM data sheet: 989 TFLOP/s, 3.35 TB/s, 80 GB, NVLink 450 GB/s a direction; 400 Gb/s a rank",
        {"memory_bytes": 80 * GB},
    ),
    "h200": None,
    "b200": _Sheet(
        2250.0, 7700.0,
        "NVIDIA HGX B200 data sheet: 2,250 TFLOP/s, 7.7 TB/s, 180 GB, NVLink 900 GB/s a direction; 400 Gb/s a rank",
        {"memory_bytes": 180 * GB, "nvlink_gb_per_s": 900 * NVLINK, "copy_engine_gb_per_s": 800.0},
    ),
    "nvl72": _Sheet(
        2500.0, 8000.0,
        "NVIDIA GB200 NVL72 data sheet: 72 ranks on NVLink at 900 GB/s a direction, 2,500 TFLOP/s, 8 TB/s, 186 GB",
        {"memory_bytes": 186 * GB, "ranks_per_node": 72, "nvlink_gb_per_s": 900 * NVLINK, "host_link_gb_per_s": 200.0,
         "copy_engine_gb_per_s": 800.0},
    ),
    "a800": _Sheet(
        312.0, 2039.0,
        "NVIDIA A800 SXM 80 GB data sheet: 312 TFLOP/s, 2.04 TB/s, NVLink 200 GB/s a direction; 200 Gb/s a rank",
        {"memory_bytes": 80 * GB, "nvlink_gb_per_s": 200 * NVLINK, "nic_gb_per_s": 25 * NETWORK,
         "host_link_gb_per_s": 25.0, "copy_engine_gb_per_s": 170.0, "cost_per_hour": 2.26},
    ),
    "h20": _Sheet(
        148.0, 4096.0,
        "NVIDIA H20 data sheet: 148 TFLOP/s, 4.0 TB/s, 96 GB, NVLink 450 GB/s a direction; 4 x 400 Gb/s for 8 ranks",
        {"memory_bytes": 96 * GB, "nic_gb_per_s": 25 * NETWORK, "cost_per_hour": 1.85},
    ),
    "l40s": _Sheet(
        362.0, 864.0,
        "NVIDIA L40S data sheet: 362 TFLOP/s, 864 GB/s, 48 GB, PCIe 4 x16 (no NVLink); 2 x 400 Gb/s for 8 ranks",
        {"memory_bytes": 48 * GB, "nvlink_gb_per_s": 32 * NVLINK, "nic_gb_per_s": 12.5 * NETWORK,
         "host_link_gb_per_s": 25.0, "copy_engine_gb_per_s": 25.0, "cost_per_hour": 1.08},
    ),
}  # fmt: skip

AUTO = "auto"
PARTS = {"experts_forward": ExpertLaw, "experts_backward": ExpertLaw, "kernels": KernelPrices}
"""tables in a price file"""
HF_NAMES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size",),
    "expert_ffn": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok", "experts_per_token", "moe_topk"),
}


def load_model(name_or_file: str) -> MoEModel:
    """A preset by name, or a model from a file."""
    if not _is_file(name_or_file):
        try:
            return model_named(name_or_file)
        except InputError as error:
            raise InputError(f"{error}, or a .toml or .json file of your own") from None
    table = read_table(Path(name_or_file))
    if "hidden_size" in table:
        return _from_hugging_face(table, Path(name_or_file))
    table.setdefault("name", Path(name_or_file).stem)
    return MoEModel(**checked_fields(table, MoEModel, name_or_file))


def prices_of(hardware: str | Prices, device_name: str | None = None) -> Prices:
    """Prices given as such, by preset or by file; auto: the device's preset, or the default if it is unknown."""
    if isinstance(hardware, Prices):
        return hardware
    if hardware != AUTO:
        return load_prices(hardware)
    name = None if device_name is None else name_for_device(device_name)
    return default_prices() if name is None else prices_named(name)


def load_prices(name_or_file: str) -> Prices:
    """A preset by name, or prices from a file."""
    if not _is_file(name_or_file):
        return prices_named(name_or_file)
    table = read_table(Path(name_or_file))
    base = table.pop("base", None)
    if base is not None and base not in prices_names():
        raise InputError(f"{name_or_file}: no hardware is named {base!r}; base must be {', '.join(prices_names())}")
    values: dict[str, Any] = asdict(prices_named(base)) if base is not None else {}
    for part, kind in PARTS.items():
        given = table.get(part, {})
        if not isinstance(given, dict):
            raise InputError(f"{name_or_file}: {part} must be a table, not {given!r}")
        if both := {**(values.get(part) or {}), **given}:
            table[part] = kind(**checked_fields(both, kind, f"{name_or_file}, {part}"))
    if base is not None:
        values |= {"name": Path(name_or_file).stem, "source": f"{name_or_file}, based on {base}"}
    return Prices(**checked_fields({**values, **table}, Prices, name_or_file))


def read_table(path: Path) -> dict[str, Any]:
    """The top-level table of a TOML or JSON file."""
    table = read_values(path)
    if not isinstance(table, dict):
        raise InputError(f"cannot read {path}: it must hold keys and values, not {type(table).__name__}")
    return table


def prices_toml(prices: Prices) -> str:
    """The prices as TOML that `load_prices` reads."""
    values = asdict(prices)
    parts = {part: values.pop(part) for part in PARTS}
    lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
    for part, constants in parts.items():
        if constants is not None:
            factors = constants.pop("factor_of_shape", {})
            lines += ["", f"[{part}]", *(f"{key} = {_toml(value)}" for key, value in constants.items())]
            if factors:
                lines += ["", f"[{part}.factor_of_shape]"]
                lines += [f'"{key}" = {_toml(value)}' for key, value in factors.items()]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    return repr(float(f"{value:.6g}")) if isinstance(value, float) else str(value)


def _is_file(name: str) -> bool:
    return name not in MODELS and (name.endswith((".toml", ".json")) or "/" in name)


def checked_fields(table: dict[str, Any], kind: type[Any], where: str) -> dict[str, Any]:
    """The table; InputError if a key is not a field of the class or a field is missing."""
    known = {field.name: field for field in fields(kind)}
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; valid are {', '.join(known)}"
            raise InputError(f"{where}: unknown key {key!r}{hint}")
    missing = [
        name for name, field in known.items()
        if field.default is MISSING and field.default_factory is MISSING and name not in table
    ]  # fmt: skip
    if missing:
        raise InputError(f"{where}: {', '.join(missing)} missing")
    for name in ("name", "source"):
        if name in table and not isinstance(table[name], str):
            raise InputError(f"{where}: {name} must be text, not {table[name]!r}")
    return table


def _from_hugging_face(config: dict[str, Any], path: Path) -> MoEModel:
    def whole(*names: str, default: int | None = None) -> int:
        for name in names:
            if (value := config.get(name)) is not None:
                check_whole(f"{path}: {name}", value, low=0, high=2**40 - 1)
                return int(value)
        if default is None:
            raise InputError(f"{path} is not the configuration of an MoE model: it lacks {names[0]}")
        return default

    hidden, ffn, experts, top_k = (whole(*HF_NAMES[name]) for name in ("hidden", "expert_ffn", "num_experts", "top_k"))
    dense_layers, heads = whole("first_k_dense_replace", default=0), whole("num_attention_heads")
    attention: Heads | Latent = Heads(
        heads, whole("head_dim", default=hidden // max(heads, 1)), whole("num_key_value_heads", default=heads)
    )
    if config.get("kv_lora_rank") is not None:
        attention = Latent(
            whole("q_lora_rank", default=0), heads, whole("kv_lora_rank"), whole("qk_nope_head_dim"),
            whole("qk_rope_head_dim"), whole("v_head_dim"),
        )  # fmt: skip
    shared = whole("n_shared_experts", default=0) * ffn
    quadratic_share = 1 / max(whole("full_attention_interval", default=1), 1)
    if isinstance(kinds := config.get("layer_types"), list) and kinds:
        quadratic_share = kinds.count("full_attention") / len(kinds)
    return moe_model(
        str(config.get("model_type") or path.resolve().parent.name),
        (whole("num_hidden_layers") - dense_layers, hidden, ffn, experts, top_k),
        attention,
        vocabulary=whole("vocab_size", default=0),
        shared_ffn=whole("shared_expert_intermediate_size", default=shared),
        dense=(dense_layers, whole("intermediate_size", default=4 * hidden)),
        quadratic_share=quadratic_share,
        window=whole("sliding_window", default=0) if quadratic_share < 1 else 0,
    )
