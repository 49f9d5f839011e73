"""Compare kvd with other servers on this machine.

    python -m bench.serve [--model demo|FOLDER] [--traces steady long …] [--sides NAME …]
                          [--runs 3] [--seed 1] [--url NAME=http://host:port[#model]]
                          [--json FILE] [--plot FILE]

A *side* is one of the compared servers. All servers run all the time, but only one at a time gets
requests; the CPU time of the idle ones is measured and reported. The order of the sides rotates
from run to run. Medians are over runs, and a ratio is the median of the runs' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import platform
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from bench.serve import float32, report
from bench.serve.bars import judge
from bench.serve.sides import bars, make, takes_part
from kvd import demo
from kvd.bench import processes, traces, twin
from kvd.bench.measure import Measures, Stream, Unfair, check_fair, summarize
from kvd.bench.player import play
from kvd.bench.prompts import Prompts, words_of
from kvd.bench.report import as_json, rounded
from kvd.bench.servers import Fleet, Server
from kvd.bench.traces import Ask, Trace
from kvd.demo.recall import filler_sentences
from kvd.host import blas
from kvd.host.memory import nvidia

WARM_UP = Trace("warm-up", (Ask(64, 16),) * 8)
"""Unmeasured requests, because a server's first requests find cold code and empty pools."""


class Comparison:
    """Plays traces on the servers and collects the measurements."""

    def __init__(
        self,
        servers: dict[str, Server],
        prompts: Prompts,
        *,
        seed: int,
        timeout_s: float,
        console: Console,
    ) -> None:
        self.results: dict[str, dict[str, list[Measures]]] = {}
        self.details: list[dict[str, Any]] = []
        self._servers = servers
        self._prompts = prompts
        self._seed = seed
        self._timeout_s = timeout_s
        self._console = console

    async def warm_up(self) -> None:
        """Send eight short requests to every server."""
        for number, server in enumerate(self._servers.values()):
            await self._play(WARM_UP, number, server)

    async def run(self, name: str, number: int) -> None:
        """Play run ``number`` of a trace on every side that takes part in it."""
        trace = traces.build(name, self._seed, number)
        sides = [side for side in self._servers if takes_part(side, name)]
        first = number % len(sides)
        for side in sides[first:] + sides[:first]:
            measures = await self._measure(trace, number, self._servers[side])
            self.results.setdefault(name, {one: [] for one in sides})[side].append(measures)
            self._console.print(
                f"  {name} {number + 1} {side}: {measures.tok_s:.0f} tok/s,"
                f" first token p50 {measures.ttft_p50 * 1e3:.0f} ms,"
                f" gap p99 {measures.itl_p99 * 1e3:.0f} ms",
                highlight=False,
            )

    async def _measure(self, trace: Trace, number: int, server: Server) -> Measures:
        pids = server.pids()
        others = [pid for one in self._servers.values() if one is not server for pid in one.pids()]
        processes.reset_peaks(pids)
        before, idle = processes.read(pids), _cpu(others)
        own, started = time.process_time(), time.monotonic()
        marks: list[tuple[int, float]] = []
        streams = await self._play(
            trace, number, server, lambda tokens: marks.append((tokens, _cpu(pids)))
        )
        seconds = time.monotonic() - started
        after = processes.read(pids)
        measures = summarize(trace, streams)
        took = {one.pid: one.cpu_s for one in before}
        spent = {one.pid: one.cpu_s - took.get(one.pid, 0.0) for one in after}
        self.details.append({
            "trace": trace.name,
            "run": number,
            "side": server.side.name,
            "client_cpu_s": time.process_time() - own,
            "tokens_without_message": 1 - sum(s.shown for s in streams) / measures.tokens,
            "idle_servers_cpu_share": (_cpu(others) - idle) / seconds,
            "processes": [
                {"name": one.name, "peak_bytes": one.peak_bytes, "cpu_s": spent[one.pid],
                 "cpu_ms_per_token": 1e3 * spent[one.pid] / measures.tokens}
                for one in after
            ],
        })  # fmt: skip
        if not after:
            return measures
        shared = processes.counted_again(pids)
        self.details[-1]["shared_bytes"] = shared
        return replace(
            measures,
            cpu_ms_per_token=1e3 * sum(spent.values()) / measures.tokens,
            decode_cpu_ms_per_token=_between(marks),
            peak_bytes=sum(one.peak_bytes for one in after) - shared,
            largest_bytes=max(one.peak_bytes for one in after),
        )

    async def _play(
        self,
        trace: Trace,
        number: int,
        server: Server,
        mark: Callable[[int], None] = lambda _: None,
    ) -> list[Stream]:
        prompts = self._prompts.of(trace, self._seed, number)
        try:
            async with asyncio.timeout(self._timeout_s):
                streams = await play(trace, prompts, server.driver, mark)
        except TimeoutError:
            raise RuntimeError(
                f"{server.side.name} did not finish {trace.name} within {self._timeout_s:g} s"
            ) from None
        except ExceptionGroup as group:
            first = group.exceptions[0]
            raise RuntimeError(f"{server.side.name} failed in {trace.name}: {first!r}") from group
        try:
            check_fair(trace, streams)
        except Unfair as unfair:
            raise Unfair(f"{server.side.name}: {unfair}") from None
        return streams


