"""Prefixes that lead to bad logits: they are not written, and stored ones are dropped."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from protocol.segments import segment_path
from tests.worker.core.prompts import prompt_of
from tests.worker.core.segments import Clock, Engine, Store

pytestmark = pytest.mark.mlx


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def poison_pages(engine: Engine) -> None:
    """Put NaN into all pages of the engine's first layer."""
    for pool in engine.engine._runner.cache.stores[0].layers[0].pools:
        scales = pool.values[-1]
        scales[:] = mx.nan
        mx.eval(scales)


def test_a_stored_prefix_that_gives_bad_logits_is_dropped(store: Store) -> None:
    prompt = prompt_of(700, 1)
    first = Engine(store, clock=Clock())
    wanted = first.alone(prompt, max_tokens=12, logprobs=2)
    poison_pages(first)
    first.write_all()
    (stored,) = store.segments

    second = Engine(store, clock=Clock())
    failed = second.alone(prompt, max_tokens=12, logprobs=2)
    assert failed.error is not None
    assert failed.error.code == "numerical_error"
    assert [one.key for one in store.damaged] == [stored]
    found = second.alone(prompt, max_tokens=12, logprobs=2)
    assert found.cached == 0
    assert found == wanted


def test_a_prefix_is_dropped_that_was_being_written_when_its_logits_were_bad(store: Store) -> None:
    prompt = prompt_of(1200, 1)
    engine = Engine(store, clock=Clock())
    engine.alone(prompt, max_tokens=2)
    engine.engine.drain(60)
    segments = engine.engine._segments
    engine.run(until=lambda: segments._offer is not None and segments._offer.writer is not None)
    tracked = engine.engine._prefix_cache.track("r", prompt, "", full_prefill=False)
    engine.engine._batch.on_untrusted(tracked.path)
    engine.write_all()
    (stored,) = store.segments
    assert segment_path(store.folder, stored).exists()
    assert [one.key for one in store.damaged] == [stored]


def test_a_prefix_is_written_only_after_good_logits(store: Store) -> None:
    engine = Engine(store, clock=Clock())
    engine.submit("r", prompt_of(2000, 1), max_tokens=4)
    tree = engine.engine._prefix_cache.tree
    engine.run(until=lambda: len(tree) > 0)
    assert not engine.outcomes["r"].tokens
    engine.engine.cancel("r")
    engine.run()
    engine.alone(prompt_of(1500, 2), max_tokens=1)
    assert len(tree) == 3
    engine.write_all()
    assert sorted(one.segment.tokens for one in store.offered) == [1280]

    engine.alone([*prompt_of(2000, 1), 5], max_tokens=1)
    engine.write_all()
    assert len(store.segments) > 1


def test_checkpoints_that_a_recomputed_request_leaves_again_are_written(store: Store) -> None:
    engine = Engine(store, clock=Clock())
    engine.submit("r", prompt_of(2000, 1), max_tokens=40)
    engine.run(until=lambda: len(engine.outcomes["r"].tokens) > 2)
    engine.preempt("r")
    batch = engine.engine._batch
    engine.engine._preemption.rows.move_out(batch.requests["r"], None)
    engine.engine._prefix_cache.evict(1 << 40)
    assert not len(engine.engine._prefix_cache.tree)
    engine.requeue("r")
    engine.run()
    engine.write_all()
    assert store.segments


def test_bytes_after_the_end_mark_are_damage(store: Store) -> None:
    prompt = prompt_of(1200, 1)
    first = Engine(store, clock=Clock())
    wanted = first.alone(prompt, max_tokens=6)
    first.write_all()
    (stored,) = store.segments
    path = segment_path(store.folder, stored)
    content = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(content + content[-48:])

    second = Engine(store, clock=Clock())
    found = second.alone(prompt, max_tokens=6)
    assert found.error is None
    assert found.tokens == wanted.tokens
    assert [one.key for one in store.damaged] == [stored]
