"""The fake engine under pressure: what it offers it gives, and no request loses a token."""

from __future__ import annotations

import random

import pytest

from kvd.worker.core import memory_account
from protocol.types import KVSpec
from protocol.worker import (
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
    """Three rows of 1664 tokens, 25 pages each; their prompts are read."""
    engine = loaded("tps=0,pages=8", prefill_chunk=256, **fields)
    for rid in "abc":
        engine.submit(submit(rid, rid * 1024, max_tokens=640))
    reports = []
    while engine.stats().generated_tokens < 30:
        reports += answered(engine)
    return engine, reports


def answered(engine):
    made = engine.step()
    for report in made:
        if isinstance(report, MemoryRequested):
            engine.granted(grant_of(report))
    return made


def reclaim(engine, method, wanted, level=0):
    engine.reclaim(Reclaim(seq=3, method=method, wanted_bytes=wanted, level=level))
    reports = answered(engine)
    return next(one for one in reports if isinstance(one, Reclaimed)), reports


def test_each_means_gives_what_it_promised():
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


def test_a_wish_says_what_could_be_given_back_and_whether_it_is_for_a_parked_row():
    engine, reports = filled(kv=KVSpec(prefix_cache=0))
    wishes = [one for one in reports if isinstance(one, MemoryRequested)]
    assert wishes[-1].reclaimable.base == 64 << 20
    assert not any(one.resuming for one in wishes)
    _, reports = reclaim(engine, "preempt", 1 << 40)
    reports += answered(engine)
    wishes = [one for one in reports if isinstance(one, MemoryRequested)]
    assert wishes[-1].resuming
    assert wishes[-1].reclaimable.waiting == 3


def test_new_rows_start_lower_until_pressure_is_over():
    engine, _ = filled()
    engine.start_level(StartLevel(level=9))
    engine.submit(submit("d", "d" * 640, max_tokens=640))
    answered(engine)
    answered(engine)
    assert engine.stats().reclaimable.level == engine._scheduler.find("d").level == 2
    engine.start_level(StartLevel(level=0))
    engine.submit(submit("e", "e" * 640, max_tokens=640))
    answered(engine)
    answered(engine)
    assert engine._scheduler.find("e").level == 0
    run(engine)


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_are_parked_again_and_again_get_the_same_tokens(seed, monkeypatch):
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
        reports += answered(engine)
    wanted = {rid: tokens_of(run_alone(rid), rid) for rid in "abc"}
    for rid in "abc":
        assert tokens_of(reports, rid) == wanted[rid]
    assert sum(isinstance(one, RowFinished) for one in reports) == 3
    story = [one for one in reports if isinstance(one, (RowPreempted, RowResumed))]
    for rid in "abc":
        mine = [type(one) for one in story if one.rid == rid]
        assert mine == [RowPreempted, RowResumed] * (len(mine) // 2)
    assert {one.where for one in story if isinstance(one, RowPreempted)} == {"disk"}
    made = max(len(tokens) for tokens in wanted.values())
    assert len(story) <= 3 * 2 * (1 + made // 16)


def run_alone(rid):
    engine = loaded("tps=0", prefill_chunk=256)
    engine.submit(submit(rid, rid * 1024, max_tokens=640))
    return run(engine)
