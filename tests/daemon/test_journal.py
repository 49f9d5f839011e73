"""The journal's file: records are read back after a death, damage or a full disk.

The file stays small.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from actors.request_journal import (
    ReportReceived,
    RequestDropped,
    RequestReceived,
    SavedChoice,
    SavedRequest,
)
from kvd.daemon import journal
from kvd.daemon.journal import DiskJournal
from kvd.host.journal_file import MARKER, JournalFile, frame
from protocol.errors import ConfigError
from protocol.parts import PartStart
from protocol.types import Sampling, TokenLogprob, Usage
from protocol.worker import (
    ChoiceFinished,
    RowAccepted,
    RowFinished,
    RowPrompt,
    RowTokens,
    Submit,
)

MIB = 1024 * 1024


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


CALL = PartStart(3, "call", "look_up", "abcdefghi")


def end_of_choices(rid: str) -> ReportReceived:
    report = ChoiceFinished(rid=rid, choice=1, reason="stop", usage=Usage(1, 2))
    return ReportReceived(rid, report)


class JumpingClock(Clock):
    """Advances by an hour at each reading, as a clock that is being set."""

    def __call__(self) -> float:
        self.now += 3600.0
        return self.now


def opened(folder: Path, clock: Clock | None = None, **more: float) -> DiskJournal:
    limit = int(more.pop("limit_bytes", 64 * MIB))
    return DiskJournal(folder, limit_bytes=limit, keep_s=600.0, clock=clock or Clock())


def read(folder: Path, clock: Clock | None = None) -> dict[str, SavedRequest]:
    found = opened(folder, clock)
    found.close()
    return found.saved


def ask(rid: str, **more: object) -> RequestReceived:
    return RequestReceived(
        rid, "m", Submit(rid=rid, prompt="hé", sampling=Sampling(seed=3), **more)
    )


def tokens(rid: str, index: int, *said: int, text: str = "", choice: int = 0) -> ReportReceived:
    report = RowTokens(rid=rid, index=index, tokens=list(said), text=text, choice=choice)
    return ReportReceived(rid, report)


def end(rid: str) -> ReportReceived:
    return ReportReceived(rid, RowFinished(rid=rid, reason="stop", usage=Usage(1, 2)))


def test_all_records_are_read_back(tmp_path: Path) -> None:
    first = opened(tmp_path)
    reported = TokenLogprob(5, "a", -1.0)
    for record in (
        ask("a", n=2, logprobs=0),
        ReportReceived("a", RowAccepted(rid="a", prompt_tokens=9)),
        ReportReceived("a", RowPrompt(rid="a", index=0, logprobs=[reported, reported])),
        tokens("a", 0, 5, 6, text="é"),
        tokens("a", 0, 7, choice=1),
        ReportReceived("a", RowTokens(rid="a", index=2, tokens=[8], text="!", logprobs=[reported])),
        ReportReceived("a", RowTokens(rid="a", index=3, tokens=[], text="", parts=[CALL])),
        ReportReceived("a", ChoiceFinished(rid="a", choice=1, reason="length")),
        ask("b"),
        end("b"),
        ask("c"),
        RequestDropped("c"),
        tokens("c", 0, 1),
    ):
        first.write(record)
    found = read(tmp_path)

    assert set(found) == {"a", "b"}
    assert found["a"].submit.sampling.seed == 3
    assert found["a"].prompt_tokens == 9
    assert found["a"].prompt_logprobs == [reported, reported]
    assert found["a"].choices[0] == SavedChoice([5, 6, 8], "é!", [reported], parts=[CALL])
    assert found["a"].choices[1] == SavedChoice([7], "", [], "length")
    assert found["b"].end is not None
    assert (tmp_path / "requests").stat().st_mode & 0o777 == 0o600


def test_time_without_a_daemon_counts_toward_a_deadline(tmp_path: Path) -> None:
    clock = Clock()
    opened(tmp_path, clock).write(ask("a", deadline_s=60.0))
    clock.now += 25

    assert read(tmp_path, clock)["a"].deadline_s == 35.0
    clock.now += 5
    assert read(tmp_path, clock)["a"].deadline_s == 30.0


def test_records_of_ended_requests_are_removed_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "LEAST_DEAD_BYTES", 2000)
    clock = Clock()
    subject = opened(tmp_path, clock)
    subject.write(ask("kept"))
    for number in range(500):
        rid = f"r{number}"
        subject.write(ask(rid))
        subject.write(tokens("kept", number, number))
        subject.write(RequestDropped(rid) if number % 2 else end(rid))
        clock.now += 100.0  # an ended request is kept for ten minutes
        live = sum(kept.nbytes for kept in subject._kept.values())
        assert subject._live == live
        size = (tmp_path / "requests").stat().st_size
        assert size <= 2 * live + 2500
    assert len(subject._kept) <= 5
    subject.close()

    found = read(tmp_path, clock)
    assert found["kept"].choices[0].tokens == list(range(500))
    assert len(found) <= 5


def test_a_clock_that_jumps_while_an_end_is_written(tmp_path: Path) -> None:
    subject = opened(tmp_path, JumpingClock())
    assert subject.write(ask("a"))
    assert subject.write(end("a"))
    assert subject.write(ask("b"))
    assert subject._kept.keys() == {"b"}
    assert not subject._ended
    subject.close()
    assert read(tmp_path).keys() == {"a", "b"}  # this clock reads the time before the end


def test_a_clock_that_is_set_back(tmp_path: Path) -> None:
    clock = Clock()
    clock.now = 50_000.0
    subject = opened(tmp_path, clock)
    for record in (ask("a"), end("a"), ask("b"), end("b"), ask("c", deadline_s=60.0)):
        subject.write(record)
    clock.now = 1000.0
    assert read(tmp_path, clock)["c"].deadline_s == 60.0

    subject.write(tokens("c", 0, 1))
    assert subject._kept.keys() == {"a", "b", "c"}
    clock.now += 601.0  # ended requests expire as if they had ended when the clock was set back
    subject.write(tokens("c", 1, 2))
    assert subject._kept.keys() == {"c"}
    subject.close()


def test_requests_beyond_the_files_limit_are_not_kept(tmp_path: Path) -> None:
    subject = opened(tmp_path, limit_bytes=2000)
    confirmed: dict[str, list[int]] = {}
    for number in range(100):
        rid = f"r{number}"
        if subject.write(ask(rid)):
            confirmed[rid] = [1] if subject.write(tokens(rid, 0, 1)) else []
        assert (tmp_path / "requests").stat().st_size <= 2000
    subject.close()

    assert 5 < len(confirmed) < 20
    found = {rid: one.choices[0].tokens for rid, one in read(tmp_path).items()}
    assert found == confirmed


def test_finished_requests_make_room_for_running_ones(tmp_path: Path) -> None:
    subject = opened(tmp_path, limit_bytes=6000)
    assert subject.write(ask("kept"))
    for number in range(50):
        rid = f"r{number}"
        assert subject.write(ask(rid))
        assert subject.write(end(rid))
        if number % 5 == 0:
            assert subject.write(tokens("kept", number // 5, number))
        assert (tmp_path / "requests").stat().st_size <= 6000
    assert subject._live == sum(kept.nbytes for kept in subject._kept.values())
    count = len(subject._kept)
    assert not subject.write(ask("long", stop=["x" * 7000]))  # can never fit: drops nothing
    assert len(subject._kept) == count
    subject.close()

    found = read(tmp_path)
    assert found.pop("kept").choices[0].tokens == list(range(0, 50, 5))
    assert list(found) == [f"r{number}" for number in range(50 - len(found), 50)]
    assert 5 < len(found) < 40


class SlowDisk:
    """Runs work of the disk when it is waited for."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[None], Callable[[], None]]] = []

    def __call__(self, work: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self.waiting.append((future, work))
        return future

    def finish(self) -> None:
        while self.waiting:
            future, work = self.waiting.pop(0)
            work()
            future.set_result(None)


def fill(subject: DiskJournal, kept: int, dropped: int) -> None:
    """Write requests that stay, and others that do not."""
    for number in range(kept + dropped):
        assert subject.write(ask(f"r{number}"))
        assert subject.write(tokens(f"r{number}", 0, number))
    for number in range(kept, kept + dropped):
        assert subject.write(RequestDropped(f"r{number}"))


def test_a_compaction_never_reads_the_whole_file_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "LEAST_DEAD_BYTES", 100_000)
    monkeypatch.setattr(journal, "STEP_BYTES", 2000)
    disk = SlowDisk()
    subject = DiskJournal(tmp_path, limit_bytes=64 * MIB, keep_s=600.0, clock=Clock(), run=disk)
    fill(subject, 300, 800)
    before = subject._file
    reads: list[int] = []
    frames = JournalFile.frames

    def counted(file: JournalFile, at: int, stop: int) -> Iterator[tuple[bytes | None, int]]:
        reads.append(stop - at)
        return frames(file, at, stop)

    monkeypatch.setattr(JournalFile, "frames", counted)
    index = 1
    while not disk.waiting:
        # Records of all kinds while the file is rewritten: none may be lost, or come back.
        rid = f"r{index % 300}"
        assert subject.write(tokens(rid, 1, 5000) if index < 300 else ask(f"s{index}"))
        if index in {50, 100}:
            assert subject.write(RequestDropped(rid))
        index += 1
    assert min(len(reads), index) > 101
    assert max(reads) <= 2000
    assert subject._file is before  # the disk has not confirmed the new file
    assert subject.write(tokens("r0", 1, 6000))
    assert subject._file is before
    disk.finish()
    assert subject.write(tokens("r0", 2, 7000))
    assert subject._file is not before
    assert not (tmp_path / "requests.new").exists()
    assert subject._live == sum(kept.nbytes for kept in subject._kept.values())
    subject.close()

    found = read(tmp_path)
    assert found.keys() == subject._kept.keys()
    assert found["r0"].choices[0].tokens == [0, 6000, 7000]
    assert found["r1"].choices[0].tokens == [1, 5000]
    assert not found.keys() & {"r50", "r100", "r300"}


