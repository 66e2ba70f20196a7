"""Pictures of results: the papers' grid and scale, growth of planning time, cases of the GPU bench."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.suite import Row
from equilibra.core.atomic import atomic_file

GREY, DIM, BROWN, ORANGE, BLUE = "#bbbbbb", "#8d99ae", "#a98467", "#e09f3e", "#1d6fb8"
OF_GRID = {"eplb-oracle": DIM, "lplb": BROWN, "ultraep": ORANGE, "equilibra": BLUE, "balanced": GREY}
OF_GPU = {"static": GREY, "eplb-oracle": DIM, "online-exact": ORANGE, "equilibra": BLUE}
AGAIN = "balanced-again"


@contextmanager
def _picture(file: Path, *, dpi: int = 110, columns: int = 1, size: tuple[float, float]) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, saved on exit."""
    import matplotlib as mpl  # noqa: PLC0415 - not always there

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(1, columns, figsize=size, layout="constrained")
    yield figure, axes
    with atomic_file(file, overwrite=True) as written:
        figure.savefig(written, format="png", dpi=dpi)
    plt.close(figure)


def plot_paper(sections: dict[str, list[Row]], folder: Path) -> None:
    """Draw the pictures of the sections that were run."""
    if "relibra" in sections:
        _grid(sections["relibra"], folder / "paper-grid.png")
    if "scale" in sections:
        _scale(sections["scale"], folder / "paper-scale.png")


def _grid(rows: list[Row], file: Path) -> None:
    with _picture(file, size=(11, 3.8)) as (figure, axis):
        names = list(OF_GRID)
        for i, name in enumerate(names):
            at = [cell + (i - len(names) / 2 + 0.5) * 0.16 for cell in range(len(rows))]
            axis.bar(at, [row[f"{name}_x"] for row in rows], width=0.15, color=OF_GRID[name], label=name)
        axis.axhline(1, color="black", linewidth=0.8)
        models = [row["model"].replace("-a", "\na") for row in rows]
        labels = [f"{m}\n{row['ranks']} ranks\n{row['prompts']}" for m, row in zip(models, rows, strict=True)]
        axis.set_xticks(range(len(rows)), labels, fontsize=7)
        axis.set_ylabel("speedup over static placement")
        axis.legend(ncols=5, frameon=False, loc="upper left", fontsize=8)
        axis.set_ylim(0.8, max(row["balanced_x"] for row in rows) * 1.15)
        axis.spines[["top", "right"]].set_visible(False)
        figure.suptitle("ReLibra's grid, simulated")


def _scale(rows: list[Row], file: Path) -> None:
    with _picture(file, columns=3, size=(11, 3.4)) as (figure, axes):
        for kind, colour in (("weak", BLUE), ("strong", ORANGE)):
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


def plot_growth(sections: dict[str, list[Row]], folder: Path) -> None:
    """Draw planning time against ranks, experts and layers, where measured."""
    if "growth" not in sections:
        return
    with _picture(folder / "planner-growth.png", columns=3, size=(11, 3.4)) as (figure, axes):
        for axis, what in zip(axes, ("ranks", "experts", "layers"), strict=True):
            time = "seconds" if what == "layers" else "ms_per_layer"
            points = sorted((row[what], row[time]) for row in sections["growth"] if row["grows"] == what)
            sizes, times = zip(*points, strict=True)
            axis.loglog(sizes, times, "o-", color="#2a6f97")
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.minorticks_off()
            for size, value in points:
                axis.annotate(f"{value:.2g}" if value < 10 else f"{value:.0f}", (size, value), xytext=(0, 6),
                              textcoords="offset points", ha="center", fontsize=8)  # fmt: skip
            axis.margins(y=0.15)
            axis.yaxis.set_major_formatter("{x:g}")
            axis.set_xlabel(what)
            axis.set_ylabel("seconds per step" if what == "layers" else "milliseconds per layer")
            axis.grid(visible=True, alpha=0.25)
        figure.suptitle("Planning time, measured on two cores")


def plot_gpu(rows: list[Row], folder: Path) -> None:
    """Draw every contender's share of the balanced speed by case; without matplotlib, do nothing."""
    if find_spec("matplotlib") is None:
        return
    with _picture(folder / "gpu.png", dpi=120, size=(max(0.55 * len(rows) + 2, 6), 4.2)) as (figure, axis):
        for i, (name, colour) in enumerate(OF_GPU.items()):
            values = [_numbers(row[name]) for row in rows]
            at = [case + (i - len(OF_GPU) / 2 + 0.5) * 0.2 for case in range(len(rows))]
            errors = [[max(v[0] - v[1], 0) for v in values], [max(v[2] - v[0], 0) for v in values]]
            axis.bar(
                at, [v[0] for v in values], width=0.19, color=colour, label=name, yerr=errors, error_kw={"lw": 0.8}
            )
        axis.axhline(1, color="black", linewidth=0.8)
        axis.axhline(rows[0]["reach"], color=BLUE, linewidth=0.8, linestyle=":")
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


def _name_cases(axis: Any, names: list[list[str]]) -> None:  # noqa: ANN401 - matplotlib is not always there
    """Label every case with its ranks, and groups of cases with model and recording."""
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
