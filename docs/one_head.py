"""`python docs/one_head.py`: run the cells of mechanism/one-head.md and draw its figures from the tensors they leave."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cells

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
except ModuleNotFoundError as missing:
    raise SystemExit(f"the figures are drawn with matplotlib ({missing}): pip install 'intently[plots]'") from missing

PAGE = Path(__file__).parent / "mechanism" / "one-head.md"
ASSETS = Path(__file__).parent / "assets" / "one-head"

# A grey that stands out equally well from a white page and from a dark one; nothing is drawn behind it.
INK = "#7d7f85"
HIDDEN = "#7d7f8533"
BLUE, ORANGE, GREEN = "#3b82c4", "#e07b39", "#4c9f70"
SHADES = LinearSegmentedColormap.from_list("shades", ["#eaf1f8", "#7fb0dc", "#1f5f99"])

STYLE: Any = {
    "svg.fonttype": "path",  # letters are drawn, so that no font has to be found or fetched
    "svg.hashsalt": "one-head",  # and ids are the same in every run
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


def main(folder: Path = ASSETS) -> None:
    _, page = cells.run(PAGE.read_text("utf-8"), PAGE.stem)
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, figure in figures(page).items():
            figure.savefig(
                folder / f"{name}.svg",
                transparent=True,
                bbox_inches="tight",
                metadata={"Date": None, "Creator": None},
            )


def figures(page: dict[str, Any]) -> dict[str, Figure]:
    """The figures by name, from what the cells of the page left behind."""
    words, allowed = page["words"], page["allowed"]
    pairs = {"rows": words, "columns": words, "hidden": ~allowed}
    features = ["plural", "singular", "filler"]
    return {
        "project": project(page),
        "scores": one(page["scores"][0], "scores  q · k", words, words),
        "logits": one(page["logits"][0], "logits  q · k / √4, later words hidden", **pairs),
        "weights": one(page["weights"][0], "weights: each row sums to 1", **pairs, digits=2),
        "output": output(page["weights"][0], page["value"][0], words, features),
        "width": width(page["widths"], page["curve"]),
        "inverted": two(
            (page["weights"][0], "True = may see", pairs),
            (page["inverted"][0], "inverted", {**pairs, "hidden": allowed}),
        ),
        "leak": leak(page["honest"], page["leaky"], page["alone"]),
        "axis": two((page["weights"][0], "over the keys", pairs), (page["across"][0], "over the queries", pairs)),
        "effect": effect(page["marks"], page["share"][0, 0], page["effects"]),
    }


def project(page: dict[str, Any]) -> Figure:
    sought = ["noun", "plural", "singular", "filler"]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for at, (name, columns) in enumerate({"query": sought, "key": sought, "value": sought[1:]}.items()):
        axes = figure.add_subplot(1, 3, at + 1)
        heat(axes, page[name][0], name, page["words"] if at == 0 else [""] * len(page["words"]), columns, top=4)
    return figure


def one(numbers: Any, title: str, rows: list[str], columns: list[str], hidden: Any = None, digits: int = 0) -> Figure:
    figure = Figure(figsize=(5.4, 4.4), layout="constrained")
    heat(figure.add_subplot(), numbers, title, rows, columns, hidden=hidden, digits=digits)
    return figure


def two(*halves: tuple[Any, str, dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    for at, (numbers, title, labels) in enumerate(halves):
        axes = figure.add_subplot(1, 2, at + 1)
        heat(axes, numbers, title, **labels, digits=2, top=1)
    return figure


def heat(
    axes: Axes,
    numbers: Any,
    title: str,
    rows: list[str],
    columns: list[str],
    *,
    hidden: Any = None,
    digits: int = 0,
    top: float | None = None,
) -> None:
    """A matrix as coloured cells with their numbers; a hidden cell is left grey and empty."""
    top = top or max(float(numbers[numbers.isfinite()].max()), 1e-9)
    axes.set_title(title)
    axes.set_xticks([at + 0.5 for at in range(len(columns))], columns, rotation=45, ha="left", rotation_mode="anchor")
    axes.set_yticks([at + 0.5 for at in range(len(rows))], rows)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(rows), 0)
    for row in range(len(rows)):
        for column in range(len(columns)):
            covered = hidden is not None and bool(hidden[row, column])
            number = 0.0 if covered else float(numbers[row, column])
            place = {"xy": (column + 0.03, row + 0.03), "width": 0.94, "height": 0.94, "linewidth": 0}
            axes.add_patch(Rectangle(**place, facecolor=HIDDEN if covered else SHADES(min(number / top, 1.0))))
            if not covered:
                colour = "#ffffff" if number > 0.6 * top else "#20354a"
                text = f"{number:.{digits}f}".removeprefix("0") if 0 < number < 1 else f"{number:.0f}"
                axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=colour, fontsize=9)


def output(weights: Any, value: Any, words: list[str], features: list[str]) -> Figure:
    """Each word's output as a bar: what it received of each feature."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(words))
    reached = [0.0] * len(words)
    for feature, colour in zip(range(len(features)), (ORANGE, BLUE, INK), strict=True):
        received = [float(weights[at] @ value[:, feature]) for at in places]
        axes.barh(places, received, left=reached, color=colour, label=features[feature], height=0.7)
        reached = [before + more for before, more in zip(reached, received, strict=True)]
    axes.set_yticks(places, words)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the mixture (the rest comes from words that hand over nothing)")
    axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def width(widths: list[int], curve: dict[str, list[float]]) -> Figure:
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(widths, curve["scaled"], "o-", color=BLUE)
    axes.plot(widths, curve["unscaled"], "o-", color=ORANGE)
    axes.text(widths[-1], curve["scaled"][-1] - 0.2, "scaled by 1/√width", color=BLUE, ha="right", va="top")
    axes.text(widths[5], curve["unscaled"][5] + 0.15, "unscaled", color=ORANGE, ha="left", va="bottom")
    axes.axhline(4, color=INK, linewidth=0.8, linestyle=":")
    axes.text(widths[0], 4.05, "all 16 keys alike", va="bottom", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [str(each) for each in widths])
    axes.set_ylim(0, 4.4)
    axes.set_xlabel("width of the head")
    axes.set_ylabel("entropy of the weights, bits")
    return figure


def leak(honest: list[float], leaky: list[float], alone: float) -> Figure:
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(honest, color=BLUE)
    axes.plot(leaky, color=ORANGE)
    axes.plot([len(leaky) * 1.04], [min(alone, 7.5)], "o" if alone <= 7.5 else "^", color=ORANGE, clip_on=False)
    axes.text(len(leaky) * 1.02, min(alone, 7.5) - 0.05, "future not there  ", color=ORANGE, ha="right", va="center")
    axes.text(len(honest) * 0.6, 3.15, "with the mask", color=BLUE, va="bottom")
    axes.text(len(leaky) * 0.6, leaky[-1] + 0.2, "without", color=ORANGE, va="bottom")
    axes.axhline(3, color=INK, linewidth=0.8, linestyle=":")
    axes.set_ylim(0, 8)
    axes.set_xlabel("training step")
    axes.set_ylabel("bits a token; 3 is guessing")
    return figure


def effect(marks: list[str], share: Any, effects: list[float]) -> Figure:
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(marks))
    axes.bar([at - 0.2 for at in places], [float(each) for each in share], 0.38, color=BLUE, label="weight")
    axes.bar([at + 0.2 for at in places], effects, 0.38, color=ORANGE, label="change without its value")
    axes.set_xticks(places, marks)
    axes.set_ylim(0, 1)
    axes.legend(loc="upper right")
    return figure


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
