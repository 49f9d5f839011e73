"""Answer the second turn of a long chat after its prefix has left memory, with a real daemon.

    python -m bench.ssd [--model demo|FOLDER|SHAPE ...] [--tokens 11000] [--runs 3] [--streams]
                        [--models DIR] [--json FILE]

One daemon has a prefix store, another one has none. Each run has a chat of its own. The second turn
is answered

* cold: by the daemon without a store, which has not seen the first turn. The first run's time is
  reported separately, because its process has computed nothing before.
* ram: right after the first turn.
* evicted: after the model was unloaded and loaded again.
* restarted: after the daemon was stopped, started again, and the model loaded.
* killed: after ``kill -9`` of the daemon, likewise.

Times are those to the first token, at the client, once the model is loaded. The times of loads and
starts are reported as well. All 16 greedy tokens of each answer and their logprobs must equal the
cold ones to the bit. ``--streams`` adds the delay of seven streams while the prefix is read, which
`bench.ssd.engine` measures. A SHAPE of `bench.gpu` gets random weights, in a folder below that of
``--models``. With several models, the JSON file of each has its name.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.bars import Bar
from bench.ssd import prompts
from bench.ssd.bars import BEYOND_PAGES, GAPS, bars_of
from bench.ssd.daemon import Daemon, Reply, running
from bench.ssd.models import open_model
from kvd.config.config import Config
from kvd.worker.cache.scheme import full_pages
from kvd.worker.prefix.segment_index import MIN_SECONDS

CHUNK = Config().chunk
RESTORED = ("evicted", "restarted", "killed")


async def compare(options: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """Run all chats; return the results."""
    chats = prompts.Chats(model, options.tokens)
    runs: list[dict[str, Any]] = []
    async with (
        running(folder / "cold", model, store=False) as cold,
        running(folder / "home", model, store=True) as stored,
    ):
        cold_load_s = await cold.load()
        await stored.load()
        for number in range(options.runs):
            runs.append(await _run(chats, number, cold, stored))
            print(json.dumps(runs[-1]), flush=True)
        tokens, nbytes = await stored.stored()
        info = stored.info
    pages = options.runs * full_pages(tokens // options.runs) * info.page_bytes
    return {
        "command": shlex.join(["python", "-m", "bench.ssd", *sys.argv[1:]]),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
        "device": info.device,
        "dtype": info.dtype,
        "attention_path": info.attention_path,
        "kv_scheme": info.kv_scheme,
        "cold_load_s": cold_load_s,
        "disk": {
            "tokens": tokens,
            "file_bytes": nbytes,
            "page_bytes": pages,
            "beyond_pages": nbytes / pages - 1,
            "fp16_bytes": tokens * prompts.fp16_bytes_per_token(model),
        },
        "runs": runs,
    }


async def _run(chats: prompts.Chats, number: int, cold: Daemon, stored: Daemon) -> dict[str, Any]:
    """Answer one chat's second turn in all ways."""
    before, _ = await stored.stored()
    first = await stored.ask(chats.first(number))
    assert first.usage is not None
    second = chats.second(number, first.text)
    # A checkpoint lies at a chunk's end, before the prompt's last token.
    stored_tokens = (first.usage.prompt_tokens - 1) // CHUNK * CHUNK
    if first.ttft_s < 2 * MIN_SECONDS:
        raise SystemExit(
            f"the prompt takes {first.ttft_s:.2f} s here; prefixes that take less than"
            f" {MIN_SECONDS:g} s are not stored: choose more --tokens"
        )
    await stored.written(before + stored_tokens)
    expected = await cold.ask(second)
    found: dict[str, Any] = {
        "load_average": os.getloadavg()[0],
        "first_turn_s": first.ttft_s,
        "cold": _values(expected, expected),
        "ram": _values(await stored.ask(second), expected),
    }
    for name in RESTORED:
        start_s = 0.0
        if name == "evicted":
            await stored.unload()
        else:
            await (stored.stop() if name == "restarted" else stored.kill())
            start_s = await stored.start()
        load_s = await stored.load()
        reply = await stored.ask(second)
        found[name] = {"start_s": start_s, "load_s": load_s} | _values(reply, expected)
    return found


