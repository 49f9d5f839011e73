"""A request that streams all the time, in a process of its own.

    python -m tests.http.steady_stream SOCKET WORKER_PID

Its tokens do not wait for the process that disturbs the daemon. It streams once alone, writes a
line, and streams again until its standard input ends. Then it writes a `Stream` as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvd.client import AsyncClient
from protocol.messages import Tokens

_SERVING_S = 0.02
"""Seconds of a processor that a stream takes of a thread that serves it, at least."""
REQUEST: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "temperature": 1.0, "seed": 5}


@dataclass
class Stream:
    """The repetitions of the stream, and the milliseconds between two of its events."""

    streams: int = 0
    changed: int = 0
    """Streams whose tokens differ from those alone."""
    gaps_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    own_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    """The gaps without the time in which a thread that serves the stream waited for a processor,
    and at least the processor time of the worker's main thread. Waits for a lock count in full."""


@dataclass
class Gaps:
    """Gaps between events, in seconds.

    ``threads``: folders of the threads that serve the stream, the worker's main thread first.
    """

    threads: list[Path]
    whole: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)

    def read(self) -> tuple[float, float, float]:
        """Return the time, and how long the worker has run and all threads have waited."""
        times = [_times(thread) for thread in self.threads] or [(0.0, 0.0)]
        return time.perf_counter(), times[0][0], sum(waited for _, waited in times)

    def add(self, before: tuple[float, float, float], now: tuple[float, float, float]) -> None:
        """Append the gap between two readings."""
        gap, ran, waited = (later - earlier for earlier, later in zip(before, now, strict=True))
        self.whole.append(gap)
        self.own.append(max(ran, gap - waited))


def _times(thread: Path) -> tuple[float, float]:
    """Return the seconds that a thread has run, and those that it waited for a processor."""
    run, waited, _ = (thread / "schedstat").read_bytes().split()
    return int(run) / 1e9, int(waited) / 1e9


async def stream(client: AsyncClient, gaps: Gaps) -> list[int]:
    """Return a stream's tokens; append its gaps."""
    tokens: list[int] = []
    last: tuple[float, float, float] | None = None
    async for event in await client.generate("demo", prompt="Once", **REQUEST):
        if isinstance(event, Tokens):
            now = gaps.read()
            if last is not None:
                gaps.add(last, now)
            last = now
            tokens += event.tokens
    return tokens


def summary(gaps: list[float]) -> dict[str, float]:
    """Return the milliseconds of the median, the 99th percentile and the longest gap."""
    ordered = sorted(1e3 * gap for gap in gaps)
    size = len(ordered)
    shares = {"median": size // 2, "p99": int(0.99 * size), "longest": size - 1}
    return {name: round(ordered[at], 2) for name, at in shares.items()}


async def _run(socket: str, worker: int) -> Stream:
    found = Stream()
    threads = _threads(worker)
    async with AsyncClient(socket=socket) as client:
        before = {thread: _times(thread)[0] for thread in threads}
        await stream(client, Gaps([]))
        # Those that run the model: the main thread, and MLX's.
        busy = {one for one in threads if _times(one)[0] - before[one] > _SERVING_S}
        serving = [main := _thread(worker, worker), *(busy - {main})]
        serving += [_thread(one, one) for one in (_parent(worker), os.getpid())]
        alone, beside = Gaps(serving), Gaps(serving)
        wanted = await stream(client, alone)
        sys.stdout.write("\n")
        sys.stdout.flush()
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        while not ended.done():
            found.changed += await stream(client, beside) != wanted
            found.streams += 1
    found.gaps_ms = {"alone": summary(alone.whole), "beside": summary(beside.whole)}
    found.own_ms = {"alone": summary(alone.own), "beside": summary(beside.own)}
    return found


def _threads(process: int) -> list[Path]:
    return list(Path(f"/proc/{process}/task").iterdir())


def _thread(process: int, number: int) -> Path:
    return Path(f"/proc/{process}/task/{number}")


def _parent(pid: int) -> int:
    """Return the daemon's process id."""
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid"))


@contextlib.asynccontextmanager
async def streaming(socket: str, worker: int) -> AsyncIterator[list[Stream]]:
    """Stream while the block runs; the yielded list has the result after it."""
    results: list[Stream] = []
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.http.steady_stream", socket, str(worker)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        yield results
        assert process.stdin is not None
        process.stdin.close()
        output, _ = await process.communicate()
        results.append(msgspec.json.decode(output, type=Stream))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("socket")
    parser.add_argument("worker", type=int)
    asked = parser.parse_args()
    found = asyncio.run(_run(asked.socket, asked.worker))
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
