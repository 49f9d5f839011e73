"""Unsent reports to the daemon: merged, never lost, never reordered.

The worker does not wait for the daemon. Reports that could not be sent yet are merged:

* tokens of one completion at one precision level become one report;
* counters, phases, load progress and queue positions replace older ones;
* a second preemption of a request replaces the first one and the resumption between them, and
  likewise for resumptions.

The size of the outbox is therefore bounded by the requests themselves. Per request it holds at most
an acceptance, a queue position, a cache outcome, the prompt's logprobs, the tokens and the end of
each completion, one preemption and one resumption. Reports of one completion, and those of a
request itself, stay in order. The order between completions, or between tokens and preemptions, has
no meaning.
"""

from __future__ import annotations

from itertools import count

import msgspec

from protocol import worker as wire
from protocol.errors import LocalProtocolError
from protocol.framing import encode_frame


class Outbox:
    """A queue whose entries may change until they are taken."""

    def __init__(self) -> None:
        self._numbers = count()
        self._waiting: dict[int, wire.Report] = {}
        """Unsent reports by number, oldest first. A merged report keeps its number."""
        self._last: dict[_Key, int] = {}
        """Number of the newest unsent report of each key, for reports that can be merged."""

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, report: wire.Report) -> None:
        key = _key_of(report)
        number = None if key is None else self._last.get(key)
        if isinstance(report, wire.RowTokens):
            if number is not None and not self._same_level(report, number):
                number = None
            report = self._with_earlier_tokens(report, number)
        elif number is not None and isinstance(report, (wire.RowPreempted, wire.RowResumed)):
            self._remove_undone(report, number)
        if number is None:
            number = next(self._numbers)
            if key is not None:
                self._last[key] = number
        self._waiting[number] = report

    def _same_level(self, report: wire.RowTokens, number: int) -> bool:
        earlier = self._waiting[number]
        return isinstance(earlier, wire.RowTokens) and earlier.level == report.level

    def _remove_undone(self, report: wire.RowPreempted | wire.RowResumed, number: int) -> None:
        """Remove the unsent report that this one undoes, so that both kinds still alternate."""
        other = wire.RowResumed if isinstance(report, wire.RowPreempted) else wire.RowPreempted
        later = self._last.get((report.rid, other))
        if later is not None and later > number:
            del self._waiting[later]
            del self._last[report.rid, other]

    def _with_earlier_tokens(self, report: wire.RowTokens, number: int | None) -> wire.RowTokens:
        earlier = None if number is None else self._waiting[number]
        if not isinstance(earlier, wire.RowTokens):
            logprobs = None if report.logprobs is None else list(report.logprobs)
            return msgspec.structs.replace(
                report, tokens=list(report.tokens), parts=list(report.parts), logprobs=logprobs
            )
        end = earlier.index + len(earlier.tokens)
        if report.index != end:
            raise LocalProtocolError(
                f"row {report.rid}: tokens from {report.index} follow those from {earlier.index}"
                f" to {end}"
            )
        earlier.tokens.extend(report.tokens)  # the outbox's own lists: extending copies nothing
        earlier.parts.extend(report.parts)
        if earlier.logprobs is not None:
            earlier.logprobs.extend(report.logprobs or ())
        return msgspec.structs.replace(earlier, text=earlier.text + report.text)

    def take(self, at_least: int) -> bytes:
        """Remove the oldest reports; return at least this many bytes of frames, or all."""
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


_Key = type | tuple[str, int] | tuple[str, type]
"""A kind of report, a choice of a request, or a kind of report of one request."""


def _key_of(report: wire.Report) -> _Key | None:
    match report:
        case wire.Stats() | wire.Progress() | wire.PhaseChanged():
            return type(report)
        case wire.RowQueued() | wire.RowPreempted() | wire.RowResumed():
            return (report.rid, type(report))
        case wire.RowTokens():
            return (report.rid, report.choice)
        case _:
            return None
