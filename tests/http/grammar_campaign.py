"""Random and hostile grammars against a running daemon, while another request streams.

    python -m tests.http.grammar_campaign 10000 [--seed 0] [--json FILE]

Every request ends with a result or a typed error. The tokens of a stream that runs all the time
equal those of a run alone. The report has the gaps between the stream's tokens, alone and during
the campaign (`tests.http.steady_stream`), and the worker's resident memory.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.own import daemon
from bench.report import publish
from kvd.client import AsyncClient
from protocol.errors import KvdError
from tests.http.hostile_grammars import random_grammar
from tests.http.steady_stream import Stream, streaming
from tests.worker.grammar.json_schemas import is_valid

CLIENTS = 8
TYPED = {"invalid_request", "overloaded", "request_too_large"}


@dataclass
class Report:
    """What became of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[int, str]] = field(default_factory=list)
    """Seeds with an untyped error or an invalid answer."""
    stream: Stream = field(default_factory=Stream)
    slowest_s: float = 0.0
    """Longest request."""
    workers: set[int] = field(default_factory=set)
    """Process ids of the model's worker: more than one if it died."""
    rss_mb: list[float] = field(default_factory=list)
    """Resident memory of the worker after each fifth of the requests."""


async def campaign(client: AsyncClient, seed: int, count: int) -> Report:
    """Send ``count`` grammars to the model ``demo``."""
    report = Report()
    worker = await _worker(client)
    report.workers.add(worker)
    numbers = iter(range(seed, seed + count))

    async def attack() -> None:
        for number in numbers:
            start = time.monotonic()
            await _ask(client, number, report)
            report.slowest_s = max(report.slowest_s, time.monotonic() - start)
            if (number - seed + 1) % max(1, count // 5) == 0:
                report.workers.add(pid := await _worker(client))
                report.rss_mb.append(_resident_mb(pid))

    async with streaming(str(client._path), worker) as results:
        await asyncio.gather(*(attack() for _ in range(CLIENTS)))
    (report.stream,) = results
    return report


async def _ask(client: AsyncClient, number: int, report: Report) -> None:
    grammar = random_grammar(number)
    try:
        answer = await client.generate(
            "demo", prompt="x", grammar=grammar, max_tokens=24, temperature=1.0, seed=number
        )
        text = await answer.text()
    except KvdError as error:
        info = error.info()
        report.outcomes[info.code] += 1
        if info.code not in TYPED or not info.message:
            report.wrong.append((number, f"{info.code}: {info.message}"))
        return
    report.outcomes[str(answer.reason)] += 1
    complete = answer.reason == "stop" and grammar.kind == "json_schema"
    if complete and not is_valid(grammar.value, text):
        report.wrong.append((number, text))


async def _worker(client: AsyncClient) -> int:
    while True:
        models = (await client.status()).models
        if found := [one.worker_pid for one in models if one.worker_pid]:
            return found[0]


def _resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    line = next(one for one in status.splitlines() if one.startswith("VmRSS"))
    return round(int(line.split()[1]) / 1024, 1)


async def _run(asked: argparse.Namespace) -> Report:
    async with daemon("") as client:
        await (await client.load("demo")).result()
        return await campaign(client, asked.seed, asked.count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    start = time.monotonic()
    report = asyncio.run(_run(asked))
    found = {name: getattr(report, name) for name in Report.__dataclass_fields__}
    found["workers"], found["stream"] = len(report.workers), asdict(report.stream)
    publish({"count": asked.count, "seconds": round(time.monotonic() - start), **found}, asked.json)
    raise SystemExit(bool(report.wrong or report.stream.changed or len(report.workers) > 1))


if __name__ == "__main__":
    main()
