"""Hostile models, templates and prompts during many streams, in a control group around the daemon.

The group's limit is the budget and an overhead: one daemon, one worker without a grant, and the
tolerance of one worker above its grant. Folders and templates that take memory without end are
loaded and used one after the other while the streams run. The kernel must kill no process, each
attempt must end with its typed error, and each stream must have the tokens of an undisturbed run
and no event that the attempts caused.

    python -m bench.memory_limits --out bench/results/memory-limits-linux-cpu.json

Needs a control group that this process can create (`bench.cgroup`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.cgroup import Cgroup, NoCgroup, limited
from bench.chaos import _ORDINARY, Asked, connected, daemon, requests
from bench.report import machine, publish
from kvd import demo
from kvd.client import AsyncClient
from protocol.errors import KvdError
from protocol.messages import Tokens
from protocol.types import ChatMessage

MIB = 2**20
OVERHEAD_MIB = 768
"""128 MiB for the daemon, 384 for a worker without a grant, 256 for one above its grant."""
MODELS = ("streams", "idle")
COSTLY = {"evict", "requeue", "reclaim_precision", "reclaim_preempt", "over_limit", "replay"}
"""Events of `MODELS` that would mean that they paid for an attempt."""
SAMPLE_S = 0.02
PRODUCT = "{{ 'x' * 10**10 }}"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}"


@dataclass
class Found:
    """What the run saw."""

    streams: int = 0
    tokens: int = 0
    rounds: int = 0
    attempts: dict[str, list[str]] = field(default_factory=dict)
    """By kind of attempt, the error codes that it ended with."""
    longest_s: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    oom_kills: int = 0
    peak_mib: int = 0
    """Most memory of the group, with the page cache."""
    peak_private_mib: int = 0
    """Most memory of the group without the page cache, as sampled."""


def copy_demo(folder: Path) -> Path:
    """Make a folder with links to the embedded model's files."""
    folder.mkdir()
    for file in demo.path().iterdir():
        if file.is_file() and file.suffix != ".py":
            (folder / file.name).symlink_to(file)
    return folder


