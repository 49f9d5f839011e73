"""Kill and stop a model's worker at random times during many streams, and compare the streams.

A real daemon serves the embedded model under two names. The worker of ``struck`` repeatedly gets
``SIGKILL``, or ``SIGSTOP``, after which the watchdog ends it. The worker of ``spared`` is left
alone. Every stream must have the tokens and the text of an undisturbed run, and a stream of
``spared`` must have no event that the kills and stops caused.

    python -m bench.chaos --kills 30 --stops 6 --out bench/results/chaos-linux-cpu.json

The seed determines the times; what the worker does at these times depends on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.report import machine, publish
from kvd.client import AsyncClient, AsyncCompletion
from protocol.errors import NotRunning
from protocol.messages import Event, Tokens
from protocol.types import ModelStatus

WATCHDOG = """[watchdog]
tokenize_s = 6
prefill_s = 6
decode_s = 6
flush_s = 6
pools_s = 6
idle_s = 12
loading_s = 60
terminated_s = 0.3
"""
"""Deadlines that are ample for the embedded model on two busy cores, and short for a test."""
WORDS = "To open a file, call open() with its name. The garden was quiet, and the"
START_S = 60.0
GAP_S = 2.0
"""Most seconds from a model's return to the next kill or stop."""
ON_ITS_WAY_S = 0.2
"""Seconds after a kill or stop in which arriving tokens still count as generated before it."""


@dataclass(frozen=True)
class Asked:
    """One request, with its results in an undisturbed run."""

    prompt: str
    options: dict[str, Any]
    tokens: tuple[tuple[int, ...], ...] = ()
    """Tokens of each choice."""
    texts: tuple[str, ...] = ()


@dataclass
class Found:
    """What the run counted."""

    kills: int = 0
    stops: int = 0
    streams: int = 0
    """Streams of the struck model that ended."""
    tokens: int = 0
    spared_streams: int = 0
    wrong: list[str] = field(default_factory=list)
    """Differences from the undisturbed run."""
    back_s: list[float] = field(default_factory=list)
    """Seconds from each kill or stop to the model's next token."""
    restarts: int = 0


