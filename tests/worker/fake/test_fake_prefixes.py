"""The prefix cache of the fake engine: hits, one prefill of a shared prefix, and eviction."""

from __future__ import annotations

from protocol.kv import KVSpec
from protocol.worker import Grant, MemoryRequested, RowFinished
from tests.worker.fake.test_fake_engine import ends_of, loaded, run
from tests.worker.process.peer import submit

SHARED = "The same beginning of every request. " * 40


def cached_of(reports):
    return {one.rid: one.usage.cached_tokens for one in ends_of(reports)}


def test_cached_tokens_count_prefix_hits_with_the_same_salt():
    engine = loaded()
    for number, salt in enumerate([None, None, "other"]):
        prompt = f"{SHARED}{number}"
        engine.submit(submit("a", prompt=prompt, max_tokens=2, prefix_salt=salt))
        assert cached_of(run(engine)) == {"a": [0, 1280, 0][number]}
    stats = engine.stats()
    assert (stats.prefix.queries, stats.prefix.hit_tokens) == (3, 1280)
    assert stats.prefix.query_tokens == stats.prompt_tokens == 3 * len(SHARED) + 3
    assert stats.computed_tokens + stats.prefix.hit_tokens == stats.prompt_tokens - 3
    assert stats.prefix.held == (20 + 20) * 64 * 1024  # 20 pages of each salt


def test_simultaneous_requests_prefill_a_shared_prefix_once():
    engine = loaded()
    for number in range(32):
        engine.submit(submit(f"{number:02}", prompt=f"{SHARED}{number:02}", max_tokens=2))
    cached = cached_of(run(engine))
    assert sorted(cached.values()) == [0] + [1280] * 31
    stats = engine.stats()
    assert stats.computed_tokens == 1280 + 32 * (len(SHARED) + 1 - 1280)


def test_without_a_prefix_cache_there_are_no_checkpoints():
    engine = loaded(kv=KVSpec(prefix_cache=0))
    for number in range(2):
        engine.submit(submit(f"{number}", prompt=SHARED, max_tokens=2))
    assert set(cached_of(run(engine)).values()) == {0}
    assert engine.stats().prefix.checkpoints == 0


def test_checkpoints_are_evicted_for_requests():
    engine = loaded("tps=0,pages=40")
    engine.submit(submit("a", prompt=SHARED, max_tokens=2))
    run(engine)
    assert engine.stats().prefix.checkpoints
    engine.submit(submit("b", prompt="another " * 300, max_tokens=2))
    ends = []
    while engine.has_work:
        for report in engine.step():
            if isinstance(report, MemoryRequested):
                total = engine._admission.budget.granted_bytes
                less = report.total_bytes <= total
                total = report.total_bytes if less else total
                engine.granted(Grant(seq=report.seq, total_bytes=total, granted=less))
            ends.append(report)
    assert [type(one) for one in ends_of(ends)] == [RowFinished]
    assert engine.stats().prefix.evicted


def test_checkpoints_never_exceed_the_grant():
    """Rows of 65 tokens reserve no page, but their checkpoints take one each."""
    engine = loaded("tps=0,weights=0,page_bytes=1000,pages=2", prefill_chunk=64)
    for number in range(4):
        engine.submit(submit(f"{number}", prompt=f"{number}" * 65, max_tokens=2))
        run(engine)
        stats = engine.stats()
        assert stats.prefix.held <= stats.pages_total * 1000
    assert stats.prefix.evicted > 0
