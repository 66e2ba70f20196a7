"""The picture of the GPU bench: what every contender reaches of the balanced speed, case by case."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from equilibra.bench.gpu.contenders import EPLB, EQUILIBRA, ONLINE, STATIC
from equilibra.bench.setting import Row
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
    axis.set_xticks(range(len(rows)), [str(row["case"]).replace(", ", "\n") for row in rows], fontsize=5.5)
    axis.set_ylim(0, 1.1)
    axis.set_ylabel("share of the balanced speed")
    figure.legend(ncols=4, frameon=False, loc="outside lower center", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Expert layers, rank after rank on one device, measured")
    with atomic_file(folder / "gpu.png", overwrite=True) as written:
        figure.savefig(written, format="png", dpi=120)
    plt.close(figure)


def _numbers(said: str) -> tuple[float, float, float]:
    """Median, least and largest of a cell as the table has it."""
    middle, low, _, high = said.replace("(", "").replace(")", "").split()
    return float(middle), float(low), float(high)
