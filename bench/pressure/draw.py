"""Plots bytes by kind over time, the measured footprint, and the governor's actions."""

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
_MARKS = {"reclaim_precision": ("v", "stepped down"), "reclaim_preempt": ("P", "preempted")}
"""Marker and label of each plotted event kind; the marks are above the budget's line."""


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the result of `bench.pressure`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "kvd"
    run = result["pressed"]
    figure, axes = plt.subplots(figsize=(9, 4.2))
    kinds = run["watched"]["kinds"]
    times = [one["at"] for one in kinds]
    names = [name for name in _COLOURS if any(name in one["by_kind"] for one in kinds)]
    layers = [[_bases(run, at) / _MIB for at in times]]
    layers += [[one["by_kind"].get(name, 0) / _MIB for one in kinds] for name in names]
    labels = ["bases", *names]
    axes.stackplot(times, layers, labels=labels, colors=[_COLOURS[name] for name in labels])
    samples = run["watched"]["samples"]
    on_device = run.get("governed") == "accelerator"
    axes.plot(
        [at for at, *_ in samples],
        [one[3 if on_device else 1] / _MIB for one in samples],
        color="black",
        linewidth=0.8,
        label="active and cache, 20 Hz" if on_device else "footprint, 20 Hz",
    )
    axes.plot(times, [one["granted"] / _MIB for one in kinds], color="#276749", label="granted")
    axes.axhline(result["budget_bytes"] / _MIB, color="#c53030", linestyle="--", label="budget")
    top = 1.03 * result["budget_bytes"] / _MIB
    for kind, (mark, name) in _MARKS.items():
        when = [one["at"] for one in run["actions"] if one["kind"] == kind]
        if when:
            axes.plot(when, [top] * len(when), mark, color="#44337a", markersize=5, label=name)
    axes.set_xlabel("seconds")
    axes.set_ylabel("MiB, all workers")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=5, fontsize=8, frameon=False)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def _bases(run: dict[str, Any], at: float) -> int:
    """Return the sum of the bases of the models that are loaded at time ``at``."""
    gone = {one["model"] for one in run["actions"] if one["kind"] == "evict" and one["at"] <= at}
    return sum(nbytes for model, nbytes in run["bases"].items() if model not in gone)
