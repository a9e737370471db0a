"""One picture a benchmark: lines over the sequence length, the same bytes for the same numbers."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Literal

LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # told apart by colour-blind eyes too
MARKS = "osD^vP"


def lines(
    title: str,
    unit: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    vertical: Literal["log", "linear"] = "log",
) -> str | None:
    """An SVG of `series`, name to (length, value) points; None where matplotlib is not installed.

    Sizes belong on the logarithmic scale, on which a power law is straight; ratios on the linear one, which shows 0.
    """
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed; pip install 'intently[plots]'")
        return None
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    with matplotlib.rc_context({"svg.hashsalt": "intently", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot(xscale="log", yscale=vertical, xlabel="sequence length", ylabel=unit, title=title)
        for (name, points), colour, mark in zip(series.items(), LINES * 2, MARKS * 2, strict=False):
            axes.plot(*zip(*points, strict=True), label=name, color=colour, marker=mark, markersize=5)
        lengths = sorted({length for points in series.values() for length, _ in points})
        axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
        if vertical == "linear":
            axes.set_ylim(0, 1.25 * max(value for points in series.values() for _, value in points))
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.legend(frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"
