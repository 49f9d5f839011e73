"""Disks that hang or are slow, reclaims, and prompts that wait: nothing waits for long."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvd.worker.core import rates
from kvd.worker.core.read_rates import READ_MARGIN
from kvd.worker.prefix import segment_files, segment_io
from kvd.worker.prefix.page_cache import Part
from kvd.worker.prefix.read_ahead import PIECE_BYTES
from kvd.worker.prefix.segment_files import Reading, SegmentFiles
from kvd.worker.prefix.segment_io import BackgroundReader
from protocol.segments import SegmentInfo
from protocol.worker import Reclaim
from tests.worker.core.driver import Driver, Outcome
from tests.worker.core.faulty_disk.disk import (
    OTHERS,
    PROMPT,
    STORED,
    Disk,
    begin_to_read,
    settle,
    submit,
    threads,
    unread,
    until,
)
from tests.worker.core.prompts import prompt_of
from tests.worker.core.segments import Engine, alone

pytestmark = pytest.mark.mlx


# Disks that hang.


def test_a_disk_that_hangs_delays_its_readers_for_a_second(
    engine: Engine, disk: Disk, plain: Driver, wanted: Outcome
) -> None:
    clock = engine.engine._clock
    right = plain.alone(OTHERS[0], max_tokens=100)
    engine.submit("other", OTHERS[0], max_tokens=100)
    engine.run(until=lambda: engine.outcomes["other"].tokens)
    disk.hang("preadv")
    submit(engine)
    submit(engine, "second", [*PROMPT, 3])
    engine.run(until=lambda: len(engine.outcomes["other"].tokens) > 30)
    assert not engine.outcomes["r"].tokens, "the prompt waits for the disk"
    assert disk.calls == 1, "the disk is asked once"

    clock.now += 1.1  # of the first
    engine.run(until=lambda: engine.outcomes["r"].tokens)
    clock.now += 1.1  # and until the thread's end is late too
    engine.run()
    assert engine.outcomes["r"] == wanted
    assert engine.outcomes["second"].reason == "length"
    assert engine.outcomes["other"] == right

    engine.engine._prefix_cache.tree.clear()
    found = alone(engine, PROMPT)  # no time passes
    assert (found, found.cached) == (wanted, 0)
    assert unread(engine, "r") == (STORED, "hangs")
    assert not engine.store.damaged

    disk.work()
    until(lambda: not threads())
    engine.engine._rates._measured.clear()
    assert alone(engine, PROMPT).cached == STORED, "the disk is asked again"


def test_prompts_that_share_a_prefix_read_it_once(engine: Engine, wanted: Outcome) -> None:
    for number in range(4):
        submit(engine, f"r{number}", [*PROMPT, number])
    engine.run()
    assert [one.tokens for one in engine.store.used] == [STORED]
    assert {outcome.cached for outcome in engine.outcomes.values()} == {STORED}


def test_reads_are_one_after_another(
    engine: Engine, plain: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their staging is in the budget once."""
    prompts = [PROMPT, *(prompt_of(len(PROMPT), seed) for seed in (41, 42))]
    for prompt in prompts[1:]:
        engine.alone(prompt, max_tokens=2)
    engine.write_all()
    engine.engine._prefix_cache.tree.clear()
    engine.outcomes.clear()
    opened: list[BackgroundReader] = []
    opens = SegmentFiles.open_reader

    def open_reader(
        files: SegmentFiles, segments: Sequence[SegmentInfo], parts: Sequence[Part]
    ) -> BackgroundReader:
        assert all(reader._staging.closed for reader in opened)
        opened.append(opens(files, segments, parts))
        return opened[-1]

    monkeypatch.setattr(SegmentFiles, "open_reader", open_reader)
    for number, prompt in enumerate(prompts):
        submit(engine, f"r{number}", prompt)
    engine.run()
    assert len(opened) == len(prompts)
    assert {outcome.cached for outcome in engine.outcomes.values()} == {STORED}
    assert len(engine.store.used) == len(prompts)


# Reclaims.


def begin_reclaim(engine: Engine, method: str) -> None:
    engine.engine.reclaim(Reclaim(seq=7, method=method, wanted_bytes=1 << 40, level=0))


