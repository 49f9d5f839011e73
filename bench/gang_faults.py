"""The loss of a rank: kvd's gang beside `mlx_lm.server` under `mlx.launch`. Linux.

    python -m bench.gang_faults [--model demo|FOLDER] [--ranks 2] [--trials 3] [--json FILE]

Each trial starts a server and `STREAMS` streams. When each stream has some tokens, one rank gets
``SIGKILL`` or ``SIGSTOP``. The report counts the streams that end with all tokens within `WAIT_S`,
and the later requests that get a token within `WAIT_S`. A server that answers none needs a restart
by hand, so the report also has the seconds of a start. kvd has the deadlines of `bench.chaos`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.chaos import SIGNALS, WATCHDOG
from bench.gang import PROMPT, sides
from bench.report import machine, publish
from kvd import demo
from kvd.bench import twin
from kvd.bench.measure import Stream
from kvd.bench.servers import Fleet, Server, Side
from kvd.client import AsyncClient

STREAMS, TOKENS, BEFORE = 4, 48, 6
"""Streams at once, tokens of each, and the tokens that each has at the signal."""
WAIT_S = 30.0
"""Seconds for the streams after the signal, and again for a later request. kvd's longest return
with these deadlines is 23 s (`bench/results/chaos-gang-linux-cpu.json`)."""


async def rank_pids(server: Server) -> list[int]:
    """Return the process of each rank."""
    if server.side.home:
        async with AsyncClient(home=server.side.home) as client:
            (model,) = (await client.status()).models
            return [rank.pid for rank in model.ranks]
    # A child is after its parent, so the last process with a rank is the one that computes.
    found = {rank: pid for pid in server.pids() if (rank := rank_of(pid)) is not None}
    return [found[rank] for rank in sorted(found)]


def rank_of(pid: int) -> int | None:
    """Return the rank that `mlx.launch` gave a process; None: it gave none."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    names = [it.removeprefix(b"MLX_RANK=") for it in variables if it.startswith(b"MLX_RANK=")]
    return int(names[0]) if names else None


async def trial(side: Side, folder: Path, kind: str, rank: int) -> dict[str, Any]:
    """Start a server, signal a rank during streams, and return what its clients see."""
    began = time.monotonic()
    async with Fleet([side], folder) as servers:
        server = servers[side.name]
        start_s = time.monotonic() - began
        streams = [Stream() for _ in range(STREAMS)]
        asked = [
            asyncio.create_task(server.driver.ask(f"{number}. {PROMPT}", TOKENS, stream))
            for number, stream in enumerate(streams)
        ]
        while min(stream.shown for stream in streams) < BEFORE:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        pids = await rank_pids(server)
        os.kill(pids[rank], SIGNALS[kind])
        await asyncio.wait(asked, timeout=WAIT_S)
        whole = sum(stream.shown == TOKENS for stream in streams)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        later, sent = Stream(), time.monotonic()
        with contextlib.suppress(Exception):  # each server has its own errors
            async with asyncio.timeout(WAIT_S):
                await server.driver.ask(PROMPT, 1, later)
        answer_s = round(later.arrivals[0][0] - sent, 2) if later.arrivals else None
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    return {"start_s": round(start_s, 2), "whole streams": whole, "answer_s": answer_s}


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the sums over the trials, by server, signal and rank."""
    found: dict[str, Any] = {}
    cells = [(kind, rank) for kind in SIGNALS for rank in range(options.ranks)]
    for kind, rank in cells:
        for number in range(options.trials):
            place = folder / f"{kind}{rank}-{number}"
            for side in gang_sides(str(folder / "model"), options.ranks, place):
                one = await trial(side, place, kind, rank)
                print(f"{side.name}, {kind} rank {rank}: {one}", flush=True)
                found.setdefault(side.name, {}).setdefault(f"{kind} rank {rank}", []).append(one)
    return {
        name: {cell: summary(each) for cell, each in cells.items()} for name, cells in found.items()
    }


def gang_sides(model: str, ranks: int, folder: Path) -> list[Side]:
    """Return the two servers that have several ranks."""
    folder.mkdir()
    chosen = [side for side in sides(model, ranks, folder) if side.name.endswith("ranks")]
    for side in chosen:
        if side.home:
            config = Path(side.home) / "config.toml"
            config.write_text(config.read_text() + WATCHDOG)
    return chosen


def summary(trials: list[dict[str, Any]]) -> dict[str, Any]:
    answers = [one["answer_s"] for one in trials if one["answer_s"] is not None]
    return {
        "trials": len(trials),
        "streams": STREAMS * len(trials),
        "whole streams": sum(one["whole streams"] for one in trials),
        "later requests answered": len(answers),
        "start_s": round(statistics.median(one["start_s"] for one in trials), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvd-bench-"))
    source = demo.path() if options.model == "demo" else Path(options.model).absolute()
    try:
        twin.make(source, folder / "model")
        result = asyncio.run(measure(options, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    given = {key: value for key, value in vars(options).items() if key != "json"}
    publish({**given, "machine": machine(), "servers": result}, options.json)


if __name__ == "__main__":
    main()
