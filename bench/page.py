"""CPU time of the daemon while the web page is open: ``python -m bench.page [--json FILE]``.

Reads the CPU time of the daemon's process over equal times with 0, 1 and 8 open streams, with idle
models of the fake engine. The bar: below 1 % of a core with one page.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
from pathlib import Path

import aiohttp

from bench.own import daemon
from kvd.client import AsyncClient

STREAMS = (0, 1, 8)
BAR = 0.01


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def watch(url: str) -> None:
    """Read the stream as a page does."""
    unlimited = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(timeout=unlimited) as session,
        session.post(f"{url}/ui/stream", json={}, headers={"Origin": url}) as answer,
    ):
        answer.raise_for_status()
        async for _ in answer.content.iter_any():
            pass


async def measure(client: AsyncClient, url: str, streams: int, seconds: float) -> float:
    """Return the daemon's CPU time in seconds while so many pages are open."""
    pid = (await client.status()).pid
    watchers = [asyncio.create_task(watch(url)) for _ in range(streams)]
    await asyncio.sleep(2)
    before = cpu_seconds(pid)
    await asyncio.sleep(seconds)
    spent = cpu_seconds(pid) - before
    for watcher in watchers:
        if watcher.done():
            watcher.result()  # raises why it ended
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
    return spent


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--models", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    config = 'budget = "4GiB"\n[http]\nport = 0\n'
    async with daemon(config, "--fake") as client:
        for number in range(given.models):
            await (await client.load("fake:tps=40", alias=f"m{number}")).result()
        status = await client.status()
        url = next(one for one in status.http if one.startswith("http:"))
        spent = {n: await measure(client, url, n, given.seconds) for n in STREAMS}
    for streams, cpu_s in spent.items():
        print(f"{streams} pages: {cpu_s:.2f} s in {given.seconds:g} s")
    share = (spent[1] - spent[0]) / given.seconds
    print(
        f"one page: {share:.2%} of a core; {'met' if share < BAR else 'NOT MET'}: below {BAR:.0%}"
    )
    if given.json:
        result = {"models": given.models, "seconds": given.seconds, "cpu_s": spent, "share": share}
        given.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
