"""Random actions of clients and workers; a seed reproduces them.

At its end, `world` checks the invariants, that each request ended once, and that no process is
left. These tests also check that grants never exceed the budget, and that each stream gets the
tokens that it would get alone.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from actors.system import Settings
from protocol import messages
from protocol.errors import ErrorInfo
from protocol.messages import is_last
from tests.sim.fakes import Script, token
from tests.sim.loop import run, until
from tests.sim.world import SimClient, World, world

MODELS = ["a", "b", "c"]
ERRORS = {
    "draining",
    "model_failed",
    "quarantined",
    "overloaded",
    "unknown_model",
    "worker_died",
    "invalid_model",
    "insufficient_memory",
}


def script(rng: random.Random) -> Script:
    return Script(
        load_s=rng.choice([0.1, 1.0, 30.0]),
        token_s=rng.choice([0.01, 0.3, 2.0]),
        weights=rng.choice([50, 300, 900]),
        spawn_error=OSError("no") if rng.random() < 0.1 else None,
        load_error=ErrorInfo("invalid_model", "broken") if rng.random() < 0.1 else None,
        exit_at_load=1 if rng.random() < 0.1 else None,
        crash_after=rng.randint(1, 40) if rng.random() < 0.2 else None,
        hang_at=rng.choice(["start", "load", "token"]) if rng.random() < 0.1 else None,
        deaf=rng.random() < 0.1,
        kill_s=rng.choice([0.0, 0.01, 7.0]),
        early=rng.random() < 0.2,
    )


class Chaos:
    """One random walk through one world."""

    def __init__(self, w: World, rng: random.Random) -> None:
        self.w, self.rng = w, rng
        self.prompts: dict[tuple[int, str], tuple[str, int]] = {}

    def client(self) -> SimClient:
        alive = [client for client in self.w.clients if not client.closed]
        if not alive or (len(alive) < 4 and self.rng.random() < 0.1):
            return self.w.client()
        return self.rng.choice(alive)

    def act(self) -> None:
        rng, client = self.rng, self.client()
        model = rng.choice(MODELS)
        match rng.choices(range(8), [30, 10, 6, 3, 4, 2, 1, 3])[0]:
            case 0:
                prompt, length = f"p{rng.random()}", rng.randint(1, 30)
                sampling = {"seed": length}
                key = client.generate(model, prompt, max_tokens=length, sampling=sampling)
                self.prompts[id(client), key] = (prompt, length)
            case 1:
                running = [key for key, events in client.events.items() if key]
                if running:
                    client.start(messages.Cancel, target=rng.choice(running))
            case 2:
                client.start(messages.Load, model=model)
            case 3:
                client.start(messages.Unload, model=model, force=rng.random() < 0.3)
            case 4 if alive := self.w.spawn.alive():
                rng.choice(alive).die(rng.choice([-9, -11, 0, 1]))
            case 5 if alive := self.w.spawn.alive():
                rng.choice(alive).suspend()
            case 6:
                client.disconnect()
            case 7 if alive := self.w.spawn.alive():
                rng.choice(alive).request_memory(rng.randint(0, 1100))
            case _:
                client.start(messages.Status)

    def check(self) -> None:
        self.w.system.check()
        status = self.w.system.status()
        assert status.granted_bytes <= status.budget_bytes
        assert sum(self.w.system._router.machine.counts.values()) <= len(self.prompts)

    async def settle(self) -> None:
        """Wait until every request of every connected client has ended."""
        for client in self.w.clients:
            for key in list(client.events):
                if key and not client.closed:
                    await client.end(key, 100_000)

    def check_streams(self) -> None:
        for client in self.w.clients:
            for key, events in client.events.items():
                if (id(client), key) not in self.prompts:
                    continue
                prompt, length = self.prompts[id(client), key]
                tokens = client.tokens(key)
                assert tokens == [token(prompt, length, i) for i in range(len(tokens))]
                last = events[-1] if events else None
                if isinstance(last, messages.Done) and last.reason == "length":
                    assert length == len(tokens)
                if isinstance(last, messages.Error):
                    assert last.error.code in ERRORS, last


async def walk(seed: int) -> None:
    rng = random.Random(seed)
    scripts = {name: [script(rng) for _ in range(40)] for name in MODELS}
    async with world(scripts, load=(), settings=Settings(max_queue=20)) as w:
        chaos = Chaos(w, rng)
        for _ in range(150):
            chaos.act()
            await asyncio.sleep(rng.choice([0, 0, 0.001, 0.1, 1.0, 5.0]))
            chaos.check()
        if seed % 2:
            await chaos.settle()
            chaos.check_streams()
            await until(lambda: not w.system._router.machine.requests)
        else:
            last = asyncio.ensure_future(w.system.stop(force=seed % 4 == 0))
            await asyncio.wait_for(last, 100_000)
            chaos.check_streams()
            open_ = [
                (key, events)
                for client in w.clients
                for key, events in client.events.items()
                if key and not (events and is_last(events[-1])) and not client.closed
            ]
            assert not open_


@pytest.mark.parametrize("seed", range(24))
def test_chaos(seed: int):
    run(walk(seed))
