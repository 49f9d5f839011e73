r"""Two models at once: how prefill of one slows decoding of the other.

    python -m bench.time_slices [--model FOLDER] [--rows 4] [--prompt 8000] [--seconds 6] \
        [--rounds 3] [--weight 1] [--json FILE]

The settings are time slices off and on; each gets its own daemon with the model loaded twice. Copy
``a`` decodes all the time. Copy ``b`` does nothing, prefills new prompts, or decodes too. Steps per
second and gaps are those of one row's stream at the client, after the first second. The settings
alternate, so that other work on the machine affects both.

With equal weights, two decoding copies share the accelerator without slices while their steps are
short. With a --weight other than 1 they take slices anyway. The speed of both copies, compared with
that of ``a`` alone, then shows the cost of passing slices on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import AsyncIterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from bench.own import daemon
from kvd.client import AsyncClient, AsyncCompletion
from protocol.messages import Tokens
from protocol.policy import PolicyChange

SETTINGS = ("off", "on")
BESIDE = ("nothing", "prompts", "decoding")
SETTLE_S = 1.0
_seeds = count(1)


@contextlib.asynccontextmanager
async def copies(slices: str, options: argparse.Namespace) -> AsyncIterator[AsyncClient]:
    """Run a daemon with two copies of the model, ``a`` and ``b``."""
    policies = {"a": PolicyChange(), "b": PolicyChange(weight=options.weight)}
    async with daemon(f'time_slices = "{slices}"\n') as client:
        loads = [
            await client.load(options.model, alias=name, policy=policy)
            for name, policy in policies.items()
        ]
        for loading in loads:
            await loading.result()
        yield client


def _draw(tokens: int) -> list[int]:
    return random.Random(next(_seeds)).choices(range(300, 4000), k=tokens)


async def _decode(client: AsyncClient, model: str, rows: int) -> list[AsyncCompletion]:
    """Start rows that decode until they are cancelled."""
    return [
        await client.generate(model, tokens=_draw(64), max_tokens=12_000, ignore_eos=True)
        for _ in range(rows)
    ]


async def _watch(completion: AsyncCompletion, seen: list[tuple[float, int]]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        async for event in completion:
            if isinstance(event, Tokens):  # recorded at once, because the stream is cancelled later
                seen += [(time.perf_counter(), len(event.tokens))]


async def _read(client: AsyncClient, prompt: int, read: list[float]) -> None:
    """Prefill one prompt after the other on ``b``."""
    while True:
        done = await client.generate("b", tokens=_draw(prompt), max_tokens=1, ignore_eos=True)
        await done.text()
        read.append(time.perf_counter())


async def measure(client: AsyncClient, beside: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the speed of copy ``a`` while ``b`` does what ``beside`` names, and ``b``'s speed."""
    rows = await _decode(client, "a", options.rows)
    seen: list[list[tuple[float, int]]] = [[] for _ in rows]
    watchers = [asyncio.create_task(_watch(*one)) for one in zip(rows, seen, strict=True)]
    read: list[float] = []
    others: list[AsyncCompletion] = []
    other_seen: list[tuple[float, int]] = []
    if beside == "prompts":
        watchers.append(asyncio.create_task(_read(client, options.prompt, read)))
    elif beside == "decoding":
        others = await _decode(client, "b", options.rows)
        watchers.append(asyncio.create_task(_watch(others[0], other_seen)))
    await asyncio.sleep(SETTLE_S)
    before = await _computed(client)
    start = time.perf_counter()
    await asyncio.sleep(options.seconds)
    end = time.perf_counter()
    after = await _computed(client)
    for task in watchers:
        task.cancel()
    await asyncio.gather(*watchers, return_exceptions=True)
    for completion in [*rows, *others]:
        await completion.cancel()
    while any(model.requests for model in (await client.status()).models):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return _summary(seen[0], other_seen, start, end) | {
        "beside": beside,
        "prompt_tokens_per_s": round((after - before) / (end - start), 1),
    }


async def _computed(client: AsyncClient) -> int:
    found = next(one for one in (await client.status()).models if one.name == "b")
    return found.stats.computed_tokens


def _summary(
    seen: list[tuple[float, int]], other: list[tuple[float, int]], start: float, end: float
) -> dict[str, Any]:
    times = [at for at, _ in seen if start <= at <= end]
    gaps = sorted(1e3 * (b - a) for a, b in pairwise(times)) or [1e3 * (end - start)]

    def rate(one: list[tuple[float, int]]) -> float:
        return round(sum(n for at, n in one if start <= at <= end) / (end - start), 2)

    return {
        "steps_per_s": rate(seen),
        "other_steps_per_s": rate(other),
        "gap_ms": {
            "median": round(statistics.median(gaps), 2),
            "p99": round(gaps[int(0.99 * (len(gaps) - 1))], 1),
            "max": round(gaps[-1], 1),
        },
    }


async def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements several times, alternating between the settings."""
    runs: list[dict[str, Any]] = []
    device = ""
    for number in range(options.rounds):
        for slices in SETTINGS:
            async with copies(slices, options) as client:
                info = (await client.status()).models[0].info
                device = info.device if info is not None else ""
                for beside in BESIDE:
                    run = await measure(client, beside, options)
                    runs.append({"slices": slices, "round": number, **run})
                    print(json.dumps(runs[-1]), flush=True)
    medians = {
        slices: {beside: _median(runs, slices, beside) for beside in BESIDE} for slices in SETTINGS
    }
    return {
        "command": shlex.join(["python", "-m", "bench.time_slices", *sys.argv[1:]]),
        "device": device,
        "medians": medians,
        "runs": runs,
    }


def _median(runs: list[dict[str, Any]], slices: str, beside: str) -> dict[str, float]:
    mine = [run for run in runs if (run["slices"], run["beside"]) == (slices, beside)]

    def of(*keys: str) -> float:
        found = []
        for run in mine:
            value = run
            for key in keys:
                value = value[key]
            found.append(float(value))  # type: ignore[arg-type]
        return round(statistics.median(found), 2)

    return {
        "steps_per_s": of("steps_per_s"),
        "other_steps_per_s": of("other_steps_per_s"),
        "prompt_tokens_per_s": of("prompt_tokens_per_s"),
        "gap_ms_p99": of("gap_ms", "p99"),
        "gap_ms_max": of("gap_ms", "max"),
    }


def main(arguments: list[str] | None = None) -> None:
    """Parse, measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.time_slices",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--weight", type=float, default=1.0, help="time slice weight of copy b")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    result = asyncio.run(compare(options))
    for beside in BESIDE:
        for slices in SETTINGS:
            print(f"{beside:9s} slices {slices:3s} {result['medians'][slices][beside]}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
