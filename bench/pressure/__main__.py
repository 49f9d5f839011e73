"""Run streams of several models without and with memory pressure, and compare their tokens.

    python -m bench.pressure [--model demo|FOLDER] [--copies 3] [--streams 64] [--share 0.333]
                             [--json FILE] [--plot FILE]

There are copies of one model, of the embedded one by default, and one model with random weights and
wider keys and values. The latter has priority: rows of the other models are preempted for it. First
all streams run without pressure; the peak of the memory that workers hold beyond their bases is the
demand. A base is what a loaded worker holds without rows. Then all streams run again under a budget
of the bases plus a share of the demand.

A stream that stayed on one precision level under pressure must have the same tokens as without
pressure. For levels below the first, a further run without pressure starts the models at that
level. If streams differ, the runs without pressure are repeated. If the same streams also differ
between runs without pressure, then the cause is the batch and not the pressure.

The exit status is 1 if a stream failed or differs, if the footprint exceeded the budget by more
than 3 %, or if the grants ever exceeded the budget.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shlex
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from kvd.worker import lean_imports

if __name__ == "__main__":
    lean_imports.install()  # before the imports of mlx-lm

import mlx.core as mx

from bench.bars import Bar
from bench.gpu import shapes
from bench.pressure.draw import draw
from bench.pressure.play import Outcome, Run, play
from bench.pressure.streams import Stream, make
from protocol.kv import SCHEMES

MOST_OVER = 0.03
"""Share of the budget by which the footprint may exceed it, for memory that is not granted."""


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Run all streams without and with pressure; return the results and their comparison."""
    with tempfile.TemporaryDirectory(prefix="kvd-wide-") as folder:
        wide = Path(folder, "wide")
        shapes.write("wide", mx.float16, wide)
        models = {f"copy-{number}": options.model for number in range(1, options.copies + 1)}
        models["wide"] = str(wide)
        streams = make(
            list(models),
            options.streams,
            prompt=options.prompt,
            completion=options.completion,
            seed=options.seed,
        )
        free = asyncio.run(play(models, streams, kv=SCHEMES[0]))
        demand = free.peak_granted - sum(free.bases.values())
        print(f"without pressure: {free.seconds:.0f} s, demand {_mib(demand)}", flush=True)
        room = int(options.share * demand)
        pressed = asyncio.run(play(models, streams, kv=SCHEMES[0], budget=lambda it: it + room))
        print(f"under {_mib(pressed.budget)}: {pressed.seconds:.0f} s", flush=True)
        found = _found(options, streams, free, pressed)
        _write(options, found)  # so that an interrupted run keeps its results
        right = _unpressed(models, streams, free, pressed)
        same, differ = _identical(right, pressed)
        found["summary"] = summary(pressed, same, differ)
        found["bars"] = [bar.as_dict() for bar in bars(found["summary"])]
        _write(options, found)
        if differ:
            again = _unpressed(models, streams, None, pressed)
            found["summary"]["differences"] = differences(right, again, pressed)
            _write(options, found)
    return found


def _found(
    options: argparse.Namespace, streams: list[Stream], free: Run, pressed: Run
) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", "-m", "bench.pressure", *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.machine()}, {mx.default_device()}",
        "streams": options.streams,
        "prompt_tokens": sum(len(one.tokens) for one in streams),
        "bases_bytes": sum(pressed.bases.values()),
        "demand_bytes": free.peak_granted - sum(free.bases.values()),
        "budget_bytes": pressed.budget,
        "summary": summary(pressed, 0, []),
        "bars": [],
        "unpressed": {"seconds": free.seconds, "peak_footprint": free.peak_footprint},
        "pressed": pressed.as_dict(),
    }