@pytest.mark.parametrize("ended", [end, end_of_choices])
def test_an_ended_request_expires_also_if_its_last_report_is_missing(
    tmp_path: Path, ended: Callable[[str], ReportReceived]
) -> None:
    clock = Clock()
    subject = opened(tmp_path, clock)
    for record in (ask("a", n=2), ended("a"), ask("b")):
        assert subject.write(record)
    subject.close()  # the daemon is killed
    clock.now += 599.0
    found = read(tmp_path, clock)
    assert found.keys() == {"a", "b"}
    assert found["a"].end == RowFinished(rid="a", reason="stop", usage=Usage(1, 2))
    clock.now += 2.0
    assert read(tmp_path, clock).keys() == {"b"}


@pytest.mark.parametrize(
    "late", [end("a"), ReportReceived("a", RowAccepted(rid="a", prompt_tokens=9))]
)
def test_a_request_that_a_worker_still_reports_on_does_not_expire(
    tmp_path: Path, late: ReportReceived
) -> None:
    """Its worker died after the last choice ended, and the next one took long to load."""
    clock = Clock()
    subject = opened(tmp_path, clock)
    for record in (ask("a", n=2), end_of_choices("a")):
        assert subject.write(record)
    clock.now += 601.0
    assert subject.write(late)
    assert subject.write(end("a"))
    subject.close()
    assert read(tmp_path, clock).keys() == {"a"}


