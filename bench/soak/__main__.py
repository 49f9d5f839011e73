"""Run one daemon for a long time under mixed traffic and faults, and judge what grows.

    python -m bench.soak --minutes 60 --json bench/results/soak-linux-cpu.json --plot docs/soak.svg

Three names of the embedded model share one budget. Players stream over the socket and HTTP; some
cancel, leave or read slowly. Workers are killed, a model is unloaded, the budget is lowered and
raised, and the daemon itself is killed several times in the first half: clients attach to the next
process. The second half is one life of the daemon, in which its memory, descriptors, journal and
latency are compared between the first and the last quarter.

Every stream that stayed at the highest precision must have the tokens of an undisturbed run. The
exit status is 1 if one differs, if a request fails for another reason than memory, if a daemon
reports a violation of the budget, or if a series grows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.chaos import requests
from bench.soak.faults import BUDGETS_MIB, Faults
from bench.soak.report import draw, verdicts
from bench.soak.samples import sample
from bench.soak.served import Served
from bench.soak.traffic import Traffic
from protocol.errors import KvdError

ENDING_S = 120.0
"""Seconds after the last request was sent, in which all must have ended."""


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Run the soak; return samples, counts and verdicts."""
    with tempfile.TemporaryDirectory(prefix="kvd-soak-") as folder:
        served = Served(Path(folder), BUDGETS_MIB[0])
        try:
            await served.start()
            return await _run(options, served)
        finally:
            await served.stop()


async def _run(options: argparse.Namespace, served: Served) -> dict[str, Any]:
    asked = requests(options.kinds, options.tokens, options.seed)
    for one in asked:
        one.options.setdefault("temperature", 0.0)  # the interfaces have different defaults
    traffic = Traffic(served, asked, options.seed, options.rate)
    await traffic.record_undisturbed()
    faults = Faults(served, options.seed, options.fault_every)
    began, seconds = time.monotonic(), 60 * options.minutes
    kills = options.daemon_kills
    at = [began + seconds / 2 * (number + 1) / (kills + 1) for number in range(kills)]
    players = traffic.players(options.players)
    troubles = asyncio.create_task(faults.run(at))
    samples: list[dict[str, Any]] = []
    try:
        while time.monotonic() < began + seconds:
            await asyncio.sleep(options.sample_every)
            with contextlib.suppress(KvdError):
                client = await served.connect()
                try:
                    samples.append(await sample(client, served, traffic.tally, began))
                finally:
                    await client.close()
            _raise_failures([*players, troubles])
    finally:
        traffic.over = True
        troubles.cancel()
        _, late = await asyncio.wait(players, timeout=ENDING_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*players, troubles, return_exceptions=True)
    tally = traffic.tally
    if late:
        tally.wrong.append(f"{len(late)} streams did not end within {ENDING_S:g} s")
    found = verdicts(samples)
    violations = max(it["violations"] for it in samples)
    return {
        "command": shlex.join(["python", "-m", "bench.soak", *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "minutes": round((time.monotonic() - began) / 60, 1),
        "faults": dict(faults.counts),
        "streams": dict(sorted(tally.ended.items())),
        "errors": dict(tally.errors),
        "attached": tally.attached,
        "tokens": tally.tokens,
        "compared": tally.compared,
        "wrong": tally.wrong[:50],
        "violations": violations,
        "series": found,
        "held": not tally.wrong and not violations and all(it["flat"] for it in found.values()),
        "samples": samples,
    }


def _raise_failures(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--players", type=int, default=6)
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second and player")
    parser.add_argument("--kinds", type=int, default=24, help="number of different requests")
    parser.add_argument("--tokens", type=int, default=120, help="most tokens of a choice")
    parser.add_argument("--fault-every", type=float, default=15, help="mean seconds")
    parser.add_argument("--sample-every", type=float, default=5, help="seconds")
    parser.add_argument("--daemon-kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    result = asyncio.run(soak(options))
    if options.json:
        options.json.write_text(json.dumps(result) + "\n")
    if options.plot:
        draw(result["samples"], options.plot)
    print(json.dumps({key: it for key, it in result.items() if key != "samples"}, indent=2))
    return 0 if result["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
