"""The soak's verdict, and its plot."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

SERIES = {
    "daemon_rss_mib": (lambda it: it["daemon"].get("rss_mib"), 0.05, 4.0),
    "daemon_descriptors": (lambda it: it["daemon"].get("descriptors"), 0.2, 10.0),
    "daemon_threads": (lambda it: it["daemon"].get("threads"), 0.2, 4.0),
    "steady_worker_rss_mib": (lambda it: it["steady"].get("rss_mib"), 0.05, 8.0),
    "steady_worker_descriptors": (lambda it: it["steady"].get("descriptors"), 0.2, 4.0),
    "journal_mib": (lambda it: it["journal_mib"], 0.2, 8.0),
    "swap_mib": (lambda it: it["swap_mib"], 0.2, 64.0),
    "first_p50_s": (lambda it: it["first_p50_s"], 0.5, 0.1),
    "token_p50_s": (lambda it: it["token_p50_s"], 0.5, 0.005),
}
"""By series: its value in a sample, and the growth up to which it counts as flat, as a share of the
start and in its own unit. The larger of both applies."""


def verdicts(samples: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Compare the first and the last quarter of the daemon's last life, series by series."""
    last = [it for it in samples if it["life"] == samples[-1]["life"]]
    last = last[len(last) // 10 :]  # loads and caches fill up at first
    found = {}
    for name, (value, share, least) in SERIES.items():
        values = [it for it in map(value, last) if it is not None]
        quarter = len(values) // 4
        if not quarter:
            continue
        before = statistics.median(values[:quarter])
        after = statistics.median(values[-quarter:])
        found[name] = {
            "first_quarter": round(before, 4),
            "last_quarter": round(after, 4),
            "most": round(max(values), 4),
            "flat": after - before <= max(share * before, least),
        }
    return found


def draw(samples: list[dict[str, Any]], path: Path) -> None:
    """Plot memory, descriptors, journal and latency over time; lines break at each daemon's end."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "kvd"
    panels: list[tuple[str, list[tuple[str, Any]]]] = [
        ("MiB", [
            ("budget", lambda it: it["budget_mib"]),
            ("granted", lambda it: it["granted_mib"]),
            ("workers, proportional", lambda it: it["worker_pss_mib"]),
        ]),
        ("MiB", [
            ("daemon, resident", lambda it: it["daemon"].get("rss_mib")),
            ("worker of steady, resident", lambda it: it["steady"].get("rss_mib")),
        ]),
        ("open", [
            ("daemon's descriptors", lambda it: it["daemon"].get("descriptors")),
            ("daemon's threads", lambda it: it["daemon"].get("threads")),
        ]),
        ("MiB", [
            ("journal", lambda it: it["journal_mib"]),
            ("swap", lambda it: it["swap_mib"]),
            ("log", lambda it: it["log_mib"]),
        ]),
        ("seconds", [
            ("first token, longest", lambda it: it["first_most_s"]),
            ("first token, median", lambda it: it["first_p50_s"]),
            ("per further token, median", lambda it: it["token_p50_s"]),
        ]),
    ]  # fmt: skip
    figure, axes = plt.subplots(len(panels), sharex=True, figsize=(9, 11))
    for axis, (unit, lines) in zip(axes, panels, strict=True):
        for label, value in lines:
            times, values = [], []
            for before, it in zip([None, *samples], samples, strict=False):
                if before is not None and before["life"] != it["life"]:
                    times.append(it["at"] / 60)
                    values.append(float("nan"))
                found = value(it)
                times.append(it["at"] / 60)
                values.append(float("nan") if found is None else found)
            axis.plot(times, values, linewidth=0.9, label=label)
        axis.set_ylabel(unit)
        if unit != "seconds":
            axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    axes[-1].set_yscale("log")
    axes[-1].set_xlabel("minutes")
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
