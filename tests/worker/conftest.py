"""The worker's tests share an engine with the embedded model, because loading takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker import shallow
from tests.worker.core.driver import Driver
from tests.worker.core.invariants import check_batch


@pytest.fixture(scope="session")
def _demo() -> Driver:
    return Driver(shallow.path())


@pytest.fixture
def demo(_demo: Driver) -> Iterator[Driver]:
    _demo.outcomes.clear()
    _demo.found.clear()
    _restore_grant(_demo)
    yield _demo
    # A test must not leave a request, a row or a page.
    for rid in list(_demo.engine._batch.requests):
        _demo.engine.cancel(rid)
    _demo.run(until=lambda: not _demo.engine.has_work)
    assert not _demo.engine._batch.requests
    lost = "a memory request was not taken: the next test would wait for its answer for ever"
    assert _demo.engine._admission.budget.open_bytes is None, lost
    check_batch(_demo.engine._batch)
    assert not _demo.engine._runner.cache.sequences
    _demo.engine._prefix_cache.tree.clear()
    assert _demo.engine._runner.cache.usage.pages_used == 0
    assert _demo.engine._scheduler.reserved_pages == 0
    _demo.outcomes.clear()


def _restore_grant(demo: Driver) -> None:
    """Give the idle engine the free memory that it had after its load.

    Earlier tests may have reclaimed memory, or compiled grammars that are still kept. With less
    free memory, requests wait for a grant, and begin in other steps.
    """
    engine, admission = demo.engine, demo.engine._admission
    engine._submissions._compiler.shrink()
    engine._runner.cache.shrink()
    missing = admission.request_spare(admission._base_idle_pages, engine._memory.held())
    if missing is not None:
        engine.granted(demo.answer(missing.seq, missing.total_bytes, missing.reason))
    assert admission.spare_pages(engine._memory.held()) >= admission._base_idle_pages
