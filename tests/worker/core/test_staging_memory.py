"""A model that is loaded while the prefix store is off uses it once it is on."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.worker.serving import loading
from protocol.worker import SegmentsChanged
from tests.worker.core.driver import GIB
from tests.worker.core.prompts import prompt_of
from tests.worker.core.segments import Clock, Engine, Store

pytestmark = pytest.mark.mlx


def test_the_memory_is_charged_once_the_store_is_on_and_the_daemon_grants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "STAGING_BYTES", GIB)  # more than an idle engine has spare
    store = Store(tmp_path)
    store.on = False
    engine = Engine(store, clock=Clock(), prefix_store_on=False)
    budget = engine.engine._admission.budget
    base, prompt = budget.base_bytes, prompt_of(600, 1)
    engine.alone(prompt, max_tokens=2)
    engine.write_all()
    assert store.offered == []
    assert budget.base_bytes == base

    engine.others = engine.budget - engine.total  # nothing is free
    engine.engine.segment_command(SegmentsChanged())
    engine.run()
    assert max(engine.asked)[0] > engine.total + GIB  # denied
    engine.write_all()
    assert store.offered == []
    assert budget.base_bytes == base

    engine.others = 0
    engine.alone(prompt, max_tokens=2)
    assert 0 <= budget.base_bytes - base - 2 * GIB < budget.page_bytes
    engine.write_all()
    assert len(store.segments) == 1
    engine.forget()
    assert engine.alone(prompt, max_tokens=2).cached == 512
    engine.engine.segment_command(SegmentsChanged())
    assert budget.base_bytes - base < 2 * GIB + budget.page_bytes  # charged once


def test_a_stored_prefix_is_not_read_without_the_memory_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, prompt = Store(tmp_path), prompt_of(600, 1)
    writer = Engine(store, clock=Clock())
    writer.alone(prompt, max_tokens=2)
    writer.write_all()
    assert len(store.segments) == 1

    monkeypatch.setattr(loading, "STAGING_BYTES", GIB)
    store.on = False
    engine = Engine(store, clock=Clock(), prefix_store_on=False)
    engine.others = engine.budget - engine.total - GIB // 2
    engine.engine.segment_command(SegmentsChanged(added=list(store.segments.values())))
    assert engine.alone(prompt, max_tokens=2).cached == 0
    outcome = engine.found["alone"]
    assert ([part.reason for part in outcome.parts], outcome.unread) == (
        ["unread", "end"],
        "memory",
    )
