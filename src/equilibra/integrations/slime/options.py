"""What a slime user can set: keys `equilibra_...` of the file that `--custom-config-path` names.

slime reads that file before it starts its processes and makes every key an attribute of `args`, which all of them get.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from equilibra.core.checks import check_text
from equilibra.core.errors import InputError
from equilibra.integrations.planned.setting import MegatronSetting

__all__ = ["OPTIONS", "PREFIX", "base_spec", "setting_of"]

PREFIX = "equilibra_"
OPTIONS = ("planner", "spare_slots", "prefetch", "ranks_per_node", "hardware", "timeout_s", "seed", "spec")
"""their names without the prefix; homes do not move under slime, so nothing about moves is among them"""


@dataclass(frozen=True, kw_only=True)
class SlimeSetting(MegatronSetting):
    """The options by name. The same on every rank."""

    section: ClassVar[str] = PREFIX


def setting_of(args: Any) -> SlimeSetting:  # noqa: ANN401 - slime's arguments
    """How steps are planned; what is not set is as `MegatronSetting` has it."""
    given = _given(args)
    given.pop("spec", None)
    return SlimeSetting(**given)


def base_spec(args: Any) -> list[str] | None:  # noqa: ANN401
    """The module and the function of the layers' specification that `--spec` would have named otherwise."""
    named = _given(args).get("spec")
    if named is None:
        return None
    check_text(f"{PREFIX}spec", named)
    words = named.split()
    if len(words) != 2:
        raise InputError(
            f"{PREFIX}spec must be a module and a function in it, as --spec takes them, not {named!r}: write "
            "'slime_plugins.models.glm4 get_glm_spec'"
        )
    return list(words)


def _given(args: Any) -> dict[str, Any]:  # noqa: ANN401
    given = {name.removeprefix(PREFIX): value for name, value in vars(args).items() if name.startswith(PREFIX)}
    for name in given:
        if name not in OPTIONS:
            known = ", ".join(f"{PREFIX}{one}" for one in OPTIONS)
            raise InputError(f"{PREFIX}{name} is no option: there are {known}")
    return given
