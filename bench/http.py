"""Many HTTP and socket streams at once, and the daemon's memory over many requests.

Runs a real daemon with the fake engine. First, `--streams` streams over HTTP (half over TCP, half
over `http.sock`) and as many over the protocol's socket run at once, all with the same seed. Their
texts must be equal, and the daemon's metrics show how late its event loop was. Then `--requests`
short requests run, streamed and not, over kept and over new connections. The daemon's footprint
must stay flat; it is read after each tenth of the requests.

    python -m bench.http --json bench/results/http-linux-cpu.json

All clients run in this process, on the same machine as the daemon, and compete with it for the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from kvd.client import Client
from protocol.errors import KvdError

CONFIG = 'max_rows = 512\nbudget = "8GiB"\n[http]\nport = 0\n'
PROMPT = "To open a file,"
START_S = 60.0
LAG_LIMIT_S = 0.05
"""Limit of the event loop lag's 99th percentile, in seconds."""


# -- the daemon ---------------------------------------------------------------------------------


class Served:
    """A temporary daemon, as a context manager.

    ``first`` gives it real-time priority, so that it runs before other processes.
    """

    def __init__(self, *, first: bool = False) -> None:
        self._before = ["chrt", "--rr", "10"] if first else []
        self.root = Path(tempfile.mkdtemp(prefix="kvd-"))
        self.home = self.root / "h"

    def __enter__(self) -> Self:
        self.home.mkdir(mode=0o700)
        (self.home / "config.toml").write_text(CONFIG)
        serve = ["-m", "kvd", "serve", "--fake", "--home", str(self.home)]
        command = [*self._before, sys.executable, *serve]
        self._log = (self.root / "log").open("w")
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        end = time.monotonic() + START_S
        while True:
            try:
                with self.client() as kvd:
                    self.port = int(kvd.status().http[0].rpartition(":")[2])
            except KvdError:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError((self.root / "log").read_text()) from None
                time.sleep(0.05)
            else:
                return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._log.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def client(self) -> Client:
        """Return a client of the protocol's socket."""
        return Client(home=self.home)

    def load(self, name: str, **options: float) -> None:
        """Load a fake model."""
        source = "fake:" + ",".join(f"{key}={value}" for key, value in options.items())
        with self.client() as kvd:
            _ = kvd.load(source, alias=name).result

    @property
    def footprint(self) -> int:
        """Footprint of the daemon's process in bytes."""
        with self.client() as kvd:
            return kvd.status().footprint_bytes

    async def metrics(self) -> str:
        """Read the metrics."""
        return (await exchange(await self.tcp(), "GET", "/metrics", b"")).decode()

    async def tcp(self) -> Pair:
        """Connect by TCP."""
        return await asyncio.open_connection("127.0.0.1", self.port, limit=2**22)

    async def unix(self, name: str = "http.sock") -> Pair:
        """Connect to one of the Unix sockets."""
        return await asyncio.open_unix_connection(self.home / name, limit=2**22)


Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


# -- clients ------------------------------------------------------------------------------------


async def head(pair: Pair, method: str, path: str, body: bytes, *, close: bool) -> dict[str, str]:
    """Send a request; return the answer's headers."""
    reader, writer = pair
    kept = "close" if close else "keep-alive"
    writer.write(
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: {kept}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
    if " 200 " not in status:
        raise RuntimeError(f"{status}: {(await reader.read(2000)).decode()}")
    return {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}


async def exchange(pair: Pair, method: str, path: str, body: bytes, *, close: bool = True) -> bytes:
    """Send a request and return the answer's body."""
    headers = await head(pair, method, path, body, close=close)
    data = await pair[0].readexactly(int(headers["content-length"]))
    if close:
        pair[1].close()
    return data


async def chunks(pair: Pair, path: str, body: bytes) -> bytes:
    """Send a request and return the complete streamed answer."""
    await head(pair, "POST", path, body, close=True)
    reader, writer = pair
    found = bytearray()
    while size := int(await reader.readuntil(b"\r\n"), 16):
        found += (await reader.readexactly(size + 2))[:-2]
    writer.close()
    return bytes(found)


def text_of(stream: bytes) -> str:
    """Return the text of a stream. Raises ``RuntimeError`` if the stream is incomplete."""
    lines = [line for line in stream.split(b"\n\n") if line.startswith(b"data: ")]
    if lines[-1] != b"data: [DONE]":
        raise RuntimeError(f"a stream ended with {lines[-1]!r}")
    answers = [msgspec.json.decode(line[6:]) for line in lines[:-1]]
    return "".join(c["text"] for answer in answers for c in answer["choices"])


async def by_http(pair: Pair, model: str, tokens: int) -> str:
    """Stream a completion over HTTP; return its text."""
    request = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "seed": 1, "stream": True}
    return text_of(await chunks(pair, "/v1/completions", msgspec.json.encode(request)))


