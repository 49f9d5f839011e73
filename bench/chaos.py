"""Kill and stop a model's processes at random times during many streams, and compare the streams.

A real daemon serves one model, by default the embedded one, under two names. Processes of
``target`` repeatedly get ``SIGKILL``, or ``SIGSTOP``, after which the watchdog ends them. The
worker of ``other`` gets no signal. Every stream must have the tokens and the text of an undisturbed
run on ``other``, and a stream of ``other`` must have no event that the faults caused. No process
may remain.

    python -m bench.chaos --kills 30 --stops 6 --out FILE
    python -m bench.chaos --ranks 2 --kills 50 --stops 50 --tokens 100 --seconds 500 --out FILE

``--kills`` and ``--stops`` are numbers for each rank. With several ranks, ``target`` is a gang, and
``other`` is one process. Of five faults, three come at any time, one while the model's processes
start, and one while it loads. The seed determines the order, the times and the ranks; what the
processes do at these times depends on the machine.

After ``--seconds``, no further fault is caused. The same command with the same file then continues
with the next fault, and adds its counts to the file's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
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
from dataclasses import asdict, dataclass, field, fields
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
"""Most seconds from a model's return to the next fault at any time."""
SPREAD_S = {"spawning": 1.0, "loading": 0.5}
"""Most seconds from the begin of a state to a fault in it; the state may be over by then."""
ON_ITS_WAY_S = 0.2
"""Seconds after a fault in which arriving tokens still count as generated before it."""
STATES = ("spawning", "loading", "ready")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class Asked:
    """One request, with its results in an undisturbed run."""

    prompt: str
    options: dict[str, Any]
    tokens: tuple[tuple[int, ...], ...] = ()
    """Tokens of each choice."""
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Planned:
    """A fault to cause."""

    kind: str
    """``kill`` or ``stop``."""
    rank: int
    state: str = ""
    """State of the model in which to cause it, ``spawning`` or ``loading``; empty: in any state.

    One in a certain state follows another fault, from which the model is coming back."""


@dataclass
class Fault:
    """A kill or stop of one process of the model."""

    kind: str
    rank: int
    state: str
    """State of the model before it, such as ``spawning``, ``loading`` or ``ready``."""
    back_s: float | None = None
    """Seconds to the model's next token; None: the next fault came before it."""

    def __str__(self) -> str:
        back = "-" if self.back_s is None else f"{self.back_s} s"
        return f"{self.kind} rank {self.rank}, {self.state}: {back}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Return the fault of an entry in a file."""
        kind, _, rank, state, back = text.split(maxsplit=4)
        seconds = None if back == "-" else float(back.removesuffix(" s"))
        return cls(kind, int(rank.rstrip(",")), state.rstrip(":"), seconds)


@dataclass
class Found:
    """What the runs counted."""

    faults: list[Fault] = field(default_factory=list)
    streams: int = 0
    """Streams of ``target`` that ended."""
    tokens: int = 0
    other_streams: int = 0
    wrong: list[str] = field(default_factory=list)
    """Differences from the undisturbed run."""
    restarts: int = 0
    remaining: list[int] = field(default_factory=list)
    """Process ids that were alive after their model had been unloaded."""
    runs: int = 0
    seconds: float = 0.0

    def count(self, kind: str) -> int:
        return sum(fault.kind == kind for fault in self.faults)

    def back(self) -> dict[str, dict[str, float]]:
        """Return, by kind, rank and state, the faults and the times to the next token."""
        by_name: dict[str, list[Fault]] = {}
        for fault in self.faults:
            name = f"{fault.kind} rank {fault.rank}, {fault.state}"
            by_name.setdefault(name, []).append(fault)
        return {name: _times(faults) for name, faults in sorted(by_name.items())}

    def written(self) -> dict[str, Any]:
        """Return the entries of a file."""
        faults = [str(fault) for fault in self.faults]
        return {"back": self.back(), **asdict(self), "faults": faults}

    @classmethod
    def read(cls, report: dict[str, Any]) -> Found:
        """Return the counts of a file."""
        values = {one.name: report[one.name] for one in fields(cls)}
        return cls(**values | {"faults": [Fault.parse(text) for text in report["faults"]]})


def _times(faults: list[Fault]) -> dict[str, float]:
    measured = [fault.back_s for fault in faults if fault.back_s is not None]
    found: dict[str, float] = {"faults": len(faults), "measured": len(measured)}
    if measured:
        found |= {"median_s": round(statistics.median(measured), 2), "longest_s": max(measured)}
    return found


def plan(kills: int, stops: int, ranks: int, seed: int) -> list[Planned]:
    """Return so many kills and stops of each rank, in random order.

    A fault in a certain state comes directly after one in any state.
    """
    counts = {"kill": kills, "stop": stops}
    cells = [
        (kind, rank)
        for kind, count in counts.items()
        for rank in range(ranks)
        for _ in range(count)
    ]
    states = ("", "spawning", "", "loading", "")
    planned = [Planned(*cell, states[number % 5]) for number, cell in enumerate(cells)]
    rng = random.Random(seed)
    rng.shuffle(planned)
    first = [one for one in planned if not one.state]
    second = [one for one in planned if one.state]
    followed = set(rng.sample(range(len(first)), len(second)))
    order = []
    for number, one in enumerate(first):
        order.append(one)
        if number in followed:
            order.append(second.pop())
    return order


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


