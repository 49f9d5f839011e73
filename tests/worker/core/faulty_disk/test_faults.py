"""Requests that end in mid-read, and disks that fail: a prefix store costs time at most."""

from __future__ import annotations

import errno
import os

import pytest

from protocol.segments import segment_path
from protocol.worker import SegmentsChanged, StartLevel
from tests.worker.core.driver import Driver, Outcome
from tests.worker.core.faults import LATE, UNABLE, memory_runs_out
from tests.worker.core.faulty_disk.disk import (
    OTHERS,
    STORED,
    Disk,
    begin_to_read,
    settle,
    submit,
    unread,
    until,
)
from tests.worker.core.prompts import prompt_of
from tests.worker.core.segments import Engine, alone

pytestmark = pytest.mark.mlx


# Requests that end, steps that fail, and precision levels, in mid-read.


@pytest.mark.parametrize("records", [0, 1, 2, 4])
def test_pages_of_a_request_that_ended_are_not_written(
    engine: Engine, disk: Disk, plain: Driver, records: int
) -> None:
    """Other prompts get its pages, in the same step in which the read would have continued."""
    right = [alone(plain, other) for other in OTHERS]
    begin_to_read(engine, disk)
    reads = engine.engine._preemption
    for _ in range(records):
        until(lambda: reads.ready)
        reads.work(0.0)
    engine.engine.cancel("r")
    for number, other in enumerate(OTHERS):
        submit(engine, f"other{number}", other)
    engine.run()
    assert [engine.outcomes[f"other{number}"] for number in range(len(OTHERS))] == right
    assert engine.outcomes["r"].reason == "cancelled"


@pytest.mark.parametrize("text", [UNABLE, LATE])
@pytest.mark.parametrize("at", [1, 3, 7])
def test_a_step_that_fails_in_mid_read_costs_time_only(
    engine: Engine, disk: Disk, plain: Driver, wanted: Outcome, text: str, at: int
) -> None:
    submit(engine, "other", OTHERS[0])
    begin_to_read(engine, disk)
    until(lambda: engine.engine._preemption.ready)
    with memory_runs_out(lambda number: number == at, text) as counted:
        engine.run()
    assert counted.failed == 1
    assert [one.token for one in engine.outcomes["r"].logprobs] == [
        one.token for one in wanted.logprobs
    ]
    assert engine.outcomes["other"].tokens == alone(plain, OTHERS[0]).tokens


def test_a_step_that_fails_while_a_segment_is_written(engine: Engine, disk: Disk) -> None:
    """The offer ends when the thread does: until then the file may come to exist."""
    engine.alone(prompt_of(700, 5), max_tokens=2)
    disk.hang_after_a_record()
    engine.engine.drain(60)
    store = engine.engine._segments

    def is_copied(_number: int) -> bool:
        return store._offer is not None and store._offer.writer is not None and not counted.failed

    try:
        with memory_runs_out(is_copied, LATE) as counted:
            engine.run(until=lambda: counted.failed)
        for _ in range(5):
            engine.step()
        assert not engine.store.abandoned
        disk.work()
        settle(engine)
        assert [one.reason for one in engine.store.abandoned] == ["a step failed"]
    finally:
        store._drain_until = None


def test_a_prefix_is_not_read_for_a_lower_level(engine: Engine) -> None:
    engine.engine.start_level(StartLevel(level=1))
    try:
        submit(engine)
        engine.run()
    finally:
        engine.engine.start_level(StartLevel(level=0))
    assert engine.outcomes["r"].cached == 0
    assert engine.outcomes["r"].usage.levels == [1]
    assert not engine.store.used


def test_a_step_down_in_mid_read_waits_for_the_read(engine: Engine, disk: Disk) -> None:
    begin_to_read(engine, disk)
    engine.reclaim("precision", 1 << 40, level=1)
    engine.run()
    found = engine.outcomes["r"]
    assert found.cached == STORED
    assert found.usage.levels == [0, 1]
    engine.engine.start_level(StartLevel(level=0))
    assert all(one.tokens == STORED for one in engine.store.segments.values())
    # Lowered pages are in no checkpoint, and so they are not written.
    engine.write_all()
    assert engine.engine._prefix_cache.tree.checkpoints() == []


