"""Reclaiming in the fake engine: it frees what it reported, and no request loses a token."""

from __future__ import annotations

import random

import pytest

from kvd.worker.core import memory_account
from protocol.kv import KVSpec
from protocol.resume import ChoiceProgress
from protocol.worker import (
    Grant,
    MemoryRequested,
    Reclaim,
    Reclaimed,
    RowFinished,
    RowPreempted,
    RowResumed,
    StartLevel,
)
from tests.worker.fake.test_fake_engine import grant_of, loaded, run, tokens_of
from tests.worker.process.peer import submit

PAGE = 64 * 1024


def filled(**fields):
    """Return an engine with three decoding rows of at most 1664 tokens (25 pages), and reports."""
    engine = loaded("tps=0,pages=8", prefill_chunk=256, **fields)
    for rid in "abc":
        engine.submit(submit(rid, rid * 1024, max_tokens=640))
    reports = []
    while engine.stats().generated_tokens < 30:
        reports += step(engine)
    return engine, reports


def step(engine):
    """Step once and grant memory requests; return the reports."""
    made = engine.step()
    for report in made:
        if isinstance(report, MemoryRequested):
            engine.granted(grant_of(report))
    return made


def reclaim(engine, method, wanted, level=0):
    engine.reclaim(Reclaim(seq=3, method=method, wanted_bytes=wanted, level=level))
    reports = step(engine)
    return next(one for one in reports if isinstance(one, Reclaimed)), reports


def test_each_reclaim_method_frees_the_reported_bytes():
    engine, _ = filled()
    for method, level in (
        ("spare", 0),
        ("prefixes", 0),
        ("precision", 1),
        ("precision", 2),
        ("preempt", 0),
    ):
        reclaimable = engine.stats().reclaimable
        promised = (
            reclaimable.levels[level - 1] if method == "precision" else getattr(reclaimable, method)
        )
        before = engine._admission.budget.granted_bytes
        answer, reports = reclaim(engine, method, promised, level)
        assert (answer.seq, answer.exhausted) == (3, True), method
        assert (
            answer.freed_bytes
            == promised
            == before
            - min(
                [one.total_bytes for one in reports if isinstance(one, MemoryRequested)],
                default=before,
            )
        )
        if method in ("precision", "preempt"):
            assert promised >= 10 * PAGE
    kinds = [type(one) for one in reports]
    assert kinds.count(RowPreempted) == 3
    assert kinds.index(MemoryRequested) < kinds.index(Reclaimed)
    assert run(engine)


def test_memory_requests_report_reclaimable_bytes_and_preempted_rows():
    engine, reports = filled(kv=KVSpec(prefix_cache=0))
    requests = [one for one in reports if isinstance(one, MemoryRequested)]
    assert requests[-1].reclaimable.base == 64 << 20
    assert not any(one.resuming for one in requests)
    _, reports = reclaim(engine, "preempt", 1 << 40)
    reports += step(engine)
    requests = [one for one in reports if isinstance(one, MemoryRequested)]
    assert requests[-1].resuming
    assert requests[-1].reclaimable.waiting == 3


def test_new_rows_start_at_the_start_level():
    engine, _ = filled()
    engine.start_level(StartLevel(level=9))
    engine.submit(submit("d", "d" * 640, max_tokens=640))
    step(engine)
    step(engine)
    assert engine.stats().reclaimable.level == engine._scheduler.find("d").level == 2
    engine.start_level(StartLevel(level=0))
    engine.submit(submit("e", "e" * 640, max_tokens=640))
    step(engine)
    step(engine)
    assert engine._scheduler.find("e").level == 0
    run(engine)


def test_usage_has_no_level_at_which_no_token_was_generated():
    engine, _ = filled()
    engine.reclaim(Reclaim(seq=1, method="precision", wanted_bytes=1 << 40, level=1))
    engine.cancel("a")
    ends = [one for one in run(engine) if isinstance(one, RowFinished)]

    levels = {one.rid: one.usage.levels for one in ends}
    assert levels == {"a": [0], "b": [0, 1], "c": [0, 1]}


