"""Unsent reports to the daemon: merged, never lost, never reordered.

The worker does not wait for the daemon. Reports that could not be sent yet are merged:

* tokens of one completion become one report;
* counters, phases, load progress and queue positions replace older ones;
* of several preemptions and resumptions of a request, only the last ones stay.

The size of the outbox is therefore bounded by the requests themselves. Per request it holds at most
an acceptance, a queue position, the prompt's logprobs, the tokens and the end of each completion,
one preemption and one resumption. Reports of one completion, and those of a request itself, stay in
order. The order between completions, or between tokens and preemptions, has no meaning.

Pure: uses no socket and no clock. `put` reports, `take` bytes to write.
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
    """A queue whose entries may change until they are taken."""

    def __init__(self) -> None:
        self._numbers = count()
        self._waiting: dict[int, Report] = {}
        """Unsent reports by number, oldest first. A merged report keeps its number."""
        self._last: dict[_Key, int] = {}
        """Number of the newest unsent report of each key, for reports that can be merged."""

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, report: Report) -> None:
        """Queue a report, or merge it into an unsent one."""
        match report:
            case Stats() | Progress() | PhaseChanged() | RowQueued():
                self._replace(report)
            case RowPreempted() | RowResumed():
                self._replace_preemption(report)
            case RowTokens():
                self._merge_tokens(report)
            case _:
                self._append(report)

    def _append(self, report: Report) -> int:
        number = next(self._numbers)
        self._waiting[number] = report
        return number

    def _replace(self, report: Stats | Progress | PhaseChanged | RowQueued) -> None:
        key = _key_of(report)
        assert key is not None, "only reports with a key are replaced"
        number = self._last.get(key)
        if number is None:
            self._last[key] = self._append(report)
        else:
            self._waiting[number] = report

    def _replace_preemption(self, report: RowPreempted | RowResumed) -> None:
        """Queue a preemption or resumption so that the two of a request still alternate."""
        key = (report.rid, type(report))
        other = (report.rid, RowResumed if isinstance(report, RowPreempted) else RowPreempted)
        number, later = self._last.get(key), self._last.get(other)
        if number is None:
            self._last[key] = self._append(report)
            return
        self._waiting[number] = report
        if later is not None and later > number:  # this report undoes the later one
            del self._waiting[later]
            del self._last[other]

    def _merge_tokens(self, report: RowTokens) -> None:
        key = (report.rid, report.choice)
        number = self._last.get(key)
        earlier = None if number is None else self._waiting[number]
        if number is None or not isinstance(earlier, RowTokens):
            logprobs = None if report.logprobs is None else list(report.logprobs)
            copy = msgspec.structs.replace(report, tokens=list(report.tokens), logprobs=logprobs)
            self._last[key] = self._append(copy)
            return
        end = earlier.index + len(earlier.tokens)
        if report.index != end:
            raise LocalProtocolError(
                f"row {report.rid}: tokens from {report.index} follow those from {earlier.index}"
                f" to {end}"
            )
        earlier.tokens.extend(report.tokens)  # the outbox's own list: extending it copies nothing
        if earlier.logprobs is not None:
            earlier.logprobs.extend(report.logprobs or ())
        joined = msgspec.structs.replace(earlier, text=earlier.text + report.text)
        self._waiting[number] = joined

    def take(self, at_least: int) -> bytes:
        """Remove the oldest reports; return at least this many bytes of frames, if there are."""
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
        assert len(keyed) == len(set(keyed)), "two reports should have been merged"


_Key = type | tuple[str, int] | tuple[str, type]
"""A kind of report, a choice of a request, or a kind of report of one request."""


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