async def by_socket(pair: Pair, model: str, tokens: int) -> str:
    """Stream the same completion over the protocol's socket; return its text."""
    reader, writer = pair
    request = {"v": 1, "id": "1", "op": "generate", "model": model, "prompt": PROMPT}
    sampling = {"temperature": 1.0, "seed": 1}
    line = msgspec.json.encode(request | {"max_tokens": tokens, "sampling": sampling})
    writer.write(line + b"\n")
    text = ""
    while True:
        event = msgspec.json.decode(await reader.readuntil(b"\n"))
        if event["event"] == "tokens":
            text += event["text"]
        elif event["event"] == "done":
            writer.close()
            return text
        elif event["event"] == "error":
            raise RuntimeError(event["error"]["message"])


@dataclass
class Lag:
    """How late the timer of an event loop or a process fired."""

    looks: int = 0
    """Number of measurements."""
    p50_s: float = 0.0
    p99_s: float = 0.0
    """99th percentile; the daemon's is the upper bound of its histogram bucket."""
    mean_s: float = 0.0


# -- the machine ---------------------------------------------------------------------------------

SLEEPER = """
import sys, threading, time
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
while not over.is_set():
    due = time.monotonic() + 0.1
    time.sleep(0.1)
    print(time.monotonic() - due, flush=True)
"""


class Sleeper:
    """A process that only sleeps; on exit, ``lag`` holds how late it woke."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SLEEPER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        out, _ = self._process.communicate()
        late = sorted(float(line) for line in out.split()) or [0.0]
        self.lag = Lag(
            len(late),
            round(late[len(late) // 2], 5),
            round(late[int(0.99 * len(late))], 5),
            round(sum(late) / len(late), 5),
        )


# -- what is measured ---------------------------------------------------------------------------


@dataclass
class Found:
    """Results of the benchmark."""

    streams: int = 0
    tokens: int = 0
    seconds: float = 0.0
    tokens_per_s: float = 0.0
    daemon_cpu_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    lag: Lag = field(default_factory=Lag)
    machine_lag: Lag = field(default_factory=Lag)
    """Lag of a process that only slept meanwhile, which shows the effect of other processes."""
    requests: int = 0
    requests_per_s: float = 0.0
    footprint_bytes: list[int] = field(default_factory=list)
    """Daemon's footprint before the requests, and after each tenth of them."""


def buckets(text: str) -> dict[float, int]:
    """Return the histogram of the event loop's lag: measurements up to each bound in seconds."""
    found = re.findall(r'kvd_event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)', text)
    return {float(bound): int(float(count)) for bound, count in found}


def value(text: str, name: str) -> float:
    """Return the value of a metric that has no labels."""
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert found, f"no {name} in the metrics"
    return float(found[1])


def lag_between(before: str, after: str) -> Lag:
    """Return the event loop's lag between two readings of the metrics."""
    was, now = buckets(before), buckets(after)
    counts = {bound: now[bound] - was[bound] for bound in now}
    looks = counts[float("inf")]
    total = value(after, "kvd_event_loop_lag_seconds_sum")
    total -= value(before, "kvd_event_loop_lag_seconds_sum")
    found = {
        share: min(bound for bound, count in counts.items() if count >= share * looks)
        for share in (0.5, 0.99)
    }
    return Lag(looks, found[0.5], found[0.99], round(total / max(1, looks), 5))


