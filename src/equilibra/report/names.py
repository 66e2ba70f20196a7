"""Planners as people read them, and which of them the page compares."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["BASELINE", "HERO", "IDEAL", "chosen_pair", "label_of"]

BASELINE, HERO, IDEAL = "static", "equilibra", "balanced"
LABELS = {
    "static": "static placement",
    "lpt": "LPT",
    "eplb-history": "EPLB (history)",
    "eplb-oracle": "EPLB (oracle)",
    "lplb": "LPLB",
    "ultraep": "UltraEP's rule",
    "llep": "LLEP's rule",
    "equilibra": "Equilibra",
    "balanced": "perfectly balanced (ideal)",
    "predicted": "the same plan, predicted",
}


def label_of(name: str) -> str:
    """The name on the page; planners we do not know keep their own."""
    return LABELS.get(name, name)


def chosen_pair(names: Iterable[str]) -> tuple[str | None, str | None]:
    """(before, after): static placement and Equilibra, or the nearest there is; None where there is none.

    The ideal is no plan, so it is neither.
    """
    plans = [name for name in names if name != IDEAL]
    after = HERO if HERO in plans else next((name for name in reversed(plans) if name != BASELINE), None)
    before = BASELINE if BASELINE in plans else next((name for name in plans if name != after), None)
    return (before, after) if after is not None else (None, before)
