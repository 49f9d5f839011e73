"""Reports on their way to the daemon: merged while they wait, never lost, never reordered.

The worker does not wait for the daemon. What it could not send yet is merged: the tokens of a
completion into one report, newer counters, phases, load progress and places in the queue in the
place of older ones; of parking and going on only the last of each is told. So what waits is bounded
by the requests themselves: for each at most an acceptance, a place in the queue, the logprobs of
its prompt, the tokens of its completions and their ends, and that it was parked and went on. The
order of one completion's reports is kept, and that of the request's own; that between completions,
or between their tokens and parking, means nothing.

Pure: knows no socket and no clock. `put` reports, `take` bytes to write.
"""

from __future__ import annotations

from itertools import count

import msgspec

from protocol.errors import LocalProtocolError
from protocol.framing import encode_frame
from protocol.worker import (
    PhaseChanged,
    Progress,
    Report,
    RowPreempted,
    RowQueued,
    RowResumed,
    RowTokens,
    Stats,
)


class Outbox:
    """A queue whose entries may still change until they are taken."""

    def __init__(self) -> None:
        self._numbers = count()
        self._waiting: dict[int, Report] = {}
        """By number, oldest first; a merge keeps the place."""
        self._last: dict[_Key, int] = {}
        """The waiting tokens of each completion, and what may be replaced."""

    def __len__(self) -> int:
        """Return how many reports wait."""
        return len(self._waiting)

    def put(self, report: Report) -> None:
        """Queue a report, or merge it into one that waits."""
        match report:
            case Stats() | Progress() | PhaseChanged() | RowQueued():
                self._replace(report)
            case RowPreempted() | RowResumed():
                self._turn(report)
            case RowTokens():
                self._join(report)
            case _:
                self._append(report)

    def _append(self, report: Report) -> int:
        number = next(self._numbers)
        self._waiting[number] = report
        return number

    def _replace(self, report: Stats | Progress | PhaseChanged | RowQueued) -> None:
        key = _key_of(report)
        assert key is not None, "only what has a key is replaced"
        number = self._last.get(key)
        if number is None:
            self._last[key] = self._append(report)
        else:
            self._waiting[number] = report

    def _turn(self, report: RowPreempted | RowResumed) -> None:
        """Queue that a request was parked or goes on; what waits of it stays in turns."""
        key = (report.rid, type(report))
        other = (report.rid, RowResumed if isinstance(report, RowPreempted) else RowPreempted)
        number, after = self._last.get(key), self._last.get(other)
        if number is None:
            self._last[key] = self._append(report)
            return
        self._waiting[number] = report
        if after is not None and after > number:  # it was undone since: that is over
            del self._waiting[after]
            del self._last[other]

    def _join(self, report: RowTokens) -> None:
        key = (report.rid, report.choice)
        number = self._last.get(key)
        earlier = None if number is None else self._waiting[number]
        if number is None or not isinstance(earlier, RowTokens):
            told = None if report.logprobs is None else list(report.logprobs)
            ours = msgspec.structs.replace(report, tokens=list(report.tokens), logprobs=told)
            self._last[key] = self._append(ours)
            return
        if report.index != earlier.index + len(earlier.tokens):
            raise LocalProtocolError(
                f"row {report.rid}: tokens from {report.index} follow those from {earlier.index}"
                f" to {earlier.index + len(earlier.tokens)}"
            )
        earlier.tokens.extend(report.tokens)  # a list of ours, so that a long wait costs no copies
        if earlier.logprobs is not None:
            earlier.logprobs.extend(report.logprobs or ())
        joined = msgspec.structs.replace(earlier, text=earlier.text + report.text)
        self._waiting[number] = joined

    def take(self, at_least: int) -> bytes:
        """Remove the oldest reports, as frames of that many bytes or all that there are."""
        frames = []
        size = 0
        while self._waiting and size < at_least:
            number, report = next(iter(self._waiting.items()))
            del self._waiting[number]
            key = _key_of(report)
            if key is not None and self._last[key] == number:
                del self._last[key]
            frames.append(encode_frame(report))
            size += len(frames[-1])
        return b"".join(frames)

    def check(self) -> None:
        """Assert the invariants; tests call it after every event."""
        assert list(self._waiting) == sorted(self._waiting)
        newest = {
            key: number
            for number, report in self._waiting.items()
            if (key := _key_of(report)) is not None
        }
        assert newest == self._last
        keyed = [key for report in self._waiting.values() if (key := _key_of(report)) is not None]
        assert len(keyed) == len(set(keyed)), "two wait that should be one"


_Key = type | tuple[str, int] | tuple[str, type]
"""A kind that is replaced, a completion, or such a kind of one request."""


def _key_of(report: Report) -> _Key | None:
    match report:
        case Stats() | Progress() | PhaseChanged():
            return type(report)
        case RowQueued() | RowPreempted() | RowResumed():
            return (report.rid, type(report))
        case RowTokens():
            return (report.rid, report.choice)
        case _:
            return None