class Unconfirmed(Future[None]):
    """What the disk has not confirmed. Waiting for it would block the event loop."""

    def result(self, timeout: float | None = None) -> None:
        assert self.done(), "a write waits for the disk"
        super().result(timeout)


def test_at_the_limit_no_write_finishes_a_compaction_or_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "STEP_BYTES", 500)
    monkeypatch.setattr(journal, "STEP_RATIO", 1)  # the file is full before a compaction ends
    monkeypatch.setattr(journal, "MAX_STEP_BYTES", 2000, raising=False)
    synced = Unconfirmed()
    limit = 60_000
    subject = DiskJournal(
        tmp_path, limit_bytes=limit, keep_s=600.0, clock=Clock(), run=lambda work: synced
    )
    reads: list[int] = []
    frames = JournalFile.frames

    def counted(file: JournalFile, at: int, stop: int) -> Iterator[tuple[bytes | None, int]]:
        reads.append(stop - at)
        return frames(file, at, stop)

    monkeypatch.setattr(JournalFile, "frames", counted)
    old, refused = subject._file, 0
    for number in range(1000):
        refused += not subject.write(ask(f"r{number}"))
        subject.write(end(f"r{number}"))
        assert subject._file is old
        assert (tmp_path / "requests").stat().st_size <= limit
    assert refused > 0
    assert 0 < max(reads) <= 2000

    synced.set_result(None)
    assert subject.write(ask("next"))
    assert subject._file is not old
    subject.close()
    found = read(tmp_path)
    assert "next" in found
    assert found.keys() == subject._kept.keys()


