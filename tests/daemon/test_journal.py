"""The journal on disk: what was written is read, however the daemon died; it stays small."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.request_journal import (
    ReportReceived,
    RequestDropped,
    RequestReceived,
    SavedChoice,
    SavedRequest,
)
from kvd.daemon import journal
from kvd.daemon.journal import MAGIC, DiskJournal
from protocol.errors import ConfigError
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


def test_all_that_was_heard_is_read_back(tmp_path: Path) -> None:
    first = opened(tmp_path)
    reported = TokenLogprob(5, "a", -1.0)
    for record in (
        ask("a", n=2, logprobs=0),
        ReportReceived("a", RowAccepted(rid="a", prompt_tokens=9)),
        ReportReceived("a", RowPrompt(rid="a", index=0, logprobs=[reported, reported])),
        tokens("a", 0, 5, 6, text="é"),
        tokens("a", 0, 7, choice=1),
        ReportReceived("a", RowTokens(rid="a", index=2, tokens=[8], text="!", logprobs=[reported])),
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
    assert found["a"].choices[0] == SavedChoice([5, 6, 8], "é!", [reported])
    assert found["a"].choices[1] == SavedChoice([7], "", [], "length")
    assert found["b"].end is not None
    assert (tmp_path / "requests").stat().st_mode & 0o777 == 0o600


def test_a_deadline_runs_on_while_nobody_serves(tmp_path: Path) -> None:
    clock = Clock()
    opened(tmp_path, clock).write(ask("a", deadline_s=60.0))
    clock.now += 25

    assert read(tmp_path, clock)["a"].deadline_s == 35.0
    clock.now += 5
    assert read(tmp_path, clock)["a"].deadline_s == 30.0


@given(cut=st.integers(0, 400), flip=st.none() | st.integers(0, 400), bit=st.integers(0, 7))
def test_what_was_cut_off_or_damaged_ends_the_file(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flip: int | None, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("j")
    first = opened(folder)
    first.write(ask("a"))
    for at in range(8):
        first.write(tokens("a", at, at))
    first.close()
    path = folder / "requests"
    data = bytearray(path.read_bytes())
    if flip is not None:
        data[flip % len(data)] ^= 1 << bit
    path.write_bytes(data[: max(0, len(data) - cut)])

    found = read(folder)
    if "a" in found:  # a beginning of what was written, and nothing else
        said = found["a"].choices[0].tokens
        assert said == list(range(len(said)))
        if flip is None and cut == 0:
            assert len(said) == 8
    # What is written from then on is read again.
    second = opened(folder)
    second.write(ask("z"))
    second.close()
    assert set(read(folder)) == set(found) | {"z"}


def test_what_nobody_needs_is_written_out_of_it(
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
        clock.now += 100.0  # who is over is kept for ten minutes
        live = sum(subject._sizes.values())
        assert subject._live == live
        assert subject._size <= len(MAGIC) + 2 * live + 2500
        assert subject._size == (tmp_path / "requests").stat().st_size
    assert len(subject._sizes) <= 5
    subject.close()

    found = read(tmp_path, clock)
    assert found["kept"].choices[0].tokens == list(range(500))
    assert len(found) <= 5


def test_beyond_its_limit_requests_are_served_and_not_kept(tmp_path: Path) -> None:
    subject = opened(tmp_path, limit_bytes=2000)
    for number in range(100):
        subject.write(ask(f"r{number}"))
        subject.write(tokens(f"r{number}", 0, 1))
        assert subject._size <= 2100  # who is let go is noted beyond it
    subject.close()
    found = read(tmp_path)

    assert 5 < len(found) < 20
    assert all(one.choices[0].tokens == [1] for one in found.values())


def test_a_full_disk_costs_the_journal_and_not_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = opened(tmp_path)
    subject.write(ask("a"))
    subject.write(ask("b"))
    whole = os.pwrite

    def full(fd: int, data: bytes, at: int) -> int:
        whole(fd, data[:5], at)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    subject.write(tokens("a", 0, 1))
    monkeypatch.setattr(os, "pwrite", whole)
    subject.write(tokens("a", 1, 2))  # it has a gap: no longer kept
    subject.write(tokens("b", 0, 3))
    subject.close()

    assert read(tmp_path)["b"].choices[0].tokens == [3]
    assert read(tmp_path)["a"].choices[0].tokens == []


def test_a_file_of_something_else_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "requests").write_bytes(b"kvd journal 9\nwhat the future wrote")

    assert read(tmp_path) == {}
    assert (tmp_path / "requests").read_bytes() == MAGIC


def test_a_folder_that_cannot_be_is_a_fault_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file")
    with pytest.raises(ConfigError, match="journal"):
        opened(tmp_path / "journal")
