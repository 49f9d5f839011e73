"""Random faults of the disk under a journal, against a model of what was written.

The journal always opens. It restores each request up to its first damaged record, without a wrong
token. It loses no record that `write` confirmed and that is intact on the disk.

Run more of it by hand: ``python -m tests.daemon.test_journal_campaign MINUTES [--json FILE]``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from structlog.testing import capture_logs

from actors.request_journal import (
    Record,
    ReportReceived,
    RequestDropped,
    RequestReceived,
    SavedRequest,
)
from kvd.daemon import journal
from kvd.daemon.journal import DiskJournal
from kvd.host.journal_file import MARKER, Damage, frame
from protocol.types import Sampling, TokenLogprob, Usage
from protocol.worker import RowFinished, RowTokens, Submit
from tests.daemon.disk import PAGE, Disk, Killed

KEEP_S = 600.0
DROP_BYTES = 60
"""More than the record of a dropped request has; it is written at the limit, too."""
COUNTS: Counter[str] = Counter()
"""Faults and checks of all examples in this process."""


@dataclass
class Written:
    """A record that `write` confirmed."""

    frame: bytes
    tokens: int
    """Tokens of the request up to this record."""
    ends: bool = False
    intact: bool = True


@dataclass
class Request:
    """One request: the records written for it, and the state that its client saw."""

    records: list[Written] = field(default_factory=list)
    tokens: int = 0
    """Tokens that its client has."""
    ended: bool = False
    ended_at: float | None = None
    """When it ended; a lost end may come back with an old file."""
    first_ended_at: float | None = None
    """When it ended for the first time, if a fault then lost that end, and an old file has it."""
    dropped: bool = False
    may_return: bool = False
    """Whether it may be restored although it was dropped."""
    may_vanish: bool = False
    """Whether its drop failed. That record may be on the disk, and show after a power loss."""


class SlowWork(Future[None]):
    """Work of the disk that ends before some check, or when it is waited for."""

    def __init__(self, work: Callable[[], None], random: Random) -> None:
        super().__init__()
        self._work, self._random = work, random

    def done(self) -> bool:
        if not super().done() and self._random.random() < 0.3:
            self._end()
        return super().done()

    def result(self, timeout: float | None = None) -> None:
        if not super().done():
            self._end()
        super().result(timeout)

    def _end(self) -> None:
        try:
            self._work()
        except OSError as error:
            self.set_exception(error)
        else:
            self.set_result(None)


def text_of(rid: str, count: int) -> str:
    return "".join(f"{rid}:{at}é " for at in range(count))


class Campaign(RuleBasedStateMachine):
    """One disk and the daemons that run on it, one after another."""

    @initialize(number=st.integers(0, 2**32), limit=st.sampled_from([2500, 1 << 20]))
    def begin(self, number: int, limit: int) -> None:
        self.random, self.limit = Random(number), limit
        self.disk = Disk(self.random)
        self.now, self.serial = 1000.0, 0
        self.largest = limit + DROP_BYTES
        """Bytes of the largest file so far; only faults make it larger than the limit."""
        self.requests: dict[str, Request] = {}
        self.alive: list[str] = []
        """Requests that the running daemon has."""
        self.subject = self.opened()

    # -- a daemon at work ---------------------------------------------------------------------

    @rule(times=st.integers(1, 30))
    def work(self, times: int) -> None:
        for _ in range(times):
            chance = self.random.random()
            if chance < 0.2 or not self.alive:
                self.submit()
            elif chance < 0.9:
                self.report(self.random.choice(self.alive))
            elif chance < 0.95:
                self.finish(self.random.choice(self.alive))
            else:
                self.drop(self.alive.pop(self.random.randrange(len(self.alive))))

    def submit(self) -> None:
        rid = f"r{len(self.requests)}"
        # Until `write` confirms it, a client has no name to attach by, but it may be in the file.
        request = self.requests[rid] = Request(dropped=True, may_return=True)
        submit = Submit(rid=rid, prompt="p" * self.random.randrange(80), sampling=Sampling(seed=1))
        if self.write(RequestReceived(rid, "m", submit)):
            self.alive.append(rid)
            request.dropped = request.may_return = False
            request.records.append(Written(self.disk.newest_write, 0))

    def report(self, rid: str) -> None:
        request = self.requests[rid]
        if request.ended:
            return
        first, request.tokens = request.tokens, request.tokens + self.random.randrange(1, 5)
        self.serial += 1  # a record written again, after the first one was lost, is another one
        report = RowTokens(
            rid=rid,
            index=first,
            tokens=list(range(first, request.tokens)),
            text=text_of(rid, request.tokens)[len(text_of(rid, first)) :],
            logprobs=[TokenLogprob(self.serial, "", 0.0)],
        )
        if self.write(ReportReceived(rid, report)):
            request.records.append(Written(self.disk.newest_write, request.tokens))

    def finish(self, rid: str) -> None:
        request = self.requests[rid]
        if not request.ended:
            request.ended, request.ended_at = True, self.now
            if request.first_ended_at is None:
                request.first_ended_at = self.now
            self.serial += 1  # as in `report`: an end written again is another record
            usage = Usage(1, request.tokens, cached_tokens=self.serial)
            report = RowFinished(rid=rid, reason="length", usage=usage)
            if self.write(ReportReceived(rid, report)):
                request.records.append(Written(self.disk.newest_write, request.tokens, ends=True))

    def drop(self, rid: str) -> None:
        request = self.requests[rid]
        request.dropped = request.may_return = request.may_vanish = True
        request.may_return = request.may_vanish = not self.write(RequestDropped(rid))

    @rule(seconds=st.sampled_from([30.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # -- faults while it works ----------------------------------------------------------------

    @rule(room=st.none() | st.integers(0, 600))
    def fill_the_disk(self, room: int | None) -> None:
        COUNTS["full disk"] += room is not None
        self.disk.room = room

    @rule(
        failing=st.sets(
            st.sampled_from(["pwrite", "ftruncate", "fsync", "replace", "link", "unlink", "open"])
        )
    )
    def break_functions(self, failing: set[str]) -> None:
        COUNTS["failing calls"] += bool(failing)
        self.disk.failing = failing

    @rule()
    def repair(self) -> None:
        self.disk.room, self.disk.failing = None, set()

    @rule(calls=st.integers(0, 40))
    def kill(self, calls: int) -> None:
        """Kill the daemon within one of its next calls, at work or in the next start."""
        self.disk.calls_left = calls
        try:
            self.work(calls // 2 + 1)
        except Killed:
            COUNTS["killed in a write"] += 1
        calls_left = self.disk.calls_left
        self.disk.restart()
        self.disk.calls_left = max(0, calls_left) % 8
        try:
            self.subject = self.opened()
        except Killed:
            COUNTS["killed in a start"] += 1
            self.disk.restart()
            self.subject = self.opened()
        self.disk.calls_left = None

    # -- between two daemons ------------------------------------------------------------------

    @rule()
    def restart(self) -> None:
        self.subject.close()
        self.disk.restart()
        self.subject = self.opened()

    @rule()
    def lose_power(self) -> None:
        COUNTS["power loss"] += 1
        before = self.disk.content()
        durable = self.disk.durable_names.get("requests")
        on_disk = b"" if durable is None else durable.durable
        self.disk.lose_power()
        after = self.disk.content()
        self.largest = max(self.largest, len(after))  # zeros may follow the last record
        for request in self.requests.values():
            request.may_return = request.may_return or request.dropped
            for one in request.records:
                if one.frame in on_disk and one.frame in before:
                    assert one.frame in after, "a compaction lost a record that was on the disk"
        self.find_damage(before)
        self.subject = self.opened()

    @precondition(lambda self: "requests" in self.disk.names)
    @rule(
        kind=st.sampled_from(
            ["flip", "flip", "zeros", "tail", "cut", "insert", "page", "foreign", "all"]
        )
    )
    def damage(self, kind: str) -> None:
        COUNTS[kind] += 1
        self.subject.close()
        self.disk.restart()
        before, random = self.disk.content(), self.random
        inode = self.disk.names["requests"]
        data = bytearray(inode.data)
        at = random.randrange(len(data) + 1)
        if kind == "flip" and at < len(data):
            data[at] ^= random.choice([1, 2, 4, 8, 16, 32, 64, 128])
        elif kind == "zeros":
            data[at : at + 512] = bytes(len(data[at : at + 512]))
        elif kind == "tail":
            data += bytes(random.randrange(1, 5000))
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = random.randbytes(random.randrange(1, 40))
        elif kind == "page" and data:
            inode.unreadable.add(at // PAGE)
        elif kind == "foreign":
            records = [b"", b"\x81", b"\x82\xa1t\xa3new\xa3rid\xa2r0", b"\x91" * 5000, MARKER]
            data += frame(random.choice(records))
        elif kind == "all":
            data[:] = random.choice([b"kvd journal 2\n" + bytes(8), MARKER * 9, bytes(4096), b"?"])
        inode.damage(data)
        self.largest = max(self.largest, len(data))
        self.find_damage(before)
        self.subject = self.opened()

    # -- the oracle ---------------------------------------------------------------------------

    def write(self, record: RequestReceived | ReportReceived | RequestDropped) -> bool:
        before = self.size()
        try:
            written = self.subject.write(record)
        finally:
            self.largest = max(self.largest, self.size())
            for rid, request in self.requests.items():
                if request.ended and rid not in self.subject._kept:  # expired, or dropped for room
                    request.dropped = request.may_return = True
        # The end of a request is recorded also at the limit.
        if not isinstance(record, RequestDropped):
            assert self.size() <= max(before, self.limit), "the file exceeds its limit"
        kept = self.subject._kept.values()
        assert self.subject._live == sum(one.nbytes for one in kept), "live bytes are miscounted"
        COUNTS["records"] += written
        if written:
            assert self.disk.newest_write in self.disk.content(), "confirmed, and not in the file"
        return written

    def size(self) -> int:
        inode = self.disk.names.get("requests")
        return 0 if inode is None else len(inode.data)

    def find_damage(self, before: bytes) -> None:
        after = self.disk.content()
        for request in self.requests.values():
            request.may_return = request.may_return or request.dropped
            for one in request.records:
                if one.frame in before and one.frame not in after:
                    one.intact = False
                    COUNTS["records lost to faults"] += 1

    def opened(self) -> DiskJournal:
        before = self.disk.content()
        subject = DiskJournal(
            Path("/journal"),
            limit_bytes=self.limit,
            keep_s=KEEP_S,
            clock=lambda: self.now,
            files=self.disk,
            run=lambda work: SlowWork(work, self.random),
        )
        COUNTS["starts"] += 1
        if subject._file is None:
            assert self.disk.failing or self.disk.room == 0
            assert self.disk.content() == before
            self.alive = []
            return subject
        for rid, request in self.requests.items():
            self.check(rid, request, subject.saved.get(rid))
        assert subject.saved.keys() <= self.requests.keys()
        for record, data in subject._file.records(Damage()):
            if record.rid in subject.saved:
                self.note(self.requests[record.rid], record, data)
        self.alive = list(subject.saved)
        copy = self.disk.names.get("requests.damaged")
        assert copy is None or len(copy.data) <= self.largest
        return subject

    def note(self, request: Request, record: Record, data: bytes) -> None:
        """Remember a record of the file, also one that was written but not confirmed."""
        match record:
            case ReportReceived(report=RowTokens(index=index, tokens=tokens)):
                request.records.append(Written(data, index + len(tokens)))
            case ReportReceived():
                request.records.append(Written(data, request.tokens, ends=True))
            case _:
                request.records = [Written(data, 0)]

    def check(self, rid: str, request: Request, saved: SavedRequest | None) -> None:
        """Compare a request with what was written of it."""
        intact = 0
        while intact < len(request.records) and request.records[intact].intact:
            intact += 1
        ended_at = request.first_ended_at
        expired = ended_at is not None and ended_at + KEEP_S <= self.now
        if saved is None:
            gone = request.dropped or expired or request.may_vanish
            assert gone or not intact, f"{rid} is lost"
            request.dropped = True
            return
        assert not request.dropped or request.may_return, f"{rid} was dropped and is back"
        count, ends = len(saved.choices[0].tokens), saved.end is not None
        assert saved.choices[0].tokens == list(range(count))
        assert saved.choices[0].text == text_of(rid, count)
        assert not ends or request.ended_at is None or request.ended_at + KEEP_S >= self.now, (
            "expired"
        )
        if intact and not (request.dropped or expired):
            last = request.records[intact - 1]
            assert (count, ends) >= (last.tokens, last.ends), f"{rid}: intact records are lost"
            COUNTS["requests compared"] += 1
        # The daemon continues from what was restored.
        request.records, request.tokens, request.ended = [], count, ends
        request.dropped = request.may_return = False


def run(plan: settings, number: int) -> None:
    """Run examples with a journal that is compacted often."""
    with pytest.MonkeyPatch.context() as patch, capture_logs():
        patch.setattr(journal, "LEAST_DEAD_BYTES", 600)
        patch.setattr(journal, "STEP_BYTES", 100)
        patch.setattr(journal, "STEP_RATIO", 2)
        run_state_machine_as_test(seed(number)(Campaign), settings=plan)


def test_faults_of_the_disk_cost_only_what_they_damage() -> None:
    run(plan(examples=80, steps=40), 0)


def plan(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def main() -> None:
    """Run examples for so many minutes, each batch with another seed; write the counts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began, batch, each = time.process_time(), 0, 250
    while time.process_time() - began < 60 * options.minutes:
        run(plan(each, steps=60), batch)
        batch += 1
        found = {
            "command": f"python -m tests.daemon.test_journal_campaign {options.minutes:g}",
            "examples": batch * each,
            "cpu_s": round(time.process_time() - began),
            "counts": dict(sorted(COUNTS.items())),
        }
        text = json.dumps(found, indent=2) + "\n"
        if options.json is not None:
            options.json.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