async def measure_streams(served: Served, found: Found, *, each: int, tokens: int) -> None:
    """Run all streams at once while another process only sleeps."""
    connects = [served.tcp if number % 2 else served.unix for number in range(each)]
    ready = [await connect() for connect in connects]
    sockets = [await served.unix("kvd.sock") for _ in range(each)]
    before = await served.metrics()
    began = time.monotonic()
    with Sleeper() as sleeper:
        texts = await asyncio.gather(
            *(by_http(pair, "steady", tokens) for pair in ready),
            *(by_socket(pair, "steady", tokens) for pair in sockets),
            return_exceptions=True,
        )
    found.machine_lag = sleeper.lag
    found.seconds = round(time.monotonic() - began, 2)
    after = await served.metrics()
    found.streams, found.tokens = len(texts), len(texts) * tokens
    found.tokens_per_s = round(found.tokens / found.seconds, 1)
    cpu = "kvd_process_cpu_seconds_total"
    found.daemon_cpu_s = round(value(after, cpu) - value(before, cpu), 2)
    found.lag = lag_between(before, after)
    found.wrong += [repr(text) for text in texts if isinstance(text, BaseException)][:5]
    distinct = {text for text in texts if isinstance(text, str)}
    if len(distinct) != 1 or len(distinct.pop().split()) != tokens:
        found.wrong.append("streams of one seed differ, or are cut short")


async def measure_memory(served: Served, found: Found, *, requests: int, at_once: int) -> None:
    """Run many short requests, and record the daemon's footprint."""
    numbers = iter(range(requests))
    done, began = 0, time.monotonic()
    found.footprint_bytes.append(served.footprint)

    async def client() -> None:
        nonlocal done
        pair = await served.tcp()
        for number in numbers:
            if number % 3 == 0:
                await by_http(await served.unix(), "quick", 4)
            else:
                request = {"model": "quick", "prompt": f"{PROMPT} {number}", "max_tokens": 4}
                body = msgspec.json.encode(request)
                await exchange(pair, "POST", "/v1/completions", body, close=False)
            done += 1
            if done % (requests // 10) == 0:
                found.footprint_bytes.append(await asyncio.to_thread(lambda: served.footprint))
        pair[1].close()

    await asyncio.gather(*(client() for _ in range(at_once)))
    found.requests = done
    found.requests_per_s = round(done / (time.monotonic() - began), 1)


async def run(options: argparse.Namespace) -> Found:
    """Measure streams, then memory."""
    found = Found()
    with Served(first=options.first) as served:
        served.load("steady", tps=options.tps)
        served.load("quick", tps=0)
        for _ in range(options.rounds):
            await measure_streams(served, found, each=options.streams, tokens=options.tokens)
        if options.requests:
            await measure_memory(served, found, requests=options.requests, at_once=options.at_once)
    return found


def faults(found: Found) -> list[str]:
    """Return a message for each limit that was exceeded and each wrong stream."""
    broken = list(found.wrong)
    if found.lag.p99_s > LAG_LIMIT_S:
        broken.append(f"lag p99 {found.lag.p99_s} s")
    if found.footprint_bytes:
        warm, last = found.footprint_bytes[1], found.footprint_bytes[-1]
        if last - warm > 0.05 * warm:
            broken.append(f"memory grew from {warm} to {last} bytes")
    return broken


def main(arguments: list[str] | None = None) -> int:
    """Run with the command line's options; return 1 if there are faults."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=200, help="streams of each kind")
    parser.add_argument("--tokens", type=int, default=200, help="length of each stream")
    parser.add_argument("--tps", type=float, default=10.0, help="tokens a second of each stream")
    parser.add_argument("--rounds", type=int, default=1, help="repeats; the last one is reported")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument(
        "--first",
        action="store_true",
        help="give the daemon real-time priority over other processes (Linux, needs root)",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found = asyncio.run(run(options))
    shown_options = {k: v for k, v in vars(options).items() if k != "json"}
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    result: dict[str, Any] = {"machine": machine, "options": shown_options, **asdict(found)}
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    for fault in (broken := faults(found)):
        print(f"BROKEN: {fault}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