@pytest.mark.parametrize("method", ["spare", "prefixes", "preempt"])
def test_a_reclaim_does_not_wait_for_a_disk_that_hangs(
    engine: Engine, disk: Disk, wanted: Outcome, method: str
) -> None:
    clock = engine.engine._clock
    disk.hang("preadv")
    submit(engine)
    submit(engine, "second", [7, *PROMPT])
    engine.run(until=lambda: disk.calls)
    begin_reclaim(engine, method)
    for _ in range(3):
        engine.step()
    assert not engine.reclaimed, "the read may still be fast"
    clock.now += 0.3
    engine.run(until=lambda: engine.reclaimed, steps=50)
    assert len(engine.reclaimed) == 1
    assert not engine.outcomes["r"].tokens
    disk.work()
    engine.run()
    assert engine.outcomes["r"] == wanted
    assert [one.tokens for one in engine.store.used] == [STORED], "it is read after the reclaim"


def test_a_request_is_preempted_before_its_read_begins(
    engine: Engine, disk: Disk, plain: Driver, wanted: Outcome
) -> None:
    other = prompt_of(len(PROMPT), 43)
    engine.alone(other, max_tokens=2)
    engine.write_all()
    engine.engine._prefix_cache.tree.clear()
    disk.hang("preadv")
    submit(engine)
    submit(engine, "unread", other)
    engine.run(until=lambda: disk.calls)
    begin_reclaim(engine, "preempt")
    engine.step()
    engine.engine._clock.now += 0.3
    engine.run(until=lambda: engine.reclaimed)
    assert engine.preemptions["unread"] == ["recompute"]
    disk.work()
    engine.run()
    assert engine.outcomes["r"] == wanted
    assert engine.outcomes["unread"] == alone(plain, other)
    assert [one.tokens for one in engine.store.used] == [STORED, STORED]


def test_a_prompt_whose_reads_are_always_interrupted_is_prefilled(
    engine: Engine, disk: Disk, wanted: Outcome
) -> None:
    clock = engine.engine._clock
    submit(engine)
    for number in range(1, 4):
        disk.hang("preadv")
        calls = disk.calls
        engine.run(until=lambda: disk.calls > calls)  # noqa: B023
        begin_reclaim(engine, "spare")
        engine.step()
        clock.now += 0.3
        engine.run(until=lambda: len(engine.reclaimed) == number)  # noqa: B023
        disk.work()
        until(lambda: not threads())
    engine.run()
    assert engine.outcomes["r"] == wanted
    assert engine.outcomes["r"].cached == 0
    assert unread(engine, "r") == (STORED, "reclaim")


# Disks that are slow.


def test_time_without_a_step_does_not_count(engine: Engine, disk: Disk, wanted: Outcome) -> None:
    """Another worker may have the time slice."""
    begin_to_read(engine, disk)
    until(lambda: engine.engine._preemption.ready)
    engine.engine._clock.now += 100.0
    engine.run()
    assert engine.outcomes["r"] == wanted
    assert engine.outcomes["r"].cached == STORED


