"""Disks that fail or hang, and requests that end in mid-read: a prefix store costs time at most."""

from __future__ import annotations

import errno
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvd.worker.core.out_of_memory import CALM_STEPS
from kvd.worker.core.segment_reads import READ_MARGIN
from kvd.worker.prefix import segment_files
from kvd.worker.prefix.read_ahead import PIECE_BYTES
from kvd.worker.prefix.segment_io import BackgroundWriter
from protocol.segments import segment_path
from protocol.worker import Reclaim, SegmentsChanged, StartLevel
from tests.worker.core.driver import Driver, Outcome
from tests.worker.core.faults import LATE, UNABLE, memory_runs_out
from tests.worker.core.prompts import prompt_of
from tests.worker.core.segments import KV, Clock, Engine, Store, alone

pytestmark = pytest.mark.mlx

PROMPT = prompt_of(700, 1)
STORED = 512
OTHERS = [prompt_of(600, seed) for seed in (11, 12)]
PATIENCE_S = 20.0


class Disk:
    """Makes calls of `os` in the threads of segments fail or hang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._works = threading.Event()
        self._works.set()
        self.calls = 0

    def _replace(self, name: str, instead: Callable) -> None:
        plain = getattr(os, name)

        def call(*args, **options):
            if not threading.current_thread().name.startswith("segment-"):
                return plain(*args, **options)
            self.calls += 1
            return instead(plain, *args, **options)

        self._monkeypatch.setattr(os, name, call)

    def fail(self, name: str, error: int, after: int = 0) -> None:
        def fail(plain, *args, **options):
            if self.calls > after:
                raise OSError(error, os.strerror(error))
            return plain(*args, **options)

        self._replace(name, fail)

    def hang(self, name: str) -> None:
        self._works.clear()

        def wait(plain, *args, **options):
            assert self._works.wait(PATIENCE_S)
            return plain(*args, **options)

        self._replace(name, wait)

    def work(self) -> None:
        self._works.set()

    def hang_after_a_record(self) -> None:
        """Hang at once, and let the engine copy only one record meanwhile."""
        writer = functools.partial(BackgroundWriter, staging_bytes=1)
        self._monkeypatch.setattr(segment_files, "BackgroundWriter", writer)
        self.hang("write")

    def shorten(self) -> None:
        """Return at most 1000 bytes from each read."""
        self._replace("preadv", lambda plain, fd, parts, at: plain(fd, [parts[0][:1000]], at))


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("segment-")]


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "the condition does not become true"
        time.sleep(0.0005)


@pytest.fixture(scope="module")
def plain() -> Driver:
    return Driver("demo", kv=KV)


@pytest.fixture(scope="module")
def wanted(plain: Driver) -> Outcome:
    return alone(plain, PROMPT)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine whose store has `PROMPT`'s prefix."""
    store = Store(tmp_path_factory.mktemp("segments"))
    engine = Engine(store, clock=Clock())
    engine.alone(PROMPT, max_tokens=2)
    engine.write_all()
    assert [one.tokens for one in store.segments.values()] == [STORED]
    return engine


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.work()
    until(lambda: not threads())


@pytest.fixture
def engine(shared: Engine, disk: Disk) -> Iterator[Engine]:
    """The engine without checkpoints in memory."""
    for reports in (shared.store.damaged, shared.store.abandoned, shared.store.used):
        reports.clear()
    before = dict(shared.store.segments)
    shared.outcomes.clear()
    shared.reclaimed.clear()
    shared.engine._out_of_memory.calm_steps = CALM_STEPS
    shared.forget()
    yield shared
    disk.work()
    until(lambda: not threads())
    settle(shared)
    shared.run()
    removed = [key for key in shared.store.segments if key not in before]
    shared.store.segments = before
    shared.engine.segment_command(SegmentsChanged(removed=removed))
    assert not shared.engine._transfers.reading
    assert not shared.engine._preemption.busy
    shared.engine._prefix_cache.tree.clear()
    assert shared.engine._runner.cache.usage.pages_used == 0
    assert not shared.engine._runner.cache.sequences
    assert not list(shared.store.folder.rglob("*.part"))


def settle(engine: Engine) -> None:
    """Step until the present offer ends."""

    def over() -> bool:
        if engine.engine.has_work:
            engine.step()
        return engine.engine._segments._offer is None

    until(over)


def submit(engine: Engine, rid: str = "r", prompt: list[int] = PROMPT) -> None:
    engine.submit(rid, prompt, max_tokens=12, logprobs=2)


def begin_to_read(engine: Engine, disk: Disk) -> None:
    """Submit `PROMPT` and stop in mid-read; on a busy machine one step could read everything."""
    disk.hang("preadv")
    submit(engine)
    engine.run(until=lambda: engine.engine._transfers.reading)
    assert engine.engine._transfers.reading
    disk.work()


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
    assert len(threads()) == 1, "the disk is asked once"

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


def test_reads_are_one_after_another(engine: Engine, plain: Driver) -> None:
    """Their staging is in the budget once."""
    prompts = [PROMPT, *(prompt_of(len(PROMPT), seed) for seed in (41, 42))]
    for prompt in prompts[1:]:
        engine.alone(prompt, max_tokens=2)
    engine.write_all()
    engine.engine._prefix_cache.tree.clear()
    engine.outcomes.clear()
    most = 0
    for number, prompt in enumerate(prompts):
        submit(engine, f"r{number}", prompt)
    while not all(outcome.over for outcome in engine.outcomes.values()):
        engine.step()
        most = max(most, len(threads()))
    assert most <= 1  # a thread may begin and end within one step
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
    for _ in range(5):
        engine.step()
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
    disk.work()
    until(lambda: not threads())
    rates = engine.engine._rates
    seconds = rates.seconds("read", 1)
    assert alone(engine, PROMPT).cached == 0
    assert rates.seconds("read", 1) < seconds
    for _ in range(25):
        rates.recover("read")
    assert alone(engine, PROMPT).cached == STORED


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
        until(lambda: not engine.engine.has_work)  # the worker sleeps
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
    rates = engine.engine._rates
    (segment,) = engine.store.segments.values()
    prefill_s = rates.seconds("prefill", STORED)
    rates._measured["read"] = times_as_long * READ_MARGIN * segment.nbytes / prefill_s
    before = rates.seconds("read", 1)
    assert alone(engine, PROMPT).cached == cached
    assert rates.seconds("read", 1) < before, "a read that is measured, or the next try is nearer"