def test_a_checkpoint_that_is_stepped_down_while_it_is_written_is_abandoned(
    engine: Engine, disk: Disk
) -> None:
    prompt = prompt_of(700, 6)
    engine.submit("long", prompt, max_tokens=300)
    engine.run(until=lambda: engine.outcomes["long"].tokens)
    disk.hang_after_a_record()
    engine.engine.drain(60)
    store = engine.engine._segments
    try:
        engine.run(until=lambda: store._offer is not None and store._offer.writer is not None)
        engine.reclaim("precision", 1 << 40, level=1)
        disk.work()
        engine.run()
        engine.write_all()
    finally:
        store._drain_until = None
        engine.engine.start_level(StartLevel(level=0))
    assert len(engine.store.abandoned) == 1
    assert len(engine.store.segments) == 1


# Disks that fail.


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("mkdir", errno.EROFS),
        ("open", errno.EROFS),
        ("open", errno.EMFILE),
        ("open", errno.ENOSPC),
        ("write", errno.ENOSPC),
        ("write", errno.EIO),
        ("fsync", errno.ENOSPC),
        ("fsync", errno.EIO),
        ("rename", errno.EIO),
    ],
)
def test_a_segment_that_cannot_be_written_is_abandoned(
    engine: Engine, disk: Disk, name: str, error: int
) -> None:
    prompt = prompt_of(700, 100 + error)
    engine.alone(prompt, max_tokens=2)
    disk.fail(name, error)
    engine.write_all()
    assert len(engine.store.segments) == 1 + (not disk.calls)  # the folder may exist already
    if disk.calls:
        assert [one.reason for one in engine.store.abandoned] == [os.strerror(error)]


@pytest.mark.parametrize(
    ("name", "error", "after"),
    [
        ("open", errno.EIO, 0),
        ("open", errno.EMFILE, 0),
        ("open", errno.ENOENT, 0),
        ("fstat", errno.EIO, 0),
        ("preadv", errno.EIO, 0),
        ("preadv", errno.EIO, 1),
        ("preadv", errno.EIO, 4),
        ("preadv", errno.ENOMEM, 0),
        ("preadv", errno.ENOMEM, 4),
    ],
)
def test_a_segment_that_cannot_be_read_is_a_miss(
    engine: Engine, disk: Disk, wanted: Outcome, name: str, error: int, after: int
) -> None:
    """A missing file and a bad sector are damage; a limit of the process is not."""
    disk.fail(name, error, after)
    submit(engine)
    engine.run()
    assert engine.outcomes["r"] == wanted
    assert disk.calls > after, "no call failed"
    assert engine.outcomes["r"].cached == 0
    is_damage = error in (errno.EIO, errno.ENOENT)
    assert unread(engine, "r") == (STORED, "damaged" if is_damage else "failed")
    assert len(engine.store.damaged) == is_damage


def test_a_file_that_the_daemon_deleted_is_not_damaged(
    engine: Engine, disk: Disk, wanted: Outcome
) -> None:
    (key,) = engine.store.segments
    path = segment_path(engine.store.folder, key)
    disk.hang("open")
    submit(engine)
    engine.run(until=lambda: disk.calls)
    content = path.read_bytes()
    path.unlink()
    try:
        engine.engine.segment_command(SegmentsChanged(removed=[key]))
        disk.work()
        engine.run()
    finally:
        path.write_bytes(content)
    assert engine.outcomes["r"] == wanted
    assert engine.outcomes["r"].cached == 0
    assert not engine.store.damaged


def test_short_reads_are_continued(engine: Engine, disk: Disk, wanted: Outcome) -> None:
    disk.shorten()
    submit(engine)
    engine.run()
    assert engine.outcomes["r"] == wanted
    assert engine.outcomes["r"].cached == STORED
    assert disk.calls > 100
