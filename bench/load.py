"""Time from a server's start to its first answer, with empty and with full caches.

    python -m bench.load [--model demo|FOLDER] [--runs 3] [--json FILE]

Each run has new cache folders. A server is started, answers one request and is stopped, twice: its
caches are empty the first time, and hold what the first start left the second time. kvd and
mlx_lm.server alternate. Files of the model are in the page cache of the system from the first run
on. The library that kvd builds once per machine (on CPUs) is taken from the user's cache.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs

from bench.bars import Bar
from bench.report import machine, publish
from kvd import demo
from kvd.bench.measure import Stream
from kvd.bench.servers import Server, Side, kvd_side, mlx_lm_side
from kvd.host import blas

PROMPT = "The amber falcon waits beside the river until the evening. " * 20
TOKENS = 16
STATES = ("empty", "full")
MOST_SECONDS = 30.0
"""Most seconds until the first answer with empty caches."""

Times = dict[str, dict[str, list[float]]]
"""Seconds by side and state of the caches, one per run."""


async def first_answer(side: Side, log: Path) -> float:
    """Start a server; return the seconds until its first answer is complete."""
    start = time.perf_counter()
    server = Server(side, log)
    try:
        await server.start()
        await server.driver.ask(PROMPT, TOKENS, Stream())
        return time.perf_counter() - start
    finally:
        await server.stop()


def sides(model: str, folder: Path, kv: str) -> list[Side]:
    """Return both servers, with caches in a folder."""
    cache = folder / "cache" / "kvd"
    cache.mkdir(parents=True, mode=0o700)
    cache.parent.chmod(0o700)
    native = platformdirs.user_cache_path("kvd") / "native"
    if native.is_dir():
        (cache / "native").symlink_to(native)
    ours = kvd_side("kvd", kv, model, folder / "home")
    theirs = mlx_lm_side("mlx-lm", model, blas=blas.choose("auto"))
    modules = {"MLX_PTX_CACHE_DIR": str(folder / "modules")}
    return [
        replace(ours, environment=ours.environment | {"XDG_CACHE_HOME": str(cache.parent)}),
        replace(theirs, environment=theirs.environment | modules),
    ]


async def measure(model: str, runs: int, kv: str) -> Times:
    """Measure both servers this many times, and show each time."""
    found: Times = {}
    for run in range(runs):
        with tempfile.TemporaryDirectory(prefix="kvd-bench-") as name:
            chosen = sides(model, Path(name), kv)
            for side in chosen if run % 2 == 0 else reversed(chosen):
                for state in STATES:
                    taken = await first_answer(side, Path(name) / f"{side.name}-{state}.log")
                    found.setdefault(side.name, {}).setdefault(state, []).append(taken)
                    print(f"run {run + 1}, {side.name}, {state} caches: {taken:.1f} s", flush=True)
    return found


def medians(times: Times) -> dict[str, dict[str, float]]:
    """Return the median seconds by side and state."""
    return {
        side: {state: round(statistics.median(each), 2) for state, each in states.items()}
        for side, states in times.items()
    }


def bars(found: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Return the bars of kvd's medians: `MOST_SECONDS`, and mlx_lm.server's with full caches."""
    ours, theirs = found["kvd"], found["mlx-lm"]
    rows = [Bar("first answer with empty caches, seconds", ours["empty"], MOST_SECONDS)]
    share = ours["full"] / theirs["full"]
    rows.append(Bar("first answer with full caches, relative to mlx-lm", share, 1.0))
    return [row.as_dict() for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kv", default="k8v8")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = str(demo.path() if options.model == "demo" else Path(options.model).absolute())
    times = asyncio.run(measure(model, options.runs, options.kv))
    found = medians(times)
    result = {
        "machine": machine(),
        "model": Path(model).name,
        "kv": options.kv,
        "seconds": times,
        "medians": found,
        "bars": bars(found),
    }
    publish(result, options.json)


if __name__ == "__main__":
    main()
