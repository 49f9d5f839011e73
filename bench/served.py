"""Compare a server that has served other traces with a new one: tokens and CPU time.

    python -m bench.served [--model demo|FOLDER] [--kv k8v8 k16v16] [--runs 9] [--json FILE]

One server plays `OTHERS` first, and holds their prefixes from then on. Both then play `PLAYED` in
turns, with other prompts in each run. ``tokens`` and ``cpu`` are medians of the ratios within each
run: tokens per second, and CPU time per token of all processes of a server. The servers alternate,
because the speed of the machine changes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.bars import Bar
from bench.report import machine, publish
from bench.serve.goals import AFTER_OTHERS
from kvd import demo
from kvd.bench import processes, traces
from kvd.bench.measure import summarize
from kvd.bench.player import play
from kvd.bench.prompts import Prompts, words_of
from kvd.bench.servers import Fleet, Server, kvd_side
from kvd.demo.recall import filler_sentences

OTHERS = ("steady", "shared", "long", "unequal")
PLAYED = "steady"
PAUSE_S = 0.7
"""Seconds to wait after a run, in which an idle engine returns memory."""
_WARM, _PLAYED = 1000, 2000
"""First numbers of the runs that warm up, and of those that count. No other run has them."""


async def run(server: Server, prompts: Prompts, name: str, number: int) -> tuple[float, float]:
    """Play a trace once; return tokens per second, and CPU seconds per token."""
    trace = traces.build(name, 0, number)
    before = _cpu_seconds(server)
    streams = await play(trace, prompts.of(trace, 0, number), server.driver)
    found = summarize(trace, streams)
    seconds = _cpu_seconds(server) - before
    await asyncio.sleep(PAUSE_S)
    return found.tok_s, seconds / found.tokens


def _cpu_seconds(server: Server) -> float:
    return sum(one.cpu_s for one in processes.read(server.pids()))


async def compare(model: str, scheme: str, runs: int, folder: Path) -> dict[str, Any]:
    """Return the ratios of a server that has served `OTHERS` to a new one."""
    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    prompts = Prompts(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        words_of(" ".join(filler_sentences())),
    )
    names = ("served", "new")
    ratios: list[tuple[float, float]] = []
    sides = [kvd_side(name, scheme, model, folder / f"{scheme}-{name}") for name in names]
    async with Fleet(sides, folder) as servers:
        await run(servers["new"], prompts, PLAYED, _WARM)
        for name in OTHERS:
            for number in range(3):
                await run(servers["served"], prompts, name, number)
        for number in range(runs):
            found = {}
            for name in names if number % 2 else reversed(names):
                found[name] = await run(servers[name], prompts, PLAYED, _PLAYED + number)
            served, new = found["served"], found["new"]
            ratios.append((served[0] / new[0], served[1] / new[1]))
    tokens, cpu = zip(*ratios, strict=True)
    return {
        "tokens": round(statistics.median(tokens), 3),
        "cpu": round(statistics.median(cpu), 3),
        "tokens_of_runs": [round(one, 3) for one in tokens],
        "cpu_of_runs": [round(one, 3) for one in cpu],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kv", nargs="+", default=["k8v8", "k16v16"])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = str(demo.path() if options.model == "demo" else Path(options.model).absolute())
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as name:
        found = {
            scheme: asyncio.run(compare(model, scheme, options.runs, Path(name)))
            for scheme in options.kv
        }
    bars = [
        Bar(f"tokens after other traces, {scheme}", one["tokens"], AFTER_OTHERS, at_least=True)
        for scheme, one in found.items()
    ]
    publish(
        {
            "machine": machine(),
            "model": options.model,
            "ratios": found,
            "bars": [bar.as_dict() for bar in bars],
        },
        options.json,
    )
    for bar in bars:
        print(bar)


if __name__ == "__main__":
    main()
