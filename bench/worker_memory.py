"""Memory and CPU time of a worker and of mlx_lm.server: fresh, after traces, and idle again.

    python -m bench.worker_memory [--models demo FOLDER ...] [--traces steady long] [--runs 3]
                                  [--json FILE]

Every run starts both servers again, one after the other, in alternating order. kvd's numbers are
those of the worker; its daemon is reported on its own. Memory is the proportional set size (PSS)
of Linux. The first answer has 8 tokens. A first load in an empty cache folder converts the
tokenizer; that is measured once per model, as the difference to the next load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.report import machine, publish
from bench.serve import float32
from kvd import demo
from kvd.bench import processes, traces, twin
from kvd.bench.player import play
from kvd.bench.prompts import Prompts, words_of
from kvd.bench.servers import Server, Side, kvd_side, mlx_lm_side
from kvd.bench.traces import Ask, Trace
from kvd.demo.recall import filler_sentences
from kvd.host import blas

FIRST = Trace("first answer", (Ask(16, 8),))
IDLE_S = 15.0
"""Seconds without requests before a server counts as idle again."""
Point = dict[str, float]


def pss_mb(pid: int) -> float:
    """Return the proportional set size of a process in MB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc/{pid}/smaps_rollup has no Pss")


def point(server: Server) -> Point:
    """Return memory and CPU time of the process that has the model, and of the daemon."""
    every = processes.read(server.pids())
    engines = [one for one in every if one.name in ("kvd.worker", "mlx_lm")]
    if len(engines) != 1:
        raise RuntimeError(f"expected one process with the model, found {every}")
    found = {"mb": round(pss_mb(engines[0].pid), 1), "cpu_s": round(engines[0].cpu_s, 2)}
    others = [pss_mb(one.pid) for one in every if one is not engines[0]]
    return {**found, "daemon_mb": round(sum(others), 1)} if others else found


async def measure(side: Side, prompts: Prompts, names: list[str], folder: Path) -> dict[str, Any]:
    """Start one server, play the traces on it, and stop it."""
    server = Server(side, folder / "log")
    found: dict[str, Any] = {}
    start = time.monotonic()
    try:
        await server.start()
        await play(FIRST, prompts.of(FIRST, 1, 0), server.driver)
        found["first answer"] = {"wall_s": round(time.monotonic() - start, 2), **point(server)}
        for name in names:
            trace = traces.build(name, 1, 0)
            await play(trace, prompts.of(trace, 1, 0), server.driver)
            found[f"after {name}"] = point(server)
        await asyncio.sleep(IDLE_S)
        found["idle"] = point(server)
    finally:
        await server.stop()
    return found


async def compare(source: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians and all runs of one model."""
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as name:
        folder = Path(name)
        model = folder / "model"
        twin.make(source, model, float32.convert)
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        prompts = Prompts(
            lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
            words_of(" ".join(filler_sentences())),
        )
        # The record and the compiled operations are made before the runs.
        first = await measure(_kvd(model, folder / "home"), prompts, [], folder)
        for run in range(options.runs):
            sides = [_kvd(model, folder / f"home{run}"), _mlx_lm(model)]
            found = {}
            for side in sides if run % 2 == 0 else reversed(sides):
                found[side.name] = await measure(side, prompts, options.traces, folder)
                print(f"{side.name}: {json.dumps(found[side.name])}", file=sys.stderr)
            runs.append(found)
    return {"medians": medians(runs), "first load": first, "runs": runs}


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over runs, by side, moment and quantity."""
    return {
        side: {
            moment: {
                key: statistics.median(run[side][moment][key] for run in runs)
                for key in runs[0][side][moment]
            }
            for moment in runs[0][side]
        }
        for side in sorted(runs[0])
    }


def table(found: dict[str, Any]) -> str:
    """Return the medians of one model as a table in Markdown."""
    lines = [
        "| | kvd's worker, MB | its daemon | `mlx_lm.server` | CPU s: worker | `mlx_lm.server` |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for moment, one in found["kvd"].items():
        other = found["mlx-lm"][moment]
        memory = [one["mb"], one["daemon_mb"], other["mb"]]
        seconds = [one["cpu_s"], other["cpu_s"]]
        cells = [f"{value:.0f}" for value in memory] + [f"{value:.1f}" for value in seconds]
        lines.append(f"| {' | '.join([moment, *cells])} |")
    return "\n".join(lines)


def _kvd(model: Path, home: Path) -> Side:
    return kvd_side("kvd", "k8v8", str(model), home)


def _mlx_lm(model: Path) -> Side:
    return mlx_lm_side("mlx-lm", str(model), blas=blas.choose("auto"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.worker_memory", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["demo"], help="demo, or models' folders")
    parser.add_argument("--traces", nargs="+", default=["steady", "long"], help="traces to play")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options = parser.parse_args()
    report: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "bench.worker_memory", *sys.argv[1:]]),
        "machine": machine(),
        "idle_s": IDLE_S,
        "models": {},
    }
    for name in options.models:
        source = demo.path() if name == "demo" else Path(name)
        report["models"][name] = asyncio.run(compare(source, options))
    publish(report, options.json)


if __name__ == "__main__":
    main()
