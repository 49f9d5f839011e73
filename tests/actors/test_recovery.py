"""Workers die and hang at any time, and no stream misses or repeats a token.

At its end, `world` checks the invariants. These tests also check that only poisonous requests end
with an error, and that clients of other models notice nothing.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from actors.system import Settings
from protocol import messages
from protocol.messages import Done, Error, Paused, Resumed, is_last
from protocol.types import Sampling
from tests.sim.fakes import FakeProcess, Script, token
from tests.sim.loop import run
from tests.sim.world import SimClient, world

OUTSIDE = [-9, -15, -1]
"""Exit statuses after a kill from outside."""
OWN = [-11, -6, 0, 1, 70]
"""Exit statuses that the process may have caused itself."""


class Stream:
    """One request, and the tokens that it must get."""

    def __init__(self, client: SimClient, model: str, number: int, rng: random.Random) -> None:
        self.model = model
        self.prompt = f"{model} {number}"
        self.length = rng.randint(1, 40)
        self.client = client
        self.cancelled = False
        sampling = Sampling(seed=number)
        self.key = client.generate(model, self.prompt, max_tokens=self.length, sampling=sampling)
        self.right = [token(self.prompt, number, place) for place in range(self.length)]

    @property
    def over(self) -> bool:
        events = self.client.events[self.key]
        return bool(events) and is_last(events[-1])

    def check(self, poison: dict[str, int]) -> None:
        events = self.client.events[self.key]
        tokens = self.client.tokens(self.key)
        end, deadly = events[-1], poison.get(self.prompt, self.length)
        assert tokens == self.right[: len(tokens)]
        if self.cancelled:
            assert isinstance(end, Done | Error)
        elif deadly < self.length:
            assert isinstance(end, Error)
            assert end.error.code == "quarantined"
            assert len(tokens) == deadly
        else:
            assert isinstance(end, Done), end
            assert tokens == self.right
        rests = [event for event in events if isinstance(event, Paused | Resumed)]
        assert all(isinstance(one, Paused) for one in rests[::2])
        assert all(isinstance(one, Resumed) for one in rests[1::2])
        accepted = sum(isinstance(event, messages.Accepted) for event in events)
        assert accepted == 1 or (self.cancelled and not tokens)
        if self.model == "other":
            assert not rests


def interrupt(process: FakeProcess, rng: random.Random) -> None:
    """Kill or suspend a process without making its model look broken.

    Deaths that look like crashes happen only after the first token. During the load they would
    count against the model, and before the first token against a request that runs alone.
    """
    if not process.has_progress:
        process.die(rng.choice(OUTSIDE))
    elif rng.random() < 0.2:
        process.suspend()
    else:
        process.die(rng.choice(OUTSIDE + OWN))


async def walk(seed: int) -> None:
    rng = random.Random(seed)
    poison = {f"target {rng.randint(0, 60)}": rng.randint(0, 20) for _ in range(rng.randint(0, 2))}
    speeds = [0.02, 0.3]
    scripts = {
        "target": [
            Script(
                load_s=rng.choice([0.1, 1.0, 20.0]),
                token_s=rng.choice(speeds),
                kill_s=rng.choice([0.0, 0.01, 3.0]),
                deaf=rng.random() < 0.2,
                poison=poison,
            )
            for _ in range(400)
        ],
        "other": [Script(token_s=0.1)],
    }
    settings = Settings(max_queue=200)
    async with world(scripts, load=("target", "other"), settings=settings) as w:
        clients = [w.client() for _ in range(3)]
        streams: list[Stream] = []
        for number in range(60):
            model = "other" if number % 5 == 4 else "target"
            streams.append(Stream(rng.choice(clients), model, number, rng))
            if rng.random() < 0.1:
                victim = rng.choice(streams)
                victim.cancelled = True
                victim.client.start(messages.Cancel, target=victim.key)
            process = w.spawn.processes["target"][-1]
            if process.alive and rng.random() < 0.25:
                interrupt(process, rng)
            await asyncio.sleep(rng.choice([0.0, 0.05, 0.4, 3.0]))
            w.system.check()
        for stream in streams:
            await stream.client.end(stream.key, 100_000)
        for stream in streams:
            stream.check(poison)
        assert len(w.spawn.processes["other"]) == 1
        admission = w.system._router.machine
        assert not admission.requests
        assert all(not one.stories and not one.inside for one in admission.suspects.values())


@pytest.mark.parametrize("seed", range(12))
def test_streams_survive_dying_and_hanging_workers(seed: int) -> None:
    run(walk(seed))
