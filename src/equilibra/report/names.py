"""Planners as people read them, and which of them the page compares."""

from __future__ import annotations

from collections.abc import Iterable

from equilibra.events.run import Run

__all__ = ["BASELINE", "HERO", "IDEAL", "PREDICTED", "chosen_pair", "label_of", "labels_of", "predictions_in"]

BASELINE, HERO, IDEAL, PREDICTED = "static", "equilibra", "balanced", "predicted"
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


def predictions_in(run: Run) -> list[str]:
    """Of a measured run: the records that were not measured. Of a simulated one none, for nothing was measured."""
    said = run.about.get("predicted")
    named = [PREDICTED, *(said if isinstance(said, list) else [])]
    found = [name for name in run.planners if name in named]
    return found if run.about.get("kind") == "measured" and len(found) < len(run.planners) else []


def labels_of(run: Run) -> dict[str, str]:
    """Names on the page; where measured and predicted stand side by side, they say which they are."""
    predicted = predictions_in(run)
    if not predicted:
        return {name: label_of(name) for name in run.planners}
    measured = [label_of(name) for name in run.planners if name not in predicted]
    labels = {name: f"{label_of(name)}, {'predicted' if name in predicted else 'measured'}" for name in run.planners}
    if PREDICTED in labels:
        labels[PREDICTED] = f"{measured[0]}, predicted" if len(measured) == 1 else label_of(PREDICTED)
    return labels


def chosen_pair(names: Iterable[str]) -> tuple[str | None, str | None]:
    """(before, after): static placement and Equilibra, or the nearest there is; None where there is none.

    The ideal is no plan, so it is neither. A prediction of a plan that is here too is only compared with that plan, if
    there is nothing else.
    """
    given = list(names)
    plans = [name for name in given if name not in (IDEAL, PREDICTED)] or [name for name in given if name != IDEAL]
    after = HERO if HERO in plans else next((name for name in reversed(plans) if name != BASELINE), None)
    before = BASELINE if BASELINE in plans else next((name for name in plans if name != after), None)
    if after is None:
        before, after = None, before
    if before is None and after is not None and PREDICTED in given and after != PREDICTED:
        before = PREDICTED
    return before, after
