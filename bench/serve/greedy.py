"""Compares the servers' greedy texts before anything is measured.

A server whose weights were converted wrongly would generate other tokens, and the comparison would
mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from kvd.bench.measure import Stream, Unfair
from kvd.bench.player import play
from kvd.bench.servers import Server
from kvd.bench.traces import Ask, Trace

PROMPTS = (
    "To open a file,",
    "This module provides",
    "The quick brown fox and the other animals of the forest said that 3 of 12 lists",
)
TOKENS = 128
NEEDED = 32
"""Tokens after each prompt that must be equal. Later ones may differ where two tokens are close."""


@dataclass(frozen=True)
class Agreement:
    """How far the greedy texts of two servers agree."""

    equal: tuple[int, ...]
    """Equal leading characters after each prompt."""
    whole: tuple[int, ...]
    """Characters of the reference's text after each prompt."""
    wrong: int | None
    """Number of the first prompt with fewer than `NEEDED` equal tokens."""


async def texts(server: Server) -> list[Stream]:
    """Return the greedy completions of `PROMPTS`."""
    trace = Trace("greedy", (Ask(0, TOKENS),) * len(PROMPTS))
    return await play(trace, PROMPTS, server.driver)


def agreement(reference: Sequence[Stream], other: Sequence[Stream]) -> Agreement:
    """Compare the streams of the same prompts."""
    firsts = [_first_tokens(stream, NEEDED) for stream in reference]
    wholes = ["".join(stream.texts) for stream in reference]
    equal = [
        _common("".join(stream.texts), whole) for stream, whole in zip(other, wholes, strict=True)
    ]
    wrong = (at for at, first in enumerate(firsts) if equal[at] < len(first))
    return Agreement(tuple(equal), tuple(map(len, wholes)), next(wrong, None))


def _first_tokens(stream: Stream, count: int) -> str:
    """Return the text of the messages that brought the first ``count`` tokens."""
    seen, text = 0, ""
    for (_, tokens), piece in zip(stream.arrivals, stream.texts, strict=True):
        if seen >= count:
            break
        seen += tokens
        text += piece
    return text


def _common(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))  # noqa: B905


async def check(
    servers: Mapping[str, Server], reference: str, others: Sequence[str]
) -> dict[str, Agreement]:
    """Compare ``others`` with ``reference``; raise `Unfair` if a text differs early."""
    expected = await texts(servers[reference])
    found: dict[str, Agreement] = {}
    for name in others:
        streams = await texts(servers[name])
        one = found[name] = agreement(expected, streams)
        if one.wrong is not None:
            raise Unfair(
                f"{name} continues {PROMPTS[one.wrong]!r} with"
                f" {''.join(streams[one.wrong].texts)[:80]!r}, and {reference} with"
                f" {''.join(expected[one.wrong].texts)[:80]!r}: the weights are not the same"
            )
    return found