def test_one_read_that_took_long_does_not_end_all_reads(
    engine: Engine, disk: Disk, wanted: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, prompts = engine.engine._clock, engine.engine._prompts
    monkeypatch.setattr(segment_files, "HANG_SECONDS", 1000.0)
    disk.hang("preadv")
    submit(engine)
    engine.run(until=lambda: disk.calls)
    with monkeypatch.context() as patch:
        plain = prompts.begin_single_tokens
        patch.setattr(
            prompts,
            "begin_single_tokens",
            lambda rids: (setattr(clock, "now", clock.now + 2.0), plain(rids)),
        )
        engine.step()
    engine.run()
    assert engine.outcomes["r"] == wanted
    assert engine.outcomes["r"].cached == 0
    assert unread(engine, "r") == (STORED, "slow")
    disk.work()
    until(lambda: not threads())
    found = engine.engine._rates
    seconds = found.seconds("read", 1)
    assert alone(engine, PROMPT).cached == 0
    assert found.seconds("read", 1) < seconds
    for _ in range(25):
        found.recover("read")
    assert alone(engine, PROMPT).cached == STORED


@pytest.mark.parametrize(
    ("share", "late_s", "cached"), [(0.2, 1.5, 0), (0.85, 1.5, STORED), (0.85, 2.5, 0)]
)
def test_a_late_read_ends_unless_its_rest_takes_less_than_prefill(
    engine: Engine,
    wanted: Outcome,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    late_s: float,
    cached: int,
) -> None:
    """``share`` of the bytes are read after ``late_s``; all should be after a second."""
    clock, reads = engine.engine._clock, engine.engine._prompts.segments
    monkeypatch.setattr(segment_files, "HANG_SECONDS", 1000.0)  # whatever is on its way
    monkeypatch.setattr(engine.engine._pace, "seconds", lambda decodes: 0.0)  # a record per step
    readings, read = [], reads._files.read

    def note(segments: Sequence[SegmentInfo], parts: Sequence[Part]) -> Reading:
        readings.append(read(segments, parts))
        return readings[-1]

    monkeypatch.setattr(reads._files, "read", note)
    submit(engine)
    (segment,) = engine.store.segments.values()
    engine.run(until=lambda: readings and readings[0].nbytes >= share * segment.nbytes)
    assert readings[0].nbytes < segment.nbytes
    with monkeypatch.context() as patch:
        plan = engine.engine._plan
        patch.setattr(
            engine.engine, "_plan", lambda: (setattr(clock, "now", clock.now + late_s), plan())[1]
        )
        engine.step()
    engine.run()
    assert engine.outcomes["r"] == wanted
    assert engine.outcomes["r"].cached == cached
    assert unread(engine, "r") == (None if cached else (STORED, "slow"))


def test_a_disk_that_hangs_delays_neither_rows_nor_the_drain(
    engine: Engine, disk: Disk, plain: Driver
) -> None:
    clock, store = engine.engine._clock, engine.engine._segments
    right = alone(plain, OTHERS[1])
    engine.alone(prompt_of(700, 7), max_tokens=2)
    disk.hang("fsync")
    engine.engine.drain(10.0)
    try:
        until(lambda: (engine.engine.has_work and engine.step()) or disk.calls)
        until(lambda: not store.has_work)
        engine.step()  # the idle step, which the loop delays by a pause
        assert not engine.engine.has_work, "the worker does not sleep"
        assert engine.engine.next_deadline > clock.now
        assert engine.engine.keeps_worker
        submit(engine, "other", OTHERS[1])
        engine.run(until=lambda: engine.outcomes["other"].over)
        assert engine.outcomes["other"] == right
        assert len(engine.store.segments) == 1

        clock.now += 10.0
        assert not engine.engine.keeps_worker
        assert engine.engine.has_work, "the worker's loop ends"
    finally:
        store._drain_until = None
    assert not engine.store.abandoned, "the file may still come to exist"
    disk.work()
    settle(engine)
    assert len(engine.store.segments) == 2


def test_an_offer_that_the_daemon_does_not_answer_costs_nothing(engine: Engine) -> None:
    clock, serve = engine.engine._clock, engine.store.serve
    engine.alone(prompt_of(700, 8), max_tokens=2)
    engine.store.serve = lambda _engine: None
    try:
        clock.now += 1.0
        while engine.engine.has_work:
            engine.step()
        assert len(engine.segments) == 1
        clock.now += 1.0
        assert not engine.engine.has_work
        deadline = engine.engine.next_deadline
        assert deadline is None or deadline > clock.now, "the worker's loop would spin"
    finally:
        engine.store.serve = serve
    serve(engine)
    engine.write_all()
    assert len(engine.store.segments) == 2


def test_what_memory_may_evict_is_written_while_the_engine_is_busy(engine: Engine) -> None:
    """Without an idle moment, prefixes without a hit would be lost with the memory."""
    store = engine.store
    engine.write_all()
    known = set(store.segments)
    engine.submit("long", [9, 8, 7], max_tokens=700)
    engine.run(until=lambda: engine.outcomes["long"].tokens)
    for seed in (31, 32):
        submit(engine, f"r{seed}", prompt_of(700, seed))
        engine.run(until=lambda rid=f"r{seed}": engine.outcomes[rid].over)
    assert set(store.segments) == known, "the engine is busy, and has memory"

    engine.engine._prefix_cache.evict(1)
    until(lambda: engine.step() or set(store.segments) > known)
    assert not engine.outcomes["long"].over
    engine.engine.cancel("long")


# Prompts that wait in the queue, and reads that are hardly faster than prefill.


def wait_in_queue(engine: Engine, disk: Disk, *rids: str) -> None:
    """Submit requests while none is admitted. Asking the system to read ahead hangs."""
    disk.hang("posix_fadvise")
    engine.engine._admission.closed = True
    for rid in rids:
        engine.submit(rid, PROMPT, max_tokens=15_000)
    engine.step()
    assert engine.engine._scheduler.waiting == len(rids)


def withdraw(engine: Engine) -> None:
    """Cancel the requests in the queue; others are admitted again."""
    for rid in engine.outcomes:
        engine.engine.cancel(rid)
    engine.step()
    engine.outcomes.clear()
    engine.engine._admission.closed = False


def test_the_head_of_the_queue_is_prefetched_once(engine: Engine, disk: Disk) -> None:
    wait_in_queue(engine, disk, "r", "second")
    for _ in range(3):
        engine.step()
    until(lambda: disk.calls)
    assert len(threads()) == 1
    disk.work()
    until(lambda: not threads())
    calls = disk.calls
    assert calls >= next(iter(engine.store.segments.values())).nbytes / PIECE_BYTES
    for _ in range(3):
        engine.step()
    assert (disk.calls, threads()) == (calls, [])
    withdraw(engine)


def test_nothing_is_prefetched_that_would_not_be_read(engine: Engine, disk: Disk) -> None:
    engine.engine._rates._measured["read"] = 1.0
    wait_in_queue(engine, disk, "r")
    for _ in range(3):
        engine.step()
    assert (disk.calls, threads()) == (0, [])
    withdraw(engine)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_prompt_waits_a_second_for_the_end_of_a_prefetch(
    engine: Engine, disk: Disk, wanted: Outcome, hangs: bool
) -> None:
    wait_in_queue(engine, disk, "r")
    until(lambda: disk.calls)
    withdraw(engine)
    submit(engine, "now")
    engine.run(until=lambda: engine.engine._transfers.reading)
    assert len(threads()) == 1
    if hangs:
        engine.engine._clock.now += 1.1
    else:
        disk.work()
    engine.run()
    assert disk.calls == 1, "the prefetch ends before the read begins"
    assert engine.outcomes["now"] == wanted
    assert engine.outcomes["now"].cached == (0 if hangs else STORED)


@pytest.mark.parametrize(("times_as_long", "cached"), [(0.95, 0), (1.05, STORED)])
def test_a_prefix_is_read_if_that_is_clearly_faster(
    engine: Engine, times_as_long: float, cached: int
) -> None:
    """``times_as_long``: duration of prefill, relative to what makes a read worth it."""
    found = engine.engine._rates
    (segment,) = engine.store.segments.values()
    prefill_s = found.seconds("prefill", STORED)
    found._measured["read"] = times_as_long * READ_MARGIN * segment.nbytes / prefill_s
    before = found.seconds("read", 1)
    assert alone(engine, PROMPT).cached == cached
    assert unread(engine, "alone") == (None if cached else (STORED, "slower"))
    assert found.seconds("read", 1) < before, "a read that is measured, or the next try is nearer"


def slow_estimates(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> float:
    """Let prefill be estimated as far better than the first read; return its seconds."""
    slow = {"read": 1000.0, "read_from_disk": 1000.0}
    monkeypatch.setattr("kvd.worker.core.rates._INITIAL", {**rates._INITIAL, **slow})
    return engine.engine._rates.seconds("prefill", STORED)


def test_the_first_read_is_tried_whatever_is_estimated(
    engine: Engine, wanted: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_estimates(engine, monkeypatch)
    found = engine.engine._rates
    found.recover("read")  # a prompt that is too short for it
    assert not found.is_measured("read")
    tried = alone(engine, PROMPT)
    assert (tried, tried.cached) == (wanted, STORED)
    assert found.is_measured("read")


def test_the_first_read_ends_soon_unless_it_is_faster_than_prefill(
    engine: Engine, disk: Disk, wanted: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill_s = slow_estimates(engine, monkeypatch)
    monkeypatch.setattr(segment_files, "HANG_SECONDS", 1000.0)
    disk.hang("preadv")
    submit(engine)
    engine.run(until=lambda: disk.calls)
    with monkeypatch.context() as patch:
        patch.setattr(segment_io._BusyTime, "seconds", 0.25 * prefill_s)
        engine.step()
    engine.run()
    assert engine.outcomes["r"] == wanted
    assert engine.outcomes["r"].cached == 0
    assert unread(engine, "r") == (STORED, "slow")
    disk.work()
    until(lambda: not threads())
    assert alone(engine, PROMPT).cached == 0, "it is not tried again at once"


# Files that are not in the page cache.


def cached(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Let the page cache hold this share of all files."""
    monkeypatch.setattr(segment_io, "cached_share", lambda _paths, _parts: share)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_prefix_on_a_slow_disk_is_prefilled_though_the_page_cache_is_fast(
    engine: Engine, wanted: Outcome, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    found = engine.engine._rates
    (segment,) = engine.store.segments.values()
    prefill_s = found.seconds("prefill", STORED)
    found._measured |= {"read": 1e12, "read_from_disk": (1 - share) * segment.nbytes / prefill_s}
    before = found.seconds("read_from_disk", 1)
    cached(monkeypatch, share)
    assert alone(engine, PROMPT) == wanted
    assert unread(engine, "alone") == (STORED, "slower")
    assert found.seconds("read_from_disk", 1) < before, "the next try is nearer"
    assert found.seconds("read", 1) == 1e-12
    cached(monkeypatch, 1.0)
    assert alone(engine, PROMPT).cached == STORED


@pytest.mark.parametrize(
    ("share", "work"), [(1.0, "read"), (0.95, "read"), (0.5, "read_from_disk")]
)
def test_a_read_measures_the_page_cache_or_the_disk(
    engine: Engine, wanted: Outcome, monkeypatch: pytest.MonkeyPatch, share: float, work: str
) -> None:
    monkeypatch.setattr(segment_io._BusyTime, "seconds", 2.0)
    cached(monkeypatch, share)
    tried = alone(engine, PROMPT)
    assert (tried, tried.cached) == (wanted, STORED)
    measured = engine.engine._rates._measured
    assert {one for one in measured if one.startswith("read")} == {work}
    (segment,) = engine.store.segments.values()
    missing = 1.0 if work == "read" else 1 - share
    # The cached half is estimated at 1 GB/s, which is nothing beside two seconds.
    assert measured[work] == pytest.approx(missing * segment.nbytes / 2.0, rel=0.05)


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_disk_that_hangs_says_nothing_about_the_page_cache(
    engine: Engine, disk: Disk, wanted: Outcome, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Before the share is known, no file has been opened."""
    cached(monkeypatch, 0.0)
    disk.hang(call)
    submit(engine)
    engine.run(until=lambda: disk.calls)
    engine.engine._clock.now += 1.1
    engine.run()
    assert engine.outcomes["r"] == wanted
    assert unread(engine, "r") == (STORED, "hangs")
    assert "read" not in engine.engine._rates._measured
    disk.work()
    until(lambda: not threads())
    cached(monkeypatch, 1.0)
    assert alone(engine, PROMPT).cached == STORED


def test_a_first_read_is_not_judged_by_steps_that_are_long_for_other_reasons(
    engine: Engine, disk: Disk, wanted: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill_s = slow_estimates(engine, monkeypatch)
    engine.engine._rates._measured.clear()
    clock, prompts = engine.engine._clock, engine.engine._prompts
    begin_to_read(engine, disk)
    plain = prompts.begin_single_tokens
    with monkeypatch.context() as patch:
        patch.setattr(
            prompts,
            "begin_single_tokens",
            lambda rids: (setattr(clock, "now", clock.now + 0.5 * prefill_s), plain(rids)),
        )
        engine.step()
    engine.run()
    assert engine.outcomes["r"] == wanted
    assert engine.outcomes["r"].cached == STORED


def test_a_share_that_cannot_be_found_out_ends_no_read(
    engine: Engine, wanted: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_paths: object, _parts: object) -> float:
        raise MemoryError

    monkeypatch.setattr(segment_io, "cached_share", fail)
    tried = alone(engine, PROMPT)
    assert (tried, tried.cached) == (wanted, STORED)


def test_a_read_that_waits_for_others_longer_than_prefill_takes_is_given_up(
    engine: Engine, disk: Disk, wanted: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SegmentFiles, "occupied", True)
    submit(engine)
    engine.run(until=lambda: engine.engine._transfers.reading)
    clock, plan = engine.engine._clock, engine.engine._plan
    for step_s in (0.9, 0.2):
        assert engine.engine._transfers.reading
        with monkeypatch.context() as patch:
            patch.setattr(
                engine.engine,
                "_plan",
                lambda s=step_s: (setattr(clock, "now", clock.now + s), plan())[1],
            )
            engine.step()
    engine.run()
    assert engine.outcomes["r"] == wanted
    assert unread(engine, "r") == (STORED, "slow")
    assert not {"read", "read_from_disk"} & set(engine.engine._rates._measured)
