"""Computes throughput, latencies and limits from the arrival times at the client; pure functions.

A token's *gap* is the time since the previous token arrived at the client. Tokens in the same
message have gaps of 0. If a server sends only text, a token whose text came with a later token's
message also has a gap of 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from kvd.bench.traces import Trace


class Unfair(Exception):
    """The servers did not do the same work."""


@dataclass
class Stream:
    """One request as seen by its client. Times are in seconds of one monotonic clock."""

    sent: float = math.nan
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Arrival time and number of tokens of each message."""
    prompt_tokens: int = 0
    """Prompt tokens as the server counts them."""
    output_tokens: int = 0
    """Generated tokens as the server counts them."""
    cached_tokens: int | None = None
    """Prompt tokens that the server had cached, if it reports them."""
    finished: bool = False
    """Whether all of its tokens have arrived."""
    texts: list[str] = field(default_factory=list)
    """Text of each message."""
    heard: Callable[[], None] = lambda: None
    """Called after every message."""

    def arrived(self, when: float, tokens: int = 1, text: str = "") -> None:
        """Record a message."""
        self.arrivals.append((when, tokens))
        self.texts.append(text)
        self.heard()

    @property
    def shown(self) -> int:
        """Tokens that have arrived."""
        return sum(tokens for _, tokens in self.arrivals)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0][0] - self.sent

    @property
    def end(self) -> float:
        """Arrival time of the last token."""
        return self.arrivals[-1][0]

    def gaps(self, since: float = -math.inf, until: float = math.inf) -> list[float]:
        """Return the gaps that overlap an interval; without limits, one less than tokens."""
        found: list[float] = []
        for (before, _), (when, tokens) in zip(self.arrivals, self.arrivals[1:], strict=False):
            if when > since and before < until:
                found += [when - before] + [0.0] * (tokens - 1)
        if math.isinf(since) and math.isinf(until):
            found += [0.0] * (max(self.shown, self.output_tokens) - 1 - len(found))
        return found


@dataclass(frozen=True)
class Measures:
    """One run of a trace on one server. Times are in seconds.

    CPU times and memory come from /proc. They are nan on systems without /proc, and for servers
    that this program did not start.
    """

    tokens: int
    wall_s: float
    tok_s: float
    """Generated tokens per second of the whole run, including prefill and waiting."""
    decode_tok_s: float
    """Tokens per second while all streams ran; nan if they never all ran at once."""
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    during_p50: float
    """Gaps of the other streams while a late request's prompt is processed; nan without one.

    A late request is one with `Ask.behind`.
    """
    during_p99: float
    late_ttft: float
    """Time to the first token of the late request; nan without one."""
    cached_tokens: int | None
    cpu_ms_per_token: float = math.nan
    """User and system CPU time of the server's processes per generated token."""
    decode_cpu_ms_per_token: float = math.nan
    """CPU time per token while all streams ran, without prefill."""
    peak_bytes: float = math.nan
    """Sum of the processes' resident high-water marks; pages that they share count once."""
    largest_bytes: float = math.nan
    """High-water mark of the largest process: kvd's worker, without its daemon."""


_NOTHING = Measures(
    tokens=0,
    wall_s=math.nan,
    tok_s=0.0,
    decode_tok_s=math.nan,
    ttft_p50=math.nan,
    ttft_p99=math.nan,
    itl_p50=math.nan,
    itl_p99=math.nan,
    during_p50=math.nan,
    during_p99=math.nan,
    late_ttft=math.nan,
    cached_tokens=None,
)
"""A run in which no token arrived."""


def percentile(values: Iterable[float], q: float) -> float:
    """Return the q-th percentile, linearly interpolated; nan without values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = q / 100 * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(trace: Trace, streams: Sequence[Stream]) -> Measures:
    """Return the measures of a run, except CPU times and memory."""
    tokens = sum(stream.output_tokens for stream in streams)
    wall = max(stream.end for stream in streams) - min(stream.sent for stream in streams)
    gaps = [gap for stream in streams for gap in stream.gaps()]
    ttft = [stream.ttft for stream in streams]
    late = [s for ask, s in zip(trace.asks, streams, strict=True) if ask.behind]
    early = [s for ask, s in zip(trace.asks, streams, strict=True) if not ask.behind]
    during = [gap for one in late for s in early for gap in s.gaps(one.sent, one.sent + one.ttft)]
    cached = [s.cached_tokens for s in streams if s.cached_tokens is not None]
    return Measures(
        tokens=tokens,
        wall_s=wall,
        tok_s=tokens / wall,
        decode_tok_s=_while_all_run(streams),
        ttft_p50=percentile(ttft, 50),
        ttft_p99=percentile(ttft, 99),
        itl_p50=percentile(gaps, 50),
        itl_p99=percentile(gaps, 99),
        during_p50=percentile(during, 50),
        during_p99=percentile(during, 99),
        late_ttft=percentile([s.ttft for s in late], 50),
        cached_tokens=sum(cached) if cached else None,
    )


def summarize_stopped(trace: Trace, streams: Sequence[Stream], seconds: float) -> Measures:
    """Return the measures of a run that was stopped after ``seconds``: of what arrived by then.

    Latencies are of requests that have a token, so they are lower than those of a whole run.
    """
    for stream in streams:
        if not stream.finished:
            stream.output_tokens = stream.shown
    begun = [
        (ask, stream) for ask, stream in zip(trace.asks, streams, strict=True) if stream.arrivals
    ]
    if not begun:
        return replace(_NOTHING, wall_s=seconds)
    found = summarize(
        replace(trace, asks=tuple(ask for ask, _ in begun)), [one for _, one in begun]
    )
    return replace(found, wall_s=seconds, tok_s=found.tokens / seconds)


def _while_all_run(streams: Sequence[Stream]) -> float:
    """Return tokens per second from when every stream has a token to when the first one ends."""
    since = max(stream.arrivals[0][0] for stream in streams)
    until = min(stream.end for stream in streams)
    if until <= since:
        return math.nan
    inside = sum(tokens for s in streams for when, tokens in s.arrivals if since < when <= until)
    return inside / (until - since)


def check_fair(trace: Trace, streams: Sequence[Stream]) -> None:
    """Raise `Unfair` unless every prompt and every output has the requested number of tokens."""
    for number, (ask, stream) in enumerate(zip(trace.asks, streams, strict=True)):
        asked = (ask.prompt_tokens, ask.output)
        found = (stream.prompt_tokens, stream.output_tokens)
        if asked != found:
            raise Unfair(
                f"request {number} of {trace.name}: {asked} prompt and output tokens were asked"
                f" for, the server counts {found}"
            )


def median(runs: Sequence[Measures]) -> dict[str, float]:
    """Return the median of every measure over runs."""
    rows = [asdict(run) for run in runs]
    return {
        name: statistics.median(values)
        for name in rows[0]
        if (values := [row[name] for row in rows if row[name] is not None])
    }


def ratios(ours: Sequence[Measures], theirs: Sequence[Measures], name: str) -> list[float]:
    """Return ours / theirs of every run that both have; nan where theirs is 0."""
    pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(ours, theirs, strict=False)]
    return [a / b if b else math.nan for a, b in pairs]


def ratio(ours: Sequence[Measures], theirs: Sequence[Measures], name: str) -> float:
    """Return the median of `ratios`; nan without runs."""
    found = ratios(ours, theirs, name)
    return statistics.median(found) if found else math.nan


Results = Mapping[str, Mapping[str, Sequence[Measures]]]
"""Measures of each run, by trace and by side."""