def requests(count: int, tokens: int, seed: int) -> list[Asked]:
    """Return varied requests: short and long prompts, greedy and sampled, one or two choices."""
    rng = random.Random(seed)
    words = WORDS.split()
    made = []
    for number in range(count):
        prompt = " ".join(rng.choice(words) for _ in range(rng.choice([3, 40, 200, 450])))
        options: dict[str, Any] = {"seed": number, "ignore_eos": True}
        options["max_tokens"] = rng.randint(tokens // 2, tokens)
        if number % 2:
            options |= {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}
        if number % 5 == 3:
            options["n"] = 2
        if number % 7 == 5:
            options["stop"] = ["~~~"]
        made.append(Asked(prompt, options))
    return made


@contextlib.contextmanager
def daemon(config: str = WATCHDOG, wrapper: Sequence[str] = ()) -> Iterator[Path]:
    """Run a daemon in a temporary home; yield the home.

    ``wrapper``: words before the daemon's command.
    """
    root = Path(tempfile.mkdtemp(prefix="kvd-chaos-"))
    home = root / "h"
    home.mkdir(mode=0o700)
    (home / "config.toml").write_text(config)
    command = [*wrapper, sys.executable, "-m", "kvd", "serve", "--home", str(home)]
    with (root / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield home
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(root, ignore_errors=True)


async def connected(home: Path) -> AsyncClient:
    """Return a client once the daemon answers."""
    end = time.monotonic() + START_S
    while True:
        client = AsyncClient(home=home)
        try:
            await client.connect()
        except NotRunning:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.05)
        else:
            return client


class Storm:
    """The streams of one run, and the kills and stops during them."""

    def __init__(self, client: AsyncClient, asked: list[Asked], seed: int) -> None:
        self.client = client
        self.asked = asked
        self.rng = random.Random(seed)
        self.found = Found()
        self.over = False
        self._last_token = 0.0

    async def undisturbed(self) -> None:
        """Record the results of all requests, run at the same time on ``spared``."""
        ends = [self._run("spared", one) for one in self.asked]
        records = await asyncio.gather(*ends)
        self.asked = [
            Asked(
                one.prompt,
                one.options,
                tuple(tuple(choice.tokens) for choice in record.choices),
                tuple(choice.text for choice in record.choices),
            )
            for one, (record, _) in zip(self.asked, records, strict=True)
        ]

    async def run(self, kills: int, stops: int, streams: int, spared: int) -> Found:
        """Run streams until all kills and stops are done, then let the last streams finish."""
        queue = itertools.cycle(self.asked)
        players = [self._play("struck", queue) for _ in range(streams)]
        players += [self._play("spared", queue) for _ in range(spared)]
        playing = [asyncio.create_task(player) for player in players]
        blows = ["kill"] * kills + ["stop"] * stops
        self.rng.shuffle(blows)
        try:
            for blow in blows:
                await self._strike(blow)
        finally:
            self.over = True
            await asyncio.gather(*playing)
        self.found.restarts = (await self._model()).restarts
        return self.found

    async def _play(self, model: str, queue: Iterator[Asked]) -> None:
        while not self.over:
            one = next(queue)
            record, events = await self._run(model, one)
            for choice, tokens, text in zip(record.choices, one.tokens, one.texts, strict=True):
                if (tuple(choice.tokens), choice.text) != (tokens, text):
                    self.found.wrong.append(f"{model}: different tokens for {one.options}")
            if model == "spared":
                self.found.spared_streams += 1
                others = {type(event).__name__ for event in events} - _ORDINARY
                if others:
                    self.found.wrong.append(f"{model}: events {sorted(others)}")
            else:
                self.found.streams += 1
                self.found.tokens += sum(len(choice.tokens) for choice in record.choices)

    async def _run(self, model: str, one: Asked) -> tuple[AsyncCompletion, list[Event]]:
        completion = await self.client.generate(model, one.prompt, **one.options)
        events: list[Event] = []
        async for event in completion:
            if not isinstance(event, Tokens):
                events.append(event)
            elif model == "struck":
                self._last_token = time.monotonic()
        return completion, events

    async def _strike(self, blow: str) -> None:
        await asyncio.sleep(self.rng.uniform(0.1, GAP_S))
        pid = None
        while pid is None:
            model = await self._model()
            # Only ready workers are stopped: the watchdog ends a loading one after 60 s only.
            pid = model.worker_pid if blow == "kill" or model.state == "ready" else None
            await asyncio.sleep(0.01)
        struck = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if blow == "kill" else signal.SIGSTOP)
        if blow == "kill":
            self.found.kills += 1
        else:  # the watchdog ends it
            self.found.stops += 1
        seen = struck + ON_ITS_WAY_S
        # With the short patience, the next kill or stop may come before the model is back.
        patience = struck + self.rng.choice([1.0, START_S])
        while self._last_token < seen and time.monotonic() < patience:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # polled, because 10 ms is exact enough
        if self._last_token >= seen:
            self.found.back_s.append(round(self._last_token - struck, 2))

    async def _model(self) -> ModelStatus:
        status = await self.client.status()
        return next(model for model in status.models if model.name == "struck")


_ORDINARY = {"Accepted", "ChoiceFinished", "Done", "PrefillStarted", "Queued", "Tokens"}


async def storm(
    *, kills: int, stops: int, streams: int, spared: int, kinds: int, tokens: int, seed: int
) -> Found:
    """Start a daemon, load both models, make the undisturbed run, then the disturbed one."""
    with daemon() as home:
        client = await connected(home)
        try:
            for name in ("struck", "spared"):
                await (await client.load("demo", alias=name)).result()
            run = Storm(client, requests(kinds, tokens, seed), seed)
            await run.undisturbed()
            return await run.run(kills, stops, streams, spared)
        finally:
            await client.close()


def main() -> int:
    """Run with the command line's options; return 1 if any stream was wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.chaos")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--stops", type=int, default=6)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--spared", type=int, default=4)
    parser.add_argument("--kinds", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    asked = {name: value for name, value in vars(given).items() if name != "out"}
    began = time.monotonic()
    found = asyncio.run(storm(**asked))
    report = {
        "asked": asked,
        "machine": machine(),
        "seconds": round(time.monotonic() - began, 1),
        "median_back_s": statistics.median(found.back_s) if found.back_s else None,
        **asdict(found),
    }
    publish(report, given.out)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
