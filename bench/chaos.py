"""Kill and stop a model's worker at random times during many streams, and compare the streams.

A real daemon serves one model, by default the embedded one, under two names. The worker of
``struck`` repeatedly gets ``SIGKILL``, or ``SIGSTOP``, after which the watchdog ends it. The worker
of ``spared`` is left alone. Every stream must have the tokens and the text of an undisturbed run,
and a stream of ``spared`` must have no event that the kills and stops caused. No process may
remain.

    python -m bench.chaos --kills 30 --stops 6 --out bench/results/chaos-linux-cpu.json
    python -m bench.chaos --ranks 2 --kills 50 --stops 50 --streams 4 --spared 0 --tokens 100

With ``--ranks``, ``struck`` is a gang, and each signal goes to one of its ranks; ``spared`` is one
process. Half of the signals come soon after the one before, often while the model starts or loads.
The seed determines the times and the ranks; what the worker does at these times depends on the
machine.
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
from protocol.policy import PolicyChange
from protocol.types import ModelStatus

WATCHDOG = """[watchdog]
tokenize_s = 6
prefill_s = 6
decode_s = 6
flush_s = 6
pools_s = 6
idle_s = 12
spawning_s = 15
loading_s = 15
terminated_s = 0.3
"""
"""Deadlines that are ample for the embedded model on two busy cores, and short for a test."""
WORDS = "To open a file, call open() with its name. The garden was quiet, and the"
START_S = 60.0
BACK_S = 120.0
"""Most seconds from a kill or stop to the model's next token."""
END_S = 10.0
"""Most seconds from the end of a model to the exit of all its processes."""
GAP_S = 2.0
"""Most seconds from a model's return to the next kill or stop."""
ON_ITS_WAY_S = 0.2
"""Seconds after a kill or stop in which arriving tokens still count as generated before it."""
UNSEEN = 2
"""Most kills and stops without a token in between: a model is given up after three crashes."""


@dataclass(frozen=True)
class Asked:
    """One request, with its results in an undisturbed run."""

    prompt: str
    options: dict[str, Any]
    tokens: tuple[tuple[int, ...], ...] = ()
    """Tokens of each choice."""
    texts: tuple[str, ...] = ()


@dataclass
class Blow:
    """A kill or stop of one process of the model."""

    kind: str
    """``kill`` or ``stop``."""
    rank: int
    state: str
    """State of the model before it, such as ``spawning``, ``loading`` or ``ready``."""
    back_s: float | None = None
    """Seconds to the model's next token; None: the next kill or stop came before it."""

    def __str__(self) -> str:
        back = "-" if self.back_s is None else f"{self.back_s} s"
        return f"{self.kind} rank {self.rank}, {self.state}: {back}"


@dataclass
class Found:
    """What the run counted."""

    blows: list[Blow] = field(default_factory=list)
    streams: int = 0
    """Streams of the struck model that ended."""
    tokens: int = 0
    spared_streams: int = 0
    wrong: list[str] = field(default_factory=list)
    """Differences from the undisturbed run."""
    restarts: int = 0
    remaining: list[int] = field(default_factory=list)
    """Process ids that were alive after their model had been unloaded."""

    def count(self, kind: str) -> int:
        return sum(blow.kind == kind for blow in self.blows)

    def back(self) -> dict[str, dict[str, float]]:
        """Return the median and the longest time to the next token, by kind and state."""
        times: dict[str, list[float]] = {}
        for blow in self.blows:
            if blow.back_s is not None:
                times.setdefault(f"{blow.kind}, {blow.state}", []).append(blow.back_s)
        return {
            name: {
                "blows": len(each),
                "median_s": round(statistics.median(each), 2),
                "longest_s": max(each),
            }
            for name, each in sorted(times.items())
        }


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
        self._unseen = 0
        """Kills and stops since the model's last token."""

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
            for number, blow in enumerate(blows, 1):
                await self._strike(blow, is_last=number == len(blows))
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

    async def _strike(self, kind: str, *, is_last: bool) -> None:
        await asyncio.sleep(self.rng.uniform(0.1, GAP_S))
        while not (pids := _pids(model := await self._model())):  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # polled, because 10 ms is exact enough
        blow = Blow(kind, self.rng.randrange(len(pids)), model.state)
        struck = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[blow.rank], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        self.found.blows.append(blow)
        seen = struck + ON_ITS_WAY_S
        # With the short patience, the next kill or stop may come before the model is back.
        self._unseen += 1
        is_short = self.rng.random() < 0.5 and self._unseen < UNSEEN and not is_last
        patience = struck + (1.0 if is_short else BACK_S)
        while self._last_token < seen and time.monotonic() < patience:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if self._last_token >= seen:
            self._unseen = 0
            blow.back_s = round(self._last_token - struck, 2)

    async def unload(self) -> None:
        """Unload both models and record the processes of the daemon that remain."""
        for name in ("struck", "spared"):
            await self.client.unload(name)
        group = (await self.client.hello()).pid
        end = time.monotonic() + END_S
        while (left := _children(group)) and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        self.found.remaining = left

    async def _model(self) -> ModelStatus:
        status = await self.client.status()
        return next(model for model in status.models if model.name == "struck")


def _pids(model: ModelStatus) -> list[int]:
    """Return the process ids of the model's ranks, or that of its only process."""
    if model.ranks:
        return [rank.pid for rank in model.ranks]
    return [] if model.worker_pid is None else [model.worker_pid]


def _children(group: int) -> list[int]:
    """Return the processes in the daemon's group, except the daemon itself and ended ones."""
    command = ["ps", "-A", "-o", "pid=,pgid=,stat="]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in listed.splitlines())
    return [
        int(pid)
        for pid, own, state in rows
        if int(own) == group != int(pid) and not state.startswith("Z")
    ]


_ORDINARY = {"Accepted", "ChoiceFinished", "Done", "PrefillStarted", "Queued", "Tokens"}


async def storm(
    *,
    kills: int,
    stops: int,
    streams: int,
    spared: int,
    kinds: int,
    tokens: int,
    seed: int,
    ranks: int = 1,
    model: str = "demo",
) -> Found:
    """Start a daemon, load both models, make the undisturbed run, then the disturbed one."""
    with daemon() as home:
        client = await connected(home)
        try:
            for name, processes in (("struck", ranks), ("spared", 1)):
                policy = PolicyChange(ranks=processes)
                await (await client.load(model, alias=name, policy=policy)).result()
            run = Storm(client, requests(kinds, tokens, seed), seed)
            await run.undisturbed()
            found = await run.run(kills, stops, streams, spared)
            await run.unload()
            return found
        finally:
            await client.close()


def main() -> int:
    """Run with the command line's options; return 1 if any stream was wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.chaos")
    parser.add_argument("--model", default="demo", help="embedded name or absolute folder")
    parser.add_argument("--ranks", type=int, default=1)
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
        "kills": found.count("kill"),
        "stops": found.count("stop"),
        "back": found.back(),
        **asdict(found),
        "blows": [str(blow) for blow in found.blows],
    }
    publish(report, given.out)
    return 1 if found.wrong or found.remaining else 0


if __name__ == "__main__":
    sys.exit(main())