def _write(options: argparse.Namespace, found: dict[str, Any]) -> None:
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def summary(run: Run, same: int, differ: list[int]) -> dict[str, Any]:
    """Return counts of what happened under pressure; ``held`` is whether all checks passed."""
    finished = sum(one.reason == "length" for one in run.outcomes)
    levels = Counter("->".join(map(str, one.levels)) for one in run.outcomes)
    over = run.peak_footprint / run.budget - 1
    found = {
        "finished": finished,
        "failed": [one.error or one.reason for one in run.outcomes if one.reason != "length"],
        "on_one_level_and_the_same": same,
        "on_one_level_and_not": differ,
        "streams_by_levels": dict(sorted(levels.items())),
        "streams_paused": sum(bool(one.events.get("paused")) for one in run.outcomes),
        "actions": dict(Counter(one["kind"] for one in run.actions)),
        "seconds": run.seconds,
        "samples": len(run.watched["samples"]),
        "peak_granted_bytes": run.peak_granted,
        "peak_footprint_bytes": run.peak_footprint,
        "peak_footprint_over_budget": round(over, 4),
        "violations": run.violations,
    }
    return found | {"held": all(bar.passed for bar in bars(found))}


def bars(found: dict[str, Any]) -> list[Bar]:
    """Return the limits for a run's summary."""
    return [
        Bar("streams that failed", len(found["failed"]), 0),
        Bar("streams that differ", len(found["on_one_level_and_not"]), 0),
        Bar("footprint above the budget", found["peak_footprint_over_budget"], MOST_OVER),
        Bar("grants above the budget", found["violations"], 0),
    ]


def _by_level(run: Run) -> dict[int, list[int]]:
    """Return the indexes of the streams that stayed on one precision level, by level."""
    found: dict[int, list[int]] = {}
    for number, one in enumerate(run.outcomes):
        if len(one.levels) == 1:
            found.setdefault(one.levels[0], []).append(number)
    return found


def _unpressed(
    models: dict[str, str], streams: list[Stream], free: Run | None, pressed: Run
) -> dict[int, Outcome]:
    """Return outcomes without pressure of the streams that stayed on one level under pressure.

    They run on that level. ``free``: a run of all streams on the top level; None: run it now.
    """
    right: dict[int, Outcome] = {}
    for level, some in sorted(_by_level(pressed).items()):
        if level == 0:
            run = free or asyncio.run(play(models, streams, kv=SCHEMES[0]))
            right |= {number: run.outcomes[number] for number in some}
        else:
            run = asyncio.run(play(models, [streams[n] for n in some], kv=SCHEMES[level]))
            right |= dict(zip(some, run.outcomes, strict=True))
    return right


def _identical(right: dict[int, Outcome], pressed: Run) -> tuple[int, list[int]]:
    differ = [n for n, one in right.items() if one.tokens != pressed.outcomes[n].tokens]
    return len(right) - len(differ), sorted(differ)


def differences(
    right: dict[int, Outcome], again: dict[int, Outcome], pressed: Run
) -> dict[str, Any]:
    """Return where streams differ under pressure, and between two runs without pressure."""
    under = {n: (one.tokens, pressed.outcomes[n].tokens) for n, one in right.items()}
    without = {n: (one.tokens, again[n].tokens) for n, one in right.items()}
    return {
        "under_pressure": _first_differences(under),
        "between_two_runs_without": _first_differences(without),
        "compared": len(right),
    }


def _first_differences(pairs: dict[int, tuple[list[int], list[int]]]) -> dict[int, int]:
    """Return the first position at which a stream's two results differ, for those that do."""
    return {
        number: next(
            (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
            min(len(one), len(other)),
        )
        for number, (one, other) in sorted(pairs.items())
        if one != other
    }


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.pressure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--model", default="demo", help="demo, or a model's folder")
    parser.add_argument("--copies", type=int, default=3, help="copies of the model")
    parser.add_argument("--prompt", type=int, default=1000, help="mean tokens of a prompt")
    parser.add_argument("--completion", type=int, default=300, help="mean tokens of a completion")
    parser.add_argument("--share", type=float, default=1 / 3, help="budgeted share of the demand")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    result = compare(options)
    print(json.dumps(result["summary"], indent=2))
    if options.plot:
        draw(result, options.plot)
    return 0 if result["summary"]["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
