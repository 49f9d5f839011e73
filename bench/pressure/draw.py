"""Bytes by kind and level over time, the measured footprint above them, and what was done when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_MIB = 1 << 20
_COLOURS = {
    "bases": "#d0d0d0",
    "pages k8v8": "#2b6cb0",
    "pages k8v4": "#63b3ed",
    "pages k4v4": "#bee3f8",
    "free pages": "#f0e6c8",
    "tails": "#e9a23b",
}
_MARKS = {"level": "v", "park": "P", "evict": "X"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw a run's JSON."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "kvd"
    run = result["pressed"]
    figure, axes = plt.subplots(figsize=(9, 4.2))
    kinds = run["watched"]["kinds"]
    times = [one["at"] for one in kinds]
    names = [name for name in _COLOURS if any(name in one["by_kind"] for one in kinds)]
    layers = [[result["bases_bytes"] / _MIB] * len(times)]
    layers += [[one["by_kind"].get(name, 0) / _MIB for one in kinds] for name in names]
    labels = ["bases", *names]
    axes.stackplot(times, layers, labels=labels, colors=[_COLOURS[name] for name in labels])
    samples = run["watched"]["samples"]
    axes.plot(
        [at for at, *_ in samples],
        [footprint / _MIB for _, footprint, _ in samples],
        color="black",
        linewidth=0.8,
        label="footprint, 20 Hz",
    )
    axes.plot(times, [one["granted"] / _MIB for one in kinds], color="#276749", label="granted")
    axes.axhline(result["budget_bytes"] / _MIB, color="#c53030", linestyle="--", label="budget")
    axes.set_xlabel("seconds")
    axes.set_ylabel("MiB, all workers")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=5, fontsize=8, frameon=False)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
