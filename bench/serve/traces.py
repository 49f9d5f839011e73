"""What is asked of a server, and when: pure functions of a seed.

Lengths are in tokens, times in seconds after the start of the trace. Texts are made in `prompts`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: int
    """Prompt tokens, those of the shared text not counted."""
    output: int
    """Tokens to generate, exactly."""
    shared: int = 0
    """Prompt tokens before its own, the same ones in all requests of the trace."""
    at_s: float = 0.0
    behind: int = 0
    """Tokens that every request without this setting must have before this one is sent."""

    @property
    def prompt_tokens(self) -> int:
        """The whole prompt."""
        return self.shared + self.prompt


@dataclass(frozen=True)
class Trace:
    """Requests that belong together."""

    name: str
    asks: tuple[Ask, ...]
    concurrency: int | None = None
    """The most requests at once; None: as they come."""

    @property
    def prompt_tokens(self) -> int:
        return sum(ask.prompt_tokens for ask in self.asks)

    @property
    def output_tokens(self) -> int:
        return sum(ask.output for ask in self.asks)


def steady(_: random.Random) -> Trace:
    """Return eight streams of 128 tokens after prompts of 200, all at once."""
    return Trace("steady", (Ask(200, 128),) * 8)


def poisson(rng: random.Random, *, requests: int = 24, rate: float = 2.5) -> Trace:
    """Return requests of mixed lengths that come by chance, ``rate`` a second on average."""
    at, asks = 0.0, []
    for _ in range(requests):
        asks.append(Ask(_spread(rng, 32, 512), _spread(rng, 32, 128), at_s=round(at, 4)))
        at += rng.expovariate(rate)
    return Trace("poisson", tuple(asks))


def shared(rng: random.Random) -> Trace:
    """Return 32 requests that share 1500 tokens, eight at a time."""
    return Trace("shared", _sharing(rng), concurrency=8)


def burst(rng: random.Random) -> Trace:
    """Return the same 32 requests, all at once."""
    return Trace("burst", _sharing(rng))


def _sharing(rng: random.Random) -> tuple[Ask, ...]:
    return tuple(Ask(rng.randint(32, 48), 24, shared=1500) for _ in range(32))


def long(_: random.Random) -> Trace:
    """Return seven streams, and a prompt of 6000 tokens that comes while they run."""
    return Trace("long", (*(Ask(200, 160),) * 7, Ask(6000, 8, behind=24)))


def unequal(rng: random.Random) -> Trace:
    """Return a prompt of 4000 tokens among eleven of 32 to 800, with 16 to 256 tokens each."""
    asks = [Ask(_spread(rng, 32, 800), _spread(rng, 16, 256)) for _ in range(11)]
    asks.insert(rng.randrange(len(asks)), Ask(4000, 64))
    return Trace("unequal", tuple(asks))


TRACES: dict[str, Callable[[random.Random], Trace]] = {
    make.__name__: make for make in (steady, poisson, shared, burst, long, unequal)
}
DEFAULT = ("steady", "poisson", "shared", "long", "unequal")


def build(name: str, seed: int, run: int) -> Trace:
    """Return a trace; every run has other lengths and other times, the same for all servers."""
    return TRACES[name](random.Random(f"{name} {seed} {run}"))


def _spread(rng: random.Random, low: int, high: int) -> int:
    """Draw evenly in the logarithm: short requests are more frequent than long ones."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))
