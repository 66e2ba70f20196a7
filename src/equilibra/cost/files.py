"""A user's own model or hardware: a small TOML or JSON file with the fields of `MoEModel` or `Hardware`.

A hardware file may name a `base` preset and give only what differs. A model may also be the `config.json` of a Hugging
Face checkpoint. Unknown keys are errors that name the nearest valid one.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import MISSING, asdict, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from equilibra.core.atomic import cannot
from equilibra.core.errors import InputError
from equilibra.core.model import MODELS, MoEModel, model_named
from equilibra.cost.compute import ExpertLaw
from equilibra.cost.hardware import Hardware
from equilibra.cost.presets import hardware_named, hardware_names

__all__ = ["hardware_toml", "load_hardware", "load_model", "read_table"]

LAWS = ("experts_forward", "experts_backward")
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
        table = _from_hugging_face(table, Path(name_or_file))
    table.setdefault("name", Path(name_or_file).stem)
    return MoEModel(**_checked(table, MoEModel, name_or_file))


def load_hardware(name_or_file: str) -> Hardware:
    """A preset by name, or hardware from a file."""
    if not _is_file(name_or_file):
        return hardware_named(name_or_file)
    table = read_table(Path(name_or_file))
    base = table.pop("base", None)
    if base is not None and base not in hardware_names():
        raise InputError(f"{name_or_file}: no hardware is named {base!r}; base must be {', '.join(hardware_names())}")
    values: dict[str, Any] = asdict(hardware_named(base)) if base is not None else {}
    for law in LAWS:
        given = table.get(law, {})
        if not isinstance(given, dict):
            raise InputError(f"{name_or_file}: {law} must be a table, not {given!r}")
        if law in table or law in values:
            both = {**values.get(law, {}), **given}
            table[law] = ExpertLaw(**_checked(both, ExpertLaw, f"{name_or_file}, {law}"))
    if base is not None:
        values |= {"name": Path(name_or_file).stem, "source": f"{name_or_file}, based on {base}"}
    return Hardware(**_checked({**values, **table}, Hardware, name_or_file))


def read_table(path: Path) -> dict[str, Any]:
    """The keys and values of a TOML or JSON file."""
    try:
        text = path.read_text()
        table = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise cannot("read", path, error) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"cannot read {path}: it is no {path.suffix[1:] or 'JSON'} ({error})") from error
    if not isinstance(table, dict):
        raise InputError(f"cannot read {path}: it must hold keys and values, not {type(table).__name__}")
    return table


def hardware_toml(hardware: Hardware) -> str:
    """The hardware as a file that `load_hardware` reads."""
    values = asdict(hardware)
    laws = {law: values.pop(law) for law in LAWS}
    lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
    for law, constants in laws.items():
        factors = constants.pop("factor_of_shape")
        lines += ["", f"[{law}]", *(f"{key} = {_toml(value)}" for key, value in constants.items())]
        if factors:
            lines += ["", f"[{law}.factor_of_shape]", *(f'"{key}" = {_toml(value)}' for key, value in factors.items())]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    return repr(float(f"{value:.6g}")) if isinstance(value, float) else str(value)


def _is_file(name: str) -> bool:
    return name not in MODELS and (name.endswith((".toml", ".json")) or "/" in name)


def _checked(table: dict[str, Any], kind: type[Any], where: str) -> dict[str, Any]:
    """The table, if its keys are fields of the class and none is missing."""
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


def _from_hugging_face(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Fields of a model from its Hugging Face configuration."""

    def first(*names: str, default: Any = None) -> Any:  # noqa: ANN401
        return next((config[name] for name in names if config.get(name) is not None), default)

    values = {field: first(*names) for field, names in HF_NAMES.items()}
    missing = [HF_NAMES[field][0] for field, value in values.items() if value is None]
    if missing or not isinstance(config.get("num_hidden_layers"), int):
        raise InputError(f"{path} is no configuration of an MoE model: it lacks {missing or 'num_hidden_layers'}")
    layers = config["num_hidden_layers"] - first("first_k_dense_replace", default=0)
    heads = first("num_attention_heads", default=1)
    size = first("head_dim", "v_head_dim", default=values["hidden"] // max(heads, 1))
    groups = first("num_key_value_heads", default=heads)
    shared = first("n_shared_experts", default=0) * values["expert_ffn"]
    vocabulary = first("vocab_size", default=0)
    return {
        **values,
        "name": str(first("model_type", default=path.parent.name)),
        "num_layers": layers,
        "attention_width": heads * size,
        "dense_parameters": values["hidden"]
        * (2 * size * (heads + groups) + 3 * first("shared_expert_intermediate_size", default=shared)),
        "outer_parameters": vocabulary * values["hidden"],
        "embedding_parameters": vocabulary * values["hidden"],
    }