class Run:
    """The streams of one run, and the faults during them."""

    def __init__(self, client: AsyncClient, asked: list[Asked], seed: int, found: Found) -> None:
        self.client = client
        self.asked = asked
        self.rng = random.Random(seed)
        self.found = found
        """Counts of earlier runs, to which this one adds its own."""
        self.over = False
        self._last_token = 0.0
        self._last_pids: list[int] = []
        """Processes of the target at the last fault."""

    async def undisturbed(self) -> None:
        """Record the results of all requests, run at the same time on ``other``."""
        ends = [self._run("other", one) for one in self.asked]
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

    async def run(self, faults: list[Planned], streams: int, others: int, end: float) -> None:
        """Run streams until all faults are done or ``end``, then let the last streams finish."""
        queue = itertools.cycle(self.asked)
        players = [self._play("target", queue) for _ in range(streams)]
        players += [self._play("other", queue) for _ in range(others)]
        playing = [asyncio.create_task(player) for player in players]
        following = [*(bool(fault.state) for fault in faults[1:]), False]
        try:
            for fault, is_followed in zip(faults, following, strict=True):
                if not fault.state and time.monotonic() > end:
                    break
                await self._cause(fault, is_followed=is_followed)
        finally:
            self.over = True
            await asyncio.gather(*playing)
        self.found.restarts += (await self._target()).restarts

    async def _play(self, model: str, queue: Iterator[Asked]) -> None:
        while not self.over:
            one = next(queue)
            record, events = await self._run(model, one)
            for choice, tokens, text in zip(record.choices, one.tokens, one.texts, strict=True):
                if (tuple(choice.tokens), choice.text) != (tokens, text):
                    self.found.wrong.append(f"{model}: different tokens for {one.options}")
            if model == "other":
                self.found.other_streams += 1
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
            elif model == "target":
                self._last_token = time.monotonic()
        return completion, events

    async def _cause(self, planned: Planned, *, is_followed: bool) -> None:
        """Send the signal, and wait for the next token unless another fault follows at once."""
        if not planned.state:
            await asyncio.sleep(self.rng.uniform(0.1, GAP_S))
        pids, state = await self._processes(planned.state)
        if planned.state:
            await asyncio.sleep(self.rng.uniform(0.0, SPREAD_S[planned.state]))
            pids, state = await self._processes()
        fault = Fault(planned.kind, planned.rank, state)
        sent = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[fault.rank], SIGNALS[fault.kind])
        self.found.faults.append(fault)
        self._last_pids = pids
        if is_followed:
            return
        while self._last_token < sent + ON_ITS_WAY_S:
            if time.monotonic() > sent + BACK_S:
                message = f"no token in {BACK_S:g} s after {fault}"
                raise TimeoutError(message)
            await asyncio.sleep(0.01)
        fault.back_s = round(self._last_token - sent, 2)

    async def _processes(self, wanted: str = "") -> tuple[list[int], str]:
        """Return the target's processes and state once it has any.

        ``wanted``: the state to wait for, with other processes than at the last fault. Polling may
        miss a short state, so a later one is returned as well.
        """
        states = STATES[STATES.index(wanted) :] if wanted else STATES
        end = time.monotonic() + BACK_S
        while True:
            model = await self._target()
            pids = _pids(model)
            is_new = pids != self._last_pids or not wanted
            if pids and is_new and model.state in states:
                return pids, model.state
            if model.state == "failed" or time.monotonic() > end:
                message = f"the model is {model.state}, and not {wanted or 'running'}"
                raise TimeoutError(message)
            await asyncio.sleep(0.01)  # polled, because 10 ms is exact enough

    async def unload(self) -> None:
        """Unload both models and record the processes of the daemon that remain."""
        for name in ("target", "other"):
            await self.client.unload(name)
        group = (await self.client.hello()).pid
        end = time.monotonic() + END_S
        while (left := _children(group)) and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        self.found.remaining += left

    async def _target(self) -> ModelStatus:
        status = await self.client.status()
        return next(model for model in status.models if model.name == "target")


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


async def campaign(
    *,
    kills: int,
    stops: int,
    streams: int,
    other_streams: int,
    kinds: int,
    tokens: int,
    seed: int,
    ranks: int = 1,
    model: str = "demo",
    seconds: float = math.inf,
    found: Found | None = None,
) -> Found:
    """Start a daemon, load both models, make the undisturbed run, then the disturbed one.

    ``found``: counts of earlier runs, to which this one adds its own.
    """
    began = time.monotonic()
    found = found or Found()
    done = len(found.faults)
    with daemon() as home:
        client = await connected(home)
        try:
            for name, processes in (("target", ranks), ("other", 1)):
                policy = PolicyChange(ranks=processes)
                await (await client.load(model, alias=name, policy=policy)).result()
            run = Run(client, requests(kinds, tokens, seed), seed + done, found)
            await run.undisturbed()
            faults = plan(kills, stops, ranks, seed)[done:]
            await run.run(faults, streams, other_streams, began + seconds)
            await run.unload()
        finally:
            await client.close()
    found.runs += 1
    found.seconds = round(found.seconds + time.monotonic() - began, 1)
    return found


def main() -> int:
    """Run with the command line's options; return 1 if any stream was wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.chaos")
    parser.add_argument("--model", default="demo", help="embedded name or absolute folder")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--kills", type=int, default=30, help="for each rank")
    parser.add_argument("--stops", type=int, default=6, help="for each rank")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--other-streams", type=int, default=4)
    parser.add_argument("--kinds", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    asked = {name: it for name, it in vars(given).items() if name not in {"out", "seconds"}}
    found = None
    if given.out is not None and given.out.exists():
        before = json.loads(given.out.read_text())
        if before["asked"] != asked:
            parser.error(f"{given.out} has the results of other options: {before['asked']}")
        found = Found.read(before)
    found = asyncio.run(campaign(**asked, seconds=given.seconds, found=found))
    publish({"asked": asked, "machine": machine(), **found.written()}, given.out)
    return 1 if found.wrong or found.remaining else 0


if __name__ == "__main__":
    sys.exit(main())
