"""Models and prices from a user's TOML or JSON file with the fields of `MoEModel` or `Prices`.

A price file may name a `base` preset and give only what differs. A model may also be the `config.json` of a Hugging
Face checkpoint. An unknown key is an error that names the nearest valid one.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import MISSING, asdict, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from equilibra.core.atomic import cannot
from equilibra.core.checks import check_whole
from equilibra.core.errors import InputError
from equilibra.core.model import MODELS, Heads, Latent, MoEModel, model_named, moe_model
from equilibra.cost.presets import default_prices, name_for_device, prices_named, prices_names
from equilibra.cost.prices import ExpertLaw, KernelPrices, Prices

__all__ = ["AUTO", "load_model", "load_prices", "prices_of", "prices_toml", "read_table"]

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
    return MoEModel(**_checked(table, MoEModel, name_or_file))


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
            table[part] = kind(**_checked(both, kind, f"{name_or_file}, {part}"))
    if base is not None:
        values |= {"name": Path(name_or_file).stem, "source": f"{name_or_file}, based on {base}"}
    return Prices(**_checked({**values, **table}, Prices, name_or_file))


def read_table(path: Path) -> dict[str, Any]:
    """The top-level table of a TOML or JSON file."""
    try:
        text = path.read_text()
        table = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise cannot("read", path, error) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot read {path}: not valid {path.suffix[1:] or 'JSON'} ({error})") from error
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


def _checked(table: dict[str, Any], kind: type[Any], where: str) -> dict[str, Any]:
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
