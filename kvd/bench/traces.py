"""Traces: the requests that a server gets, and when; pure functions of a seed.

Lengths are in tokens, times in seconds after the start of the trace. `prompts` makes the texts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace


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

    @property
    def longest(self) -> int:
        """Tokens of the longest request, including its new ones."""
        return max(ask.prompt_tokens + ask.output for ask in self.asks)


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


def chats(_: random.Random) -> Trace:
    """Return eight streams of 192 tokens after prompts of 12,000, all at once."""
    return Trace("chats", (Ask(12_000, 192),) * 8)


def dialogues(rng: random.Random) -> Trace:
    """Return 24 requests that share 6000 tokens, eight at a time, with 64 new tokens each."""
    asks = tuple(Ask(rng.randint(60, 120), 64, shared=6000) for _ in range(24))
    return Trace("turns", asks, concurrency=8)


def heavy(rng: random.Random) -> Trace:
    """Return 32 streams of 256 tokens after prompts of 800 to 2500, all at once."""
    return Trace("heavy", tuple(Ask(rng.randint(800, 2500), 256) for _ in range(32)))


TRACES: dict[str, Callable[[random.Random], Trace]] = {
    make.__name__: make
    for make in (alone, steady, poisson, shared, burst, long, unequal, chats, heavy)
}
TRACES["turns"] = dialogues
DEFAULT = ("steady", "poisson", "shared", "long", "unequal")


def build(name: str, seed: int, run: int) -> Trace:
    """Return a trace. Random lengths and times differ between runs, but not between servers.

    ``NAME/N`` is the trace ``NAME`` with an ``N``-th of its prompt tokens, for models with a short
    context and for slow machines. Raises ValueError if there is no such trace.
    """
    base, shortened, divisor = name.partition("/")
    if base not in TRACES:
        raise ValueError(f"there is no trace {name!r}; give one of {', '.join(TRACES)}")
    trace = TRACES[base](random.Random(f"{base} {seed} {run}"))
    if not shortened:
        return trace
    if not (divisor.isascii() and divisor.isdigit() and int(divisor) > 1):
        raise ValueError(f"{name!r} must end with a number from 2, such as {base}/4")
    return replace(
        trace, name=name, asks=tuple(_shortened(ask, int(divisor)) for ask in trace.asks)
    )


def _shortened(ask: Ask, divisor: int) -> Ask:
    return replace(ask, prompt=max(1, ask.prompt // divisor), shared=ask.shared // divisor)


def _spread(rng: random.Random, low: int, high: int) -> int:
    """Draw uniformly on a logarithmic scale, so that small numbers are more frequent."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))
