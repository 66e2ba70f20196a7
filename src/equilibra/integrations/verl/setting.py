"""Options of Equilibra in verl's configuration.

verl's configuration classes refuse keys they do not know, except in a few free dictionaries. One of them,
`override_mcore_model_config` of the Megatron engine, has one reader (`moe_config`), and is where the options go:

    +actor_rollout_ref.actor.megatron.override_mcore_model_config.equilibra.spare_slots=2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from equilibra.core.checks import check_flag
from equilibra.core.errors import InputError
from equilibra.integrations.planned.setting import MegatronSetting

__all__ = ["BLOCK", "OPTIONS", "VerlSetting", "setting_of"]

BLOCK = "actor_rollout_ref.actor.megatron.override_mcore_model_config.equilibra"
"""where the options are"""


OPTIONS = (
    "enabled", "planner", "spare_slots", "prefetch", "ranks_per_node", "hardware", "spread_sequences", "timeout_s",
    "seed",
)  # fmt: skip
"""of the block"""


@dataclass(frozen=True, kw_only=True)
class VerlSetting(MegatronSetting):
    """The options of the block, by name. The same on every rank."""

    section: ClassVar[str] = f"{BLOCK}."
    homes_move: ClassVar[bool] = False

    max_moves_per_layer: int = 0
    """homes stay where they are: verl's exporters number experts by rank"""
    enabled: bool = True
    """False: the engine stays as verl made it"""
    spread_sequences: bool = False
    """swap sequences between a rank's micro-batches so that none has the same hot experts throughout"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag(f"{self.section}enabled", self.enabled)
        check_flag(f"{self.section}spread_sequences", self.spread_sequences)


def setting_of(engine_config: Any) -> VerlSetting:  # noqa: ANN401 - verl's McoreEngineConfig
    """The options in an engine's configuration; unknown ones are an error."""
    block = (engine_config.override_mcore_model_config or {}).get("equilibra")
    block = {} if block is None else block
    if not isinstance(block, Mapping):
        raise InputError(f"{BLOCK} must be a table of options, not {block!r}: {BLOCK}.enabled=False switches it off")
    unknown = sorted(str(name) for name in block if name not in OPTIONS)
    if unknown:
        raise InputError(f"{BLOCK} has no option {', '.join(unknown)}: it has {', '.join(OPTIONS)}")
    return VerlSetting(**{str(name): value for name, value in block.items()})