def _cpu(pids: list[int]) -> float:
    return sum(one.cpu_s for one in processes.read(pids))


def _between(marks: list[tuple[int, float]]) -> float:
    """Return the CPU milliseconds per token generated between two marks.

    A mark holds the tokens and the CPU seconds up to its time. Without two marks: nan.
    """
    if len(marks) < 2 or marks[0][0] == marks[1][0]:
        return math.nan
    (tokens, cpu), (later_tokens, later_cpu) = marks
    return 1e3 * (later_cpu - cpu) / (later_tokens - tokens)


async def compare(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Start the servers, measure, stop them; return the results for the JSON file."""
    accelerated = sys.platform == "darwin" or nvidia.first_device() is not None
    library = blas.choose("auto")
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as name:
        folder = Path(name)
        source = demo.path() if options.model == "demo" else Path(options.model)
        if not (source / "tokenizer.json").is_file():
            raise RuntimeError(f"{source} has no tokenizer.json; --model needs a model's folder")
        model = folder / "model"
        twin.make(source, model, None if accelerated else float32.convert)
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        prompts = Prompts(
            lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
            words_of(" ".join(filler_sentences())),
        )
        sides = make(str(model), folder, library, options.url)
        if options.sides:
            unknown = set(options.sides) - {side.name for side in sides}
            if unknown:
                names = ", ".join(repr(side.name) for side in sides)
                raise SystemExit(
                    f"unknown --sides {', '.join(sorted(unknown))}; the sides are {names}"
                )
            sides = [side for side in sides if side.name in options.sides]
        with _cancelled_by_signals():
            async with Fleet(sides, folder, console.print) as servers:
                comparison = Comparison(
                    servers,
                    prompts,
                    seed=options.seed,
                    timeout_s=options.timeout,
                    console=console,
                )
                paths = {one.side.name: one.driver.path for one in servers.values()}
                await comparison.warm_up()
                for trace in options.traces:
                    for number in range(options.runs):
                        await comparison.run(trace, number)
    verdicts = judge(bars(options.traces), comparison.results)
    report.tables(comparison.results, verdicts, console)
    idle = max(one["idle_servers_cpu_share"] for one in comparison.details)
    console.print(f"idle servers took at most {idle:.1%} of a core", highlight=False)
    if options.plot:
        report.plot(comparison.results, options.plot)
    about = {
        "command": shlex.join(["python", "-m", "bench.serve", *sys.argv[1:]]),
        "model": options.model,
        "weights": "as stored" if accelerated else "float32",
        "versions": {name: version(name) for name in ("kvd", "mlx", "mlx-lm")},
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "blas": str(library) if library else None,
        "sides": {side.name: side.about for side in sides},
        "paths": {name: path for name, path in paths.items() if path},
        "memory": "resident high-water marks (VmHWM) of the processes, reset before every run;"
        " pages of files that several processes of a server share count once",
    }
    about["bars"] = report.bars_as_json(verdicts)
    found = as_json(about, comparison.results)
    return {**found, "details": rounded(comparison.details)}


@contextlib.contextmanager
def _cancelled_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP cancel the task, as Ctrl-C does, so that all servers are stopped."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    numbers = (signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 1, not {text!r}")
    return int(text)


def main() -> None:
    """Parse, compare and write."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="demo", help="demo, or a model's folder")
    parser.add_argument(
        "--traces", nargs="+", choices=list(traces.TRACES), default=list(traces.DEFAULT)
    )
    parser.add_argument("--sides", nargs="+", help="compare only these servers")
    parser.add_argument("--runs", type=_positive, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url", nargs="+", default=[], help="more servers: NAME=http://host:port")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for a run of a trace")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 180)
    try:
        result = asyncio.run(compare(options, console))
    except (RuntimeError, ValueError, Unfair) as error:
        raise SystemExit(f"error: {error}") from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(130) from None
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