def test_a_compaction_catches_up_with_large_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "LEAST_DEAD_BYTES", 20_000)
    monkeypatch.setattr(journal, "STEP_BYTES", 500)
    monkeypatch.setattr(journal, "MAX_STEP_BYTES", 1000)
    subject, old = opened(tmp_path, limit_bytes=400_000), None
    for number in range(60):
        request = msgspec.structs.replace(ask(f"r{number}").submit, prompt="x" * 5000)
        assert subject.write(RequestReceived(f"r{number}", "m", request))
        old = old or subject._file
        subject.write(RequestDropped(f"r{number}"))
    assert subject._file is not old
    subject.close()


def test_damage_that_a_compaction_finds_ends_the_journaling_of_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "LEAST_DEAD_BYTES", 20_000)
    monkeypatch.setattr(journal, "STEP_BYTES", MIB)
    subject = opened(tmp_path)
    for record in (ask("a"), tokens("a", 0, 1), tokens("a", 1, 2), ask("b")):
        assert subject.write(record)
    path = tmp_path / "requests"
    starts = [found.start() for found in re.finditer(re.escape(MARKER), path.read_bytes())]
    with path.open("r+b") as file:
        file.seek(starts[2] + 30)
        file.write(b"?")
    for number in range(200):
        assert subject.write(ask(f"r{number}"))
        assert subject.write(RequestDropped(f"r{number}"))
    assert (tmp_path / "requests.damaged").exists()
    assert not subject.write(tokens("a", 2, 3))  # the next daemon computes it again
    assert subject.write(tokens("b", 0, 4))
    assert subject._live == sum(kept.nbytes for kept in subject._kept.values())
    subject.close()
    found = read(tmp_path)
    assert [found[rid].choices[0].tokens for rid in "ab"] == [[1], [4]]


def test_the_room_of_an_unfinished_compaction_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "LEAST_DEAD_BYTES", 20_000)
    monkeypatch.setattr(journal, "STEP_BYTES", 2000)
    subject = opened(tmp_path)
    fill(subject, 30, 200)
    assert subject.write(ask("a"))
    new = tmp_path / "requests.new"
    assert new.exists()
    whole = os.pwrite

    def full(fd: int, data: bytes, at: int) -> int:
        if new.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(fd, data, at)

    with monkeypatch.context() as disk, capture_logs() as log:
        disk.setattr(os, "pwrite", full)
        assert subject.write(tokens("a", 0, 1))
    assert [line["event"] for line in log] == ["the journal cannot be compacted"]
    subject.close()
    new.write_bytes(b"left by a daemon that was killed")
    assert read(tmp_path)["a"].choices[0].tokens == [1]
    assert not new.exists()


