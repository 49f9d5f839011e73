from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from kvd.worker.core.out_of_memory import CALM_STEPS
from kvd.worker.prefix import segment_files
from kvd.worker.prefix.segment_io import BackgroundReader
from protocol.worker import SegmentsChanged
from tests.worker import shallow
from tests.worker.core.driver import Driver, Outcome
from tests.worker.core.faulty_disk.disk import PROMPT, STORED, Disk, settle, threads, until
from tests.worker.core.segments import KV, Clock, Engine, Store, alone


@pytest.fixture(scope="package")
def plain() -> Driver:
    return Driver(shallow.path(), kv=KV)


@pytest.fixture(scope="package")
def wanted(plain: Driver) -> Outcome:
    return alone(plain, PROMPT)


@pytest.fixture(scope="package")
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
    reader = functools.partial(BackgroundReader, threads=3)  # also on machines with few cores
    monkeypatch.setattr(segment_files, "BackgroundReader", reader)
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
    shared.found.clear()
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
