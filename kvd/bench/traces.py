"""Traces: the requests that a server gets, and when; pure functions of a seed.

Lengths are in tokens, times in seconds after the start of the trace. `prompts` makes the texts.
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
    """Prompt tokens after the shared text."""
    output: int
    """Exact number of tokens to generate."""
    shared: int = 0
    """Tokens of a text with which the prompts of all requests of the trace begin."""
    at_s: float = 0.0
    """Time at which the request is sent."""
    behind: int = 0
    """Late request: number of tokens that all other requests must have before it is sent.

    0 for a request that is not late.
    """

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return self.shared + self.prompt


@dataclass(frozen=True)
class Trace:
    """Requests that are played together."""

    name: str
    asks: tuple[Ask, ...]
    concurrency: int | None = None
    """Most requests at once; None: no limit."""

    @property
    def prompt_tokens(self) -> int:
        return sum(ask.prompt_tokens for ask in self.asks)

    @property
    def output_tokens(self) -> int:
        return sum(ask.output for ask in self.asks)


def alone(_: random.Random) -> Trace:
    """Return one stream of 128 tokens after a prompt of 200."""
    return Trace("alone", (Ask(200, 128),))


def steady(_: random.Random) -> Trace:
    """Return eight streams of 128 tokens after prompts of 200, all at once."""
    return Trace("steady", (Ask(200, 128),) * 8)


def poisson(rng: random.Random, *, requests: int = 24, rate: float = 2.5) -> Trace:
    """Return requests of mixed lengths at random times, ``rate`` a second on average."""
    at, asks = 0.0, []
    for _ in range(requests):
        asks.append(Ask(_spread(rng, 32, 512), _spread(rng, 32, 128), at_s=round(at, 4)))
        at += rng.expovariate(rate)
    return Trace("poisson", tuple(asks))


def shared(rng: random.Random) -> Trace:
    """Return 32 requests that share 1500 tokens, eight at a time."""
    return Trace("shared", _sharing(rng), concurrency=8)


def burst(rng: random.Random) -> Trace:
    """Return 32 requests like those of `shared`, all at once."""
    return Trace("burst", _sharing(rng))


def _sharing(rng: random.Random) -> tuple[Ask, ...]:
    return tuple(Ask(rng.randint(32, 48), 24, shared=1500) for _ in range(32))


def long(_: random.Random) -> Trace:
    """Return seven streams, and a prompt of 6000 tokens that comes while they run."""
    return Trace("long", (*(Ask(200, 160),) * 7, Ask(6000, 8, behind=24)))


def unequal(rng: random.Random) -> Trace:
    """Return eleven requests with prompts of 32 to 800 tokens, and one with 4000 among them."""
    asks = [Ask(_spread(rng, 32, 800), _spread(rng, 16, 256)) for _ in range(11)]
    asks.insert(rng.randrange(len(asks)), Ask(4000, 64))
    return Trace("unequal", tuple(asks))


TRACES: dict[str, Callable[[random.Random], Trace]] = {
    make.__name__: make for make in (alone, steady, poisson, shared, burst, long, unequal)
}
DEFAULT = ("steady", "poisson", "shared", "long", "unequal")


def build(name: str, seed: int, run: int) -> Trace:
    """Return a trace. Random lengths and times differ between runs, but not between servers."""
    return TRACES[name](random.Random(f"{name} {seed} {run}"))


def _spread(rng: random.Random, low: int, high: int) -> int:
    """Draw uniformly on a logarithmic scale, so that small numbers are more frequent."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))