def _values(reply: Reply, expected: Reply) -> dict[str, Any]:
    assert reply.usage is not None
    return {
        "ttft_s": reply.ttft_s,
        "prompt_tokens": reply.usage.prompt_tokens,
        "cached_tokens": reply.usage.cached_tokens,
        "equal_to_cold": reply.equals(expected),
    }


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Return the medians over the runs."""
    runs = result["runs"]
    later = runs[1:] or runs
    cold_s = statistics.median(run["cold"]["ttft_s"] for run in later)
    found: dict[str, Any] = {"cold_first_s": runs[0]["cold"]["ttft_s"], "cold_s": cold_s}
    for name in ("ram", *RESTORED):
        mine = [run[name] for run in runs]
        ttft_s = statistics.median(one["ttft_s"] for one in mine)
        found[name] = {
            "ttft_s": ttft_s,
            "share_of_cold": ttft_s / cold_s,
            "cached_share": min(one["cached_tokens"] / one["prompt_tokens"] for one in mine),
            "equal_to_cold": all(one["equal_to_cold"] for one in mine),
        }
        if name in RESTORED:
            load_s = statistics.median(one["load_s"] for one in mine)
            found[name] |= {
                "start_s": statistics.median(one["start_s"] for one in mine),
                "load_s": load_s,
                "with_load_share": (load_s + ttft_s) / (result["cold_load_s"] + cold_s),
            }
    return found


def verdicts(result: dict[str, Any]) -> list[Bar]:
    """Return all bars with their values."""
    medians = result["medians"]
    found = []
    if "streams" in result:
        found.append(Bar("p99 between tokens during a read", result["streams"]["ratio"], GAPS))
    for name in RESTORED:
        found += bars_of(name, medians[name], medians["cold_s"])
        share = medians[name]["with_load_share"]
        found.append(Bar(f"{name}, load included, time of cold", share, 1.0))
    return [*found, Bar("bytes beyond the pages", result["disk"]["beyond_pages"], BEYOND_PAGES)]


def table(result: dict[str, Any]) -> list[str]:
    """Return the lines of a table of the ways to answer."""
    medians = result["medians"]
    lines = [f"{'second turn after':20}{'first token':>12}{'of cold':>9}{'cached':>8}{'equal':>7}"]
    lines.append(f"{'nothing':20}{medians['cold_s']:10.2f} s{1:9.3f}{0:8.1%}")
    for name in ("ram", *RESTORED):
        one = medians[name]
        equal = "yes" if one["equal_to_cold"] else "NO"
        lines.append(
            f"{name:20}{one['ttft_s']:10.2f} s{one['share_of_cold']:9.3f}"
            f"{one['cached_share']:8.1%}{equal:>7}"
        )
    return lines


def _streams(model: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Measure streams during reads, with an engine in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="kvd-ssd-") as folder:
        file = Path(folder, "ssd.json")
        command = [sys.executable, "-m", "bench.ssd.engine", "--model", model, "--store", folder]
        command += ["--tokens", str(tokens), "--runs", str(rounds), "--minutes", "1000"]
        command += ["--stream-reads", str(rounds)]
        subprocess.run([*command, "--json", str(file)], check=True)
        (case,) = json.loads(file.read_text())["cases"]
        found: dict[str, Any] = case["streams"]
        return found


def main(arguments: list[str] | None = None) -> None:
    """Parse, measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.ssd",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", nargs="+", default=["demo"], help="demo, a model's folder, or a shape"
    )
    parser.add_argument("--tokens", type=int, default=11_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--streams", action="store_true", help="measure decoding streams as well")
    parser.add_argument("--models", help="folder for random weights, such as /dev/shm")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    tables = []
    for name in options.model:
        with (
            tempfile.TemporaryDirectory(prefix="kvd-ssd-") as folder,
            open_model(name, 2 * options.tokens, options.models) as model,
        ):
            result = asyncio.run(compare(options, model, Path(folder)))
            if options.streams:
                result["streams"] = _streams(model, options.tokens, options.runs)
        result["medians"] = summary(result)
        bars = verdicts(result)
        tables += [
            f"{name}, a chat of {options.tokens} tokens",
            *table(result),
            *map(str, bars),
            "",
        ]
        result["bars"] = [bar.as_dict() for bar in bars]
        if file := options.json:
            several = len(options.model) > 1
            file = file.with_stem(f"{file.stem}-{Path(name).name}") if several else file
            file.write_text(json.dumps(result, indent=2) + "\n")
    print("\n".join(tables))


if __name__ == "__main__":
    main()
