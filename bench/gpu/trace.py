"""Where a pass spends its time on CUDA: kernels of the device, and the driver's calls.

    python -m bench.gpu.trace --model FOLDER [--kv k8v8] [--chunk 1024] [--prompt N] [--json FILE]

Runs several prompts, or one of ``--prompt`` tokens, in an engine without a daemon
(`bench.timeline`), in whole passes. PyTorch's profiler records one run of each after two others; it
sees all CUDA work of the process, including MLX's. *Busy* is the time during which the device ran a
kernel or a copy, and *idle* lists the gaps of at least `GAP_MS`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.timeline import BUDGET_GIB, Timeline

Event = dict[str, Any]
KERNELS = {"kernel", "gpu_memcpy", "gpu_memset"}
CALLS = {"cuda_runtime", "cuda_driver"}
GAP_MS = 0.5
"""Milliseconds of the shortest gap that is listed."""
MOST = 14
"""Kernels and calls that are listed, those with the most time first."""


def busy_ms(events: Sequence[Event]) -> float:
    """Return the milliseconds during which at least one of the events ran."""
    busy = end = 0.0
    for start, stop in sorted((one["ts"], one["ts"] + one["dur"]) for one in events):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy / 1e3


def idle(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return the gaps of at least `GAP_MS` without an event: start, length, and the next event."""
    found: list[dict[str, Any]] = []
    ordered = sorted(events, key=lambda one: float(one["ts"]))
    begin = end = ordered[0]["ts"] if ordered else 0.0
    for one in ordered:
        if one["ts"] - end >= 1e3 * GAP_MS:
            at, length = (round(us / 1e3, 2) for us in (end - begin, one["ts"] - end))
            found.append({"at_ms": at, "ms": length, "before": one["name"][:48]})
        end = max(end, one["ts"] + one["dur"])
    return found


def by_name(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return count and milliseconds by name."""
    durations = defaultdict[str, list[float]](list)
    for one in events:
        durations[one["name"]].append(one["dur"] / 1e3)
    found = [
        {"name": name, "count": len(each), "ms": round(sum(each), 2)}
        for name, each in durations.items()
    ]
    return sorted(found, key=lambda one: -one["ms"])[:MOST]


def traced(work: Callable[[], None]) -> list[Event]:
    """Run ``work`` under PyTorch's profiler; return what it recorded."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        work()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(file))
        events: list[Event] = json.loads(file.read_text())["traceEvents"]
    return events


def measure(timeline: Timeline, prompts: dict[str, int], *, record: bool) -> dict[str, Any]:
    """Play requests until they are warm, then once for the time and once for the record."""
    for seed in (1, 2):
        timeline.play(**prompts, seed=seed)
    start = time.perf_counter()
    timeline.play(**prompts, seed=3)
    found: dict[str, Any] = {**prompts, "ms": round(1e3 * (time.perf_counter() - start), 1)}
    if record:
        events = traced(lambda: timeline.play(**prompts, seed=4))
        kernels = [one for one in events if one.get("cat") in KERNELS]
        found |= {
            "busy_ms": round(busy_ms(kernels), 2),
            "idle": idle(kernels),
            "kernels": len(kernels),
            "most_time": by_name(kernels),
            "calls": by_name([one for one in events if one.get("cat") in CALLS]),
        }
    return found


CASES: list[dict[str, int]] = [
    {"rows": 1, "prompt": 2048, "new": 1},
    {"rows": 8, "prompt": 200, "new": 1},
    {"rows": 1, "prompt": 16384, "new": 1},
    {"rows": 1, "prompt": 16608, "new": 1, "shared": 16384},
    {"rows": 8, "prompt": 20, "new": 40},
]


def main(given: list[str] | None = None) -> None:
    """Measure all cases and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="demo, or a model's folder")
    parser.add_argument("--kv", default="k8v8")
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--no-trace", action="store_true", help="only times, without PyTorch")
    parser.add_argument("--prompt", type=int, help="tokens of the only prompt")
    parser.add_argument("--budget-gib", type=int, default=BUDGET_GIB)
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first ones")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(given)
    timeline = Timeline(
        options.model, options.kv, options.chunk, whole_passes=True, budget_gib=options.budget_gib
    )
    one = {"rows": 1, "prompt": options.prompt, "new": 1}
    cases = []
    for prompts in [one] if options.prompt else CASES[: options.cases]:
        cases.append(measure(timeline, prompts, record=not options.no_trace))
        print(json.dumps(cases[-1]), flush=True)
        if options.json is not None:  # after each, so that a call that is ended keeps its results
            report = {"model": Path(options.model).name, "cases": cases}
            options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
