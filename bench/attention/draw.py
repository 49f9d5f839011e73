"""Plots a call's time, and its share of the copy bandwidth, against the rows' length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_DENSE = {"dense": ("#4a5568", "-"), "dense, masked": ("#a0aec0", "--")}
_REFERENCE = ("#c05621", "--")


def draw(result: dict[str, Any], file: Path) -> None:
    """Draw part ``length`` of a run's result; if it was not measured, the plot is empty."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import to_hex

    mpl.rcParams["svg.hashsalt"] = "kvd"
    rows = [row for row in result["measured"] if row["part"] == "length"]
    names = list(dict.fromkeys(row["path"] for row in rows))
    fused = [name for name in names if name.startswith("fused")]
    colours = plt.get_cmap("viridis")
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name in names:
        line = [row for row in rows if row["path"] == name]
        lengths = [row["lengths"][0] for row in line]
        colour, style = _DENSE.get(name, _REFERENCE)
        if name in fused:
            colour, style = to_hex(colours(fused.index(name) / max(1, len(fused)))), "-"
        left.plot(
            lengths, [row["ms"] for row in line], color=colour, linestyle=style, marker=".",
            label=name,
        )  # fmt: skip
        if name in fused or name == "dense":
            shares = [row["of_copy"] for row in line]
            right.plot(lengths, shares, color=colour, linestyle=style, marker=".", label=name)
    for axes, title in ((left, "ms a call"), (right, "bytes a second, of copying")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("keys of each of 8 rows")
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_yscale("log")
    right.set_ylim(bottom=0)
    left.legend(fontsize=7, frameon=False)
    figure.savefig(file)
    plt.close(figure)