def replace(folder: Path, name: str, text: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text(text)


def many_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    replace(folder, "config.json", json.dumps(config | {"num_hidden_layers": 10**9}))


def endless_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")


def pipe_as_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def large_index(folder: Path) -> None:
    """60 MiB of JSON whose lists take 20 times as much."""
    text = '{"weight_map": {}, "x": [' + "[]," * (20 * MIB) + "0]}"
    replace(folder, "model.safetensors.index.json", text)


def large_tokenizer_config(folder: Path) -> None:
    replace(folder, "tokenizer_config.json", '{"x": [' + "[]," * (20 * MIB) + "0]}")


FOLDERS: dict[str, Callable[[Path], None]] = {
    "many layers": many_layers,
    "endless config": endless_config,
    "pipe as weights": pipe_as_weights,
    "large index": large_index,
    "large tokenizer config": large_tokenizer_config,
}
TEMPLATES = {"template with a product": PRODUCT, "template with a loop": LOOP}
ATTEMPTS = (*FOLDERS, *TEMPLATES, "long prompt")
EXPECTED = dict.fromkeys(FOLDERS, "invalid_model") | dict.fromkeys(TEMPLATES, "invalid_request")
EXPECTED["long prompt"] = "context_too_long"


class Run:
    """One run against one daemon."""

    def __init__(self, client: AsyncClient, folder: Path, asked: list[Asked]) -> None:
        self.client = client
        self.folder = folder
        self.asked = asked
        self.found = Found()
        self._numbers = 0

    async def run(self, attempts: list[str]) -> Found:
        for name in MODELS:
            await (await self.client.load("demo", alias=name)).result()
        self.asked = await asyncio.gather(*map(self._undisturbed, self.asked))
        streams = asyncio.gather(*(self._stream(one) for one in self.asked))
        while not (self.found.rounds and streams.done()):
            for attempt in attempts:
                await self._attempt(attempt)
            self.found.rounds += 1
        await streams
        async for it in self.client.events():
            if it.kind in COSTLY and it.model in MODELS:
                self.found.wrong.append(f"event {it.kind} of {it.model}: {it.reason}")
        return self.found

    async def _undisturbed(self, one: Asked) -> Asked:
        completion = await self.client.generate("streams", one.prompt, **one.options)
        async for _ in completion:
            pass
        choices = completion.choices
        tokens = tuple(tuple(choice.tokens) for choice in choices)
        return Asked(one.prompt, one.options, tokens, tuple(choice.text for choice in choices))

    async def _stream(self, one: Asked) -> None:
        completion = await self.client.generate("streams", one.prompt, **one.options)
        async for event in completion:
            if not isinstance(event, Tokens) and type(event).__name__ not in _ORDINARY:
                self.found.wrong.append(f"a stream had the event {event}")
        if tuple(tuple(choice.tokens) for choice in completion.choices) != one.tokens:
            self.found.wrong.append(f"different tokens for {one.options}")
        self.found.streams += 1
        self.found.tokens += sum(len(choice.tokens) for choice in completion.choices)

    async def _attempt(self, kind: str) -> None:
        began = time.monotonic()
        try:
            await self._act(kind)
            code = "none"
        except KvdError as error:
            code = error.code
        took = time.monotonic() - began
        self.found.attempts.setdefault(kind, []).append(code)
        self.found.longest_s[kind] = round(max(took, self.found.longest_s.get(kind, 0.0)), 1)
        if code != EXPECTED[kind]:
            self.found.wrong.append(f"{kind} ended with {code}")

    async def _act(self, kind: str) -> None:
        if kind == "long prompt":
            await self._generate("streams", prompt="tale " * 400_000)
            return
        self._numbers += 1
        name = f"hostile{self._numbers}"
        folder = copy_demo(self.folder / name)
        if kind in FOLDERS:
            FOLDERS[kind](folder)
        else:
            replace(folder, "chat_template.jinja", TEMPLATES[kind])
        await (await self.client.load(str(folder), alias=name)).result()
        try:
            await self._generate(name, messages=[ChatMessage("user", "hello")])
        finally:
            await self.client.unload(name)

    async def _generate(self, model: str, **fields: Any) -> None:
        async for _ in await self.client.generate(model, max_tokens=5, **fields):
            pass


async def sample(group: Cgroup, found: Callable[[int], None]) -> None:
    while True:
        found(group.private_bytes)
        await asyncio.sleep(SAMPLE_S)


async def measure(
    budget_mib: int, streams: int, tokens: int, seed: int, attempts: list[str]
) -> Found:
    """Start a daemon in a group of its own and run everything; raises `NoCgroup`."""
    peak = 0

    def seen(nbytes: int) -> None:
        nonlocal peak
        peak = max(peak, nbytes)

    with limited((budget_mib + OVERHEAD_MIB) * MIB) as group, _folder() as folder:
        with daemon(f'budget = "{budget_mib}MiB"\n', group.wrapper) as home:
            client = await connected(home)
            sampler = asyncio.create_task(sample(group, seen))
            try:
                asked = requests(streams, tokens, seed)
                found = await Run(client, folder, asked).run(attempts)
            finally:
                sampler.cancel()
                await client.close()
        found.oom_kills, found.peak_mib = group.oom_kills, group.peak_bytes // MIB
        found.peak_private_mib = peak // MIB
    if found.oom_kills:
        found.wrong.append(f"the kernel killed {found.oom_kills} processes")
    return found


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvd-memory-") as folder:
        yield Path(folder)


def main(words: list[str] | None = None) -> int:
    """Run with the command line's options; return 1 if anything was wrong, 2 without a group."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory_limits")
    parser.add_argument("--budget-mib", type=int, default=1024)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--attempts", nargs="+", default=list(ATTEMPTS), choices=ATTEMPTS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    asked = {name: value for name, value in vars(given).items() if name != "out"}
    began = time.monotonic()
    try:
        found = asyncio.run(measure(**asked))
    except NoCgroup as error:
        print(error, file=sys.stderr)
        return 2
    report = {
        "asked": asked,
        "limit_mib": given.budget_mib + OVERHEAD_MIB,
        "overhead_mib": OVERHEAD_MIB,
        "machine": machine(),
        "seconds": round(time.monotonic() - began, 1),
        **asdict(found),
    }
    publish(report, given.out)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