@pytest.mark.parametrize("seed", range(4))
def test_repeated_preemption_does_not_change_tokens(seed, monkeypatch):
    monkeypatch.setattr(memory_account, "MIN_TOKENS_BETWEEN_PREEMPTIONS", 16)
    engine, reports = filled(swap_folder="/nowhere", swap_bytes=1)
    draw = random.Random(seed)
    while engine.has_work:
        if draw.random() < 0.05:
            method, level = draw.choice(
                [("preempt", 0), ("spare", 0), ("precision", 1), ("precision", 2)]
            )
            engine.reclaim(
                Reclaim(seq=1, method=method, wanted_bytes=draw.choice([1, 1 << 40]), level=level)
            )
        reports += step(engine)
    expected = {rid: tokens_of(run_alone(rid), rid) for rid in "abc"}
    for rid in "abc":
        assert tokens_of(reports, rid) == expected[rid]
    assert sum(isinstance(one, RowFinished) for one in reports) == 3
    changes = [one for one in reports if isinstance(one, (RowPreempted, RowResumed))]
    for rid in "abc":
        kinds = [type(one) for one in changes if one.rid == rid]
        assert kinds == [RowPreempted, RowResumed] * (len(kinds) // 2)
    assert {one.where for one in changes if isinstance(one, RowPreempted)} == {"disk"}
    longest = max(len(tokens) for tokens in expected.values())
    assert len(changes) <= 3 * 2 * (1 + longest // 16)


def run_alone(rid):
    engine = loaded("tps=0", prefill_chunk=256)
    engine.submit(submit(rid, rid * 1024, max_tokens=640))
    return run(engine)


def test_a_request_from_an_earlier_worker_is_not_preempted_before_it_has_new_tokens(monkeypatch):
    """Two models that unload each other both progress."""
    monkeypatch.setattr(memory_account, "MIN_TOKENS_BETWEEN_PREEMPTIONS", 20)
    engine = loaded("tps=0")
    engine.submit(submit("old", "a" * 200, max_tokens=400, resume=[ChoiceProgress([1] * 9, 0)]))
    for _ in range(5):
        step(engine)
    assert engine.stats().reclaimable.preempt == 0
    _, reports = reclaim(engine, "preempt", PAGE)
    assert not [one for one in reports if isinstance(one, RowPreempted)]
    for _ in range(30):
        step(engine)
    assert engine.stats().reclaimable.preempt > 0


def test_long_answers_share_memory_that_is_too_small_for_all():
    """One is preempted while the others grow; all have their own tokens."""
    engine = loaded("tps=0,pages=1,ahead=128")
    budget = (64 << 20) + 22 * PAGE
    for rid in "abc":
        engine.submit(submit(rid, rid * 100, max_tokens=600))
    reports = []
    for _ in range(20_000):
        if not engine.has_work:
            break
        made = engine.step()
        for report in made:
            if isinstance(report, MemoryRequested):
                engine.granted(grant_within(engine, report, budget))
        reports += made
    alone = loaded("tps=0")
    for rid in "abc":
        alone.submit(submit(rid, rid * 100, max_tokens=600))
    wanted = run(alone)
    assert all(tokens_of(reports, rid) == tokens_of(wanted, rid) for rid in "abc")
    preempted = [one.rid for one in reports if isinstance(one, RowPreempted)]
    assert preempted
    assert "a" not in preempted


def grant_within(engine, report, budget):
    """Grant a memory request up to a budget."""
    granted = report.total_bytes <= budget
    total = report.total_bytes if granted else engine._admission.budget.granted_bytes
    return Grant(seq=report.seq, total_bytes=total, granted=granted, limit_bytes=budget)
