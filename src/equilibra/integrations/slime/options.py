"""What a slime user can set: keys `equilibra_...` of the file that `--custom-config-path` names.

slime reads that file before it starts its processes and makes every key an attribute of `args`, which all of them get.
"""

from __future__ import annotations

from typing import Any

from equilibra.core.errors import InputError
from equilibra.integrations.planned.setting import MegatronSetting

__all__ = ["OPTIONS", "PREFIX", "base_spec", "setting_of"]

PREFIX = "equilibra_"
OPTIONS: dict[str, tuple[type, ...]] = {
    "planner": (str,),
    "spare_slots": (int,),
    "prefetch": (bool,),
    "ranks_per_node": (int,),
    "timeout_s": (int, float),
    "seed": (int,),
    "spec": (str,),
}
"""their names without the prefix, and types; homes do not move under slime, so nothing about moves is among them"""


def setting_of(args: Any) -> MegatronSetting:  # noqa: ANN401 - slime's arguments
    """How steps are planned; what is not set is as `MegatronSetting` has it."""
    given = _given(args)
    given.pop("spec", None)
    return MegatronSetting(**given)


def base_spec(args: Any) -> list[str] | None:  # noqa: ANN401
    """The module and the function of the layers' specification that `--spec` would have named otherwise."""
    named = _given(args).get("spec")
    if named is None:
        return None
    words = named.split()
    if len(words) != 2:
        raise InputError(
            f"{PREFIX}spec must be a module and a function in it, as --spec takes them, not {named!r}: write "
            "'slime_plugins.models.glm4 get_glm_spec'"
        )
    return list(words)


def _given(args: Any) -> dict[str, Any]:  # noqa: ANN401
    given = {name.removeprefix(PREFIX): value for name, value in vars(args).items() if name.startswith(PREFIX)}
    for name, value in given.items():
        if name not in OPTIONS:
            known = ", ".join(f"{PREFIX}{one}" for one in OPTIONS)
            raise InputError(f"{PREFIX}{name} is no option: there are {known}")
        if not isinstance(value, OPTIONS[name]) or (isinstance(value, bool) and bool not in OPTIONS[name]):
            kinds = " or ".join(kind.__name__ for kind in OPTIONS[name])
            raise InputError(f"{PREFIX}{name} must be of type {kinds}, not {value!r}")
    return given