def test_a_clock_that_is_set_back_does_not_stop_compactions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "LEAST_DEAD_BYTES", 20_000)
    monkeypatch.setattr(journal, "STEP_BYTES", MIB)
    clock = Clock()
    clock.now = 100_000.0
    subject = opened(tmp_path, clock)

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", fails)
        fill(subject, 1, 200)
        subject.write(ask("a"))
    size = (tmp_path / "requests").stat().st_size
    clock.now += 30.0
    subject.write(ask("b"))
    assert (tmp_path / "requests").stat().st_size > size  # not again within a minute
    clock.now -= 50_000.0
    subject.write(ask("c"))
    assert (tmp_path / "requests").stat().st_size < size / 10
    subject.close()


def test_a_record_that_cannot_be_applied_is_reported_once(tmp_path: Path) -> None:
    first = opened(tmp_path)
    for record in (ask("a"), tokens("a", 0, 1), tokens("a", 0, 2, choice=7), tokens("a", 1, 3)):
        first.write(record)
    first.close()
    warnings = []
    for _ in range(2):
        with capture_logs() as log:
            assert read(tmp_path)["a"].choices[0].tokens == [1]
        warnings += [line for line in log if line["log_level"] == "warning"]
    assert len(warnings) == 1
    assert warnings[0]["records"] == 1
    assert (tmp_path / "requests.damaged").exists()


def test_after_a_failed_write_only_that_request_is_no_longer_journaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = opened(tmp_path)
    assert subject.write(ask("a"))
    assert subject.write(ask("b"))
    whole = os.pwrite

    def full(fd: int, data: bytes, at: int) -> int:
        whole(fd, data[:5], at)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert not subject.write(tokens("a", 0, 1))
    assert not subject.write(ask("c"))
    monkeypatch.setattr(os, "pwrite", whole)
    # A report after a missing one is not written: the next daemon computes its tokens again.
    assert not subject.write(tokens("a", 1, 2))
    assert not subject.write(tokens("c", 0, 3))
    assert subject.write(tokens("b", 0, 3))
    subject.close()

    found = read(tmp_path)
    assert {rid: one.choices[0].tokens for rid, one in found.items()} == {"a": [], "b": [3]}


def test_a_full_disk_does_not_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(tmp_path)
    for record in (ask("a"), tokens("a", 0, 1), ask("b"), RequestDropped("b")):
        first.write(record)
    first.close()
    whole = (tmp_path / "requests").read_bytes()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", full)
        second = opened(tmp_path)
        assert second.saved["a"].choices[0].tokens == [1]
        assert not second.write(ask("c"))
        assert (tmp_path / "requests").read_bytes() == whole
    assert second.write(tokens("a", 1, 2))  # there is room again
    assert second.write(ask("d"))
    second.close()
    found = read(tmp_path)
    assert set(found) == {"a", "d"}
    assert found["a"].choices[0].tokens == [1, 2]


