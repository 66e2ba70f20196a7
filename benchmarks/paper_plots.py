"""Pictures of the papers' tables: speedups of the grid, and scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.setting import Row
from equilibra.core.atomic import atomic_file

__all__ = ["plot_paper"]

COLOURS = {
    "eplb-oracle": "#8d99ae",
    "lplb": "#a98467",
    "ultraep": "#e09f3e",
    "equilibra": "#1d6fb8",
    "balanced": "#bbbbbb",
}


def plot_paper(sections: dict[str, list[Row]], folder: Path) -> None:
    """Draw what is there."""
    if "relibra" in sections:
        _grid(sections["relibra"], folder / "paper-grid.png")
    if "scale" in sections:
        _scale(sections["scale"], folder / "paper-scale.png")


def _pyplot() -> Any:  # noqa: ANN401
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    return plt


def _grid(rows: list[Row], file: Path) -> None:
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(11, 3.8), layout="constrained")
    names = list(COLOURS)
    for i, name in enumerate(names):
        at = [cell + (i - len(names) / 2 + 0.5) * 0.16 for cell in range(len(rows))]
        axis.bar(at, [row[f"{name}_x"] for row in rows], width=0.15, color=COLOURS[name], label=name)
    axis.axhline(1, color="black", linewidth=0.8)
    labels = [f"{row['model'].replace('-a', chr(10) + 'a')}\n{row['ranks']} ranks\n{row['prompts']}" for row in rows]
    axis.set_xticks(range(len(rows)), labels, fontsize=7)
    axis.set_ylabel("speedup over static placement")
    axis.legend(ncols=5, frameon=False, loc="upper left", fontsize=8)
    axis.set_ylim(0.8, max(row["balanced_x"] for row in rows) * 1.15)
    axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("ReLibra's grid, simulated")
    with atomic_file(file, overwrite=True) as written:
        figure.savefig(written, format="png", dpi=110)
    plt.close(figure)


def _scale(rows: list[Row], file: Path) -> None:
    plt = _pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for kind, colour in (("weak", "#1d6fb8"), ("strong", "#e09f3e")):
        part = [row for row in rows if row["kind"] == kind]
        ranks = [row["ranks"] for row in part]
        axes[0].semilogx(ranks, [row["speedup"] for row in part], "o-", color=colour, label=kind, base=2)
        axes[1].semilogx(ranks, [row["share_of_balanced"] for row in part], "o-", color=colour, label=kind, base=2)
        axes[2].loglog(ranks, [row["step_s"] for row in part], "o-", color=colour, label=f"step, {kind}")
        axes[2].loglog(ranks, [row["plan_wall_s"] for row in part], "x--", color=colour, label=f"planning, {kind}")
    ranks = sorted({row["ranks"] for row in rows})
    for axis in axes:
        axis.set_xticks(ranks, [str(number) for number in ranks], fontsize=7)
        axis.minorticks_off()
    for axis, title in zip(axes, ("speedup over static", "share of balanced", "seconds"), strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("ranks")
        axis.legend(frameon=False, fontsize=8)
        axis.grid(visible=True, alpha=0.25)
    axes[1].set_ylim(0.9, 1.0)
    figure.suptitle("8 to 2,048 ranks: simulated steps, measured planning (one group, two cores)")
    with atomic_file(file, overwrite=True) as written:
        figure.savefig(written, format="png", dpi=110)
    plt.close(figure)
