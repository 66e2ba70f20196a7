"""Options of Equilibra in verl's configuration.

verl's configuration classes refuse keys they do not know, except in a few free dictionaries. One of them,
`override_mcore_model_config` of the Megatron engine, has one reader (`moe_config`), and is where the options go:

    +actor_rollout_ref.actor.megatron.override_mcore_model_config.equilibra.spare_slots=2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from equilibra.core.errors import InputError
from equilibra.integrations.planned.setting import MegatronSetting

__all__ = ["BLOCK", "VerlSetting", "setting_of"]

BLOCK = "actor_rollout_ref.actor.megatron.override_mcore_model_config.equilibra"
"""where the options are"""


@dataclass(frozen=True, kw_only=True)
class VerlSetting:
    """The options of the block, by name. The same on every rank."""

    enabled: bool = True
    """False: the engine stays as verl made it"""
    planner: str = "equilibra"
    """"static": everything runs through Equilibra, but nothing is copied"""
    spare_slots: int = 2
    """copies a rank can hold at a time, in a layer"""
    prefetch: bool = True
    """copies come while the layer before computes"""
    ranks_per_node: int | None = None
    """ranks of the expert-parallel group that share fast links; null: 8, or all if there are fewer"""
    spread_sequences: bool = False
    """swap sequences between a rank's micro-batches so that none has the same hot experts throughout"""
    timeout_s: float = 300.0
    """after which a silent rank is lost, in exchanges of counts and hashes"""
    seed: int = 0
    """of every random choice of the planner"""

    def __post_init__(self) -> None:
        for option in fields(self):
            value, wanted = getattr(self, option.name), str(option.type).split(" | ")
            if not any(_is(value, kind) for kind in wanted):
                raise InputError(f"{BLOCK}.{option.name} must be {' or '.join(wanted)}, not {value!r}")

    def for_megatron(self) -> MegatronSetting:
        """What `balance` takes. Homes stay where they are: verl's exporters number experts by rank."""
        return MegatronSetting(
            planner=self.planner, spare_slots=self.spare_slots, prefetch=self.prefetch,
            ranks_per_node=self.ranks_per_node, max_moves_per_layer=0, timeout_s=self.timeout_s, seed=self.seed,
        )  # fmt: skip


def _is(value: object, kind: str) -> bool:
    if kind == "None":
        return value is None
    if kind == "float":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value).__name__ == kind


def setting_of(engine_config: Any) -> VerlSetting:  # noqa: ANN401 - verl's McoreEngineConfig
    """The options in an engine's configuration; unknown ones are an error."""
    block = (engine_config.override_mcore_model_config or {}).get("equilibra")
    block = {} if block is None else block
    if not isinstance(block, Mapping):
        raise InputError(f"{BLOCK} must be a table of options, not {block!r}: {BLOCK}.enabled=False switches it off")
    known = [option.name for option in fields(VerlSetting)]
    unknown = sorted(str(name) for name in block if name not in known)
    if unknown:
        raise InputError(f"{BLOCK} has no option {', '.join(unknown)}: it has {', '.join(known)}")
    return VerlSetting(**{str(name): value for name, value in block.items()})
