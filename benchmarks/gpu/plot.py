"""The picture of the GPU bench: what every contender reaches of the balanced speed, case by case."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.gpu.contenders import AGAIN, EPLB, EQUILIBRA, ONLINE, STATIC
from benchmarks.setting import Row
from equilibra.core.atomic import atomic_file

__all__ = ["plot_gpu"]

COLOURS = {STATIC: "#bbbbbb", EPLB: "#8d99ae", ONLINE: "#e09f3e", EQUILIBRA: "#1d6fb8"}


def plot_gpu(rows: list[Row], folder: Path) -> None:
    """Draw gpu.png from the first table; nothing where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axis = plt.subplots(figsize=(max(0.55 * len(rows) + 2, 6), 4.2), layout="constrained")
    for i, (name, colour) in enumerate(COLOURS.items()):
        values = [_numbers(row[name]) for row in rows]
        at = [case + (i - len(COLOURS) / 2 + 0.5) * 0.2 for case in range(len(rows))]
        errors = [[max(v[0] - v[1], 0) for v in values], [max(v[2] - v[0], 0) for v in values]]
        axis.bar(at, [v[0] for v in values], width=0.19, color=colour, label=name, yerr=errors, error_kw={"lw": 0.8})
    axis.axhline(1, color="black", linewidth=0.8)
    axis.axhline(rows[0]["reach"], color="#1d6fb8", linewidth=0.8, linestyle=":")
    again = {case: _numbers(row[AGAIN])[0] for case, row in enumerate(rows) if AGAIN in row}
    axis.scatter(
        list(again), list(again.values()), marker="_", s=120, color="black", linewidth=0.8, label=AGAIN, zorder=3
    )
    _name_cases(axis, [str(row["case"]).split(", ") for row in rows])
    axis.set_ylim(0, 1.1)
    axis.set_ylabel("share of the balanced speed")
    figure.legend(ncols=5, frameon=False, loc="outside lower center", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Expert layers, rank after rank on one device, measured")
    with atomic_file(folder / "gpu.png", overwrite=True) as written:
        figure.savefig(written, format="png", dpi=120)
    plt.close(figure)


def _name_cases(axis: Any, names: list[list[str]]) -> None:  # noqa: ANN401 - matplotlib is not always there
    """Ranks under every case; what they share, once: the model, and the recording below it."""
    axis.set_xticks(range(len(names)), [name[-1] for name in names], fontsize=7)
    axis.tick_params(axis="x", length=0)
    for depth, height in ((2, -0.10), (1, -0.17)):
        for _, group in groupby(range(len(names)), key=lambda case: names[case][:depth]):
            cases = list(group)
            axis.text(
                (cases[0] + cases[-1]) / 2, height, names[cases[0]][depth - 1], ha="center", va="center",
                fontsize=8 if depth == 1 else 7, transform=axis.get_xaxis_transform(),
            )  # fmt: skip


def _numbers(said: str) -> tuple[float, float, float]:
    """Median, least and largest of a cell as the table has it."""
    middle, low, _, high = said.replace("(", "").replace(")", "").split()
    return float(middle), float(low), float(high)