def test_a_disk_without_room_for_the_file_does_not_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", full)
    subject = opened(tmp_path)
    assert not subject.saved
    assert not subject.write(ask("a"))
    subject.close()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "zeros at the end": lambda data: data + bytes(4096),
    "zeros at a record boundary": lambda data: data.replace(MARKER, bytes(16) + MARKER, 3),
    "a torn record": lambda data: data[:-3],
    "an unknown kind of record": lambda data: data + frame(b"\x82\xa1t\xa3new\xa3rid\xa1a"),
    "a record of other fields": lambda data: data + frame(b"\x82\xa1t\xa6report\xa3rid\x01"),
    "an empty record": lambda data: data + frame(b""),
    "MessagePack without an end": lambda data: data + frame(b"\x91" * 100_000),
    "an earlier format": lambda _: b"kvd journal 2\n" + bytes(8),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_never_stops_the_start(kind: str, tmp_path: Path) -> None:
    first = opened(tmp_path)
    for record in (ask("a"), ask("b"), tokens("a", 0, 1), tokens("b", 0, 2), tokens("a", 1, 3)):
        first.write(record)
    first.close()
    path = tmp_path / "requests"
    path.write_bytes(damaged := DAMAGE[kind](path.read_bytes()))

    with capture_logs() as log:
        second = opened(tmp_path)
    [warning] = [line for line in log if line["log_level"] == "warning"]
    assert warning["bytes"] > 0
    copy = tmp_path / "requests.damaged"
    assert copy.read_bytes() == damaged
    assert copy.stat().st_mode & 0o777 == 0o600
    assert second.write(ask("c"))
    second.close()
    with capture_logs() as log:
        third = read(tmp_path)
    assert not [line for line in log if line["log_level"] == "warning"]
    expected = {"a": [1, 3], "b": [2], "c": []}
    if kind == "a torn record":
        expected["a"] = [1]
    if kind == "an earlier format":
        expected = {"c": []}
    assert {rid: one.choices[0].tokens for rid, one in third.items()} == expected


def test_a_flipped_bit_costs_one_record(tmp_path: Path) -> None:
    first = opened(tmp_path)
    rids = [f"r{number}" for number in range(16)]
    for rid in rids:
        first.write(ask(rid))
    for at in range(4):
        for rid in rids:
            first.write(tokens(rid, at, at))
    first.close()
    path = tmp_path / "requests"
    whole = path.read_bytes()
    starts = [found.start() for found in re.finditer(re.escape(MARKER), whole)]
    for start, bit in ((starts[16 + 5], 0), (starts[16 + 5] + 9, 3), (starts[16 + 5] + 40, 7)):
        data = bytearray(whole)
        data[start] ^= 1 << bit  # in the marker, in the length, in the payload
        path.write_bytes(data)
        with capture_logs() as log:
            found = read(tmp_path)
        assert found.keys() == set(rids)
        for rid, one in found.items():  # reports after the damaged one are not used
            assert one.choices[0].tokens == ([] if rid == "r5" else [0, 1, 2, 3])
        [warning] = [line for line in log if line["log_level"] == "warning"]
        assert (warning["records"], warning["bytes"]) == (1, starts[22] - starts[21])
        assert (tmp_path / "requests.damaged").read_bytes() == data


def test_a_damaged_report_and_its_replacement_are_never_both_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(tmp_path)
    for record in (ask("a"), tokens("a", 0, 1), tokens("a", 1, 2), tokens("a", 2, 3)):
        first.write(record)
    first.close()
    path = tmp_path / "requests"
    whole = path.read_bytes()
    starts = [found.start() for found in re.finditer(re.escape(MARKER), whole)]
    data = bytearray(whole)
    data[starts[2] + 30] ^= 1
    path.write_bytes(data)

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", fails)  # so that the damaged report stays in the file
        second = opened(tmp_path)
        assert second.saved["a"].choices[0].tokens == [1]
        assert second.write(tokens("a", 1, 2, 3, 4))
        second.close()
    repaired = bytearray(path.read_bytes())
    repaired[starts[2] + 30] ^= 1
    assert read(tmp_path)["a"].choices[0].tokens == [1, 2, 3, 4]
    path.write_bytes(repaired)
    assert read(tmp_path)["a"].choices[0].tokens == [1, 2, 3]


def test_a_folder_that_cannot_be_created_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file")
    with pytest.raises(ConfigError, match="journal"):
        opened(tmp_path / "journal")
