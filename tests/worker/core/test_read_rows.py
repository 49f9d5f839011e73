"""A row that is read from segments has no slots before the prefill of the prompt's rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.worker.cache.layer import LayerStore
from kvd.worker.cache.tails import TailSlots
from kvd.worker.core import pace, reclaiming, segment_reads
from protocol.worker import Reclaim, StartLevel
from tests.worker import shallow
from tests.worker.core.driver import Driver, Outcome
from tests.worker.core.faults import LATE, UNABLE, memory_runs_out
from tests.worker.core.faulty_disk.disk import settle
from tests.worker.core.prompts import prompt_of
from tests.worker.core.segments import KV, Clock, Engine, Store, alone

pytestmark = pytest.mark.mlx

PROMPT = prompt_of(1400, 5)
STORED = 1280
OTHER = prompt_of(40, 20)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    found = Engine(Store(tmp_path_factory.mktemp("segments")), clock=Clock())
    found.alone(PROMPT, max_tokens=2)
    found.write_all()
    return found


@pytest.fixture(scope="module")
def wanted() -> Outcome:
    return alone(Driver(shallow.path(), kv=KV), PROMPT)


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """An engine that has read once, whose memory is empty and whose store has the prompt."""
    shared.forget()
    alone(shared, PROMPT)
    shared.forget()
    yield shared
    settle(shared)
    shared.forget()
    shared.outcomes.clear()
    shared.preemptions.clear()
    assert shared.engine._runner.cache.usage.pages_used == 0
    assert not shared.engine._runner.cache.sequences


def read(engine: Engine) -> None:
    """Submit the prompt as "r", and step until it is read and not prefilled further."""
    reads = len(engine.store.used)
    engine.submit("r", PROMPT, max_tokens=12, logprobs=2)
    engine.run(until=lambda: len(engine.store.used) > reads)
    row = engine.engine._batch.requests["r"].row
    assert row.length == STORED
    assert not row.is_placed


def test_a_read_waits_for_no_step(
    engine: Engine, wanted: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even at its begin and its end: no tail is written, and none copied."""
    monkeypatch.setattr(pace, "MOST_SECONDS", 0.0)
    batch = engine.engine._batch
    engine.submit("other", OTHER, max_tokens=200)
    engine.run(until=lambda: len(engine.outcomes["other"].tokens) > 30)
    calls: list[str] = []
    for owner, name in (
        (batch, "synchronize"),
        (TailSlots, "take"),
        (LayerStore, "copy_tail"),
        (LayerStore, "write_record"),
    ):
        plain = getattr(owner, name)

        def call(*args, plain=plain, name=name):
            calls.append(name)
            return plain(*args)

        monkeypatch.setattr(owner, name, call)
    read(engine)
    assert set(calls) == {"write_record"}
    assert batch.in_flight, "the pipeline was not drained"
    assert len(batch.prefix_cache.tree) == 1, "the prefix is in memory from now on"
    engine.step()
    assert calls.count("take") == 1
    engine.run(until=lambda: engine.outcomes["r"].over)
    assert engine.outcomes["r"] == wanted
    engine.engine.cancel("other")
    engine.run()


def test_a_row_without_slots_is_preempted_and_resumes(engine: Engine, wanted: Outcome) -> None:
    read(engine)
    engine.preempt("r")
    engine.engine._prefix_cache.tree.clear()
    assert engine.engine._batch.requests["r"].snapshot.length == STORED
    engine.requeue("r")
    engine.run()
    assert engine.preemptions["r"] == ["resumed"]
    assert engine.outcomes["r"] == wanted
    assert engine.outcomes["r"].cached == STORED


def test_a_request_that_ends_before_its_row_has_slots_leaves_nothing(engine: Engine) -> None:
    read(engine)
    engine.engine.cancel("r")
    engine.run()
    assert engine.outcomes["r"].reason == "cancelled"


@pytest.mark.parametrize("text", [UNABLE, LATE])
def test_a_row_without_slots_is_rebuilt_after_a_step_without_memory(
    engine: Engine, wanted: Outcome, text: str
) -> None:
    read(engine)
    with memory_runs_out(lambda number: number == 1, text) as evaluations:
        engine.step()
    assert evaluations.failed == 1
    engine.run()
    assert engine.outcomes["r"] == wanted


def test_tails_are_cut_around_a_row_without_slots(engine: Engine, wanted: Outcome) -> None:
    """As when memory is reclaimed: the other row moves to the first slot."""
    engine.submit("gone", OTHER, max_tokens=3)
    engine.submit("other", OTHER, max_tokens=60)
    engine.run(until=lambda: engine.outcomes["gone"].over)
    read(engine)
    batch = engine.engine._batch
    batch.finish_step()
    assert batch.cache.tail_slots == 2
    batch.cache.cut_tails()
    assert batch.cache.tail_slots == 1
    engine.check()
    engine.run()
    assert engine.outcomes["r"] == wanted


def test_a_read_that_has_not_begun_steps_down_with_what_shares_its_pages(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row already has the pages of a checkpoint that a running request shares."""
    batch, scheduler = engine.engine._batch, engine.engine._scheduler
    shares = [*PROMPT[:768], *OTHER[:5]]
    engine.submit("shares", shares, max_tokens=200, ignore_eos=True)
    engine.run(until=lambda: len(engine.outcomes["shares"].tokens) > 2)
    with monkeypatch.context() as patch:
        patch.setattr(batch, "must_flush", lambda _decode: True)
        engine.submit("r", PROMPT, max_tokens=12, priority=1)
        engine.run(until=lambda: "r" in batch.transfers.reading)
        (row,) = batch.transfers.reading["r"].sequences
        assert row.length == 768
        engine.engine.reclaim(Reclaim(seq=1, method="precision", wanted_bytes=1, level=2))
        engine.run(until=lambda: not engine.engine._reclaiming.active)
    engine.run(until=lambda: batch.requests["r"].begun)
    levels = {page.level for page in batch.requests["r"].completions[0].row.rows[0].pages}
    assert levels == {scheduler.find("r").level} == {2}
    engine.engine.cancel("shares")
    engine.run()
    assert engine.outcomes["r"].usage.levels == [2]
    engine.engine.start_level(StartLevel(level=0))


def test_a_prompt_that_begins_during_a_step_down_takes_no_page_of_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reclaim ends its read, and a checkpoint shares pages with the request that is lowered."""
    monkeypatch.setattr(pace, "MOST_SECONDS", 0.0)
    monkeypatch.setattr(segment_reads, "RECLAIM_SECONDS", 0.0)
    batch, work = engine.engine._batch, engine.engine._reclaiming
    shares = [*PROMPT[:768], *OTHER[:5]]
    engine.submit("shares", shares, max_tokens=200, ignore_eos=True)
    engine.run(until=lambda: len(engine.outcomes["shares"].tokens) > 2)
    engine.submit("r", PROMPT, max_tokens=12, priority=1)
    engine.run(until=lambda: engine.engine._preemption.delays_reclaim)
    choose = work._choose

    def choose_and_pause(*given):
        assert not batch.transfers.reading, "the read has ended, and the prompt has not begun again"
        monkeypatch.setattr(reclaiming, "MIN_WORK_SECONDS", 0.0)  # one piece a step
        monkeypatch.setattr(reclaiming, "STEP_SHARE", 0.0)
        work._work_until = 0.0
        return choose(*given)

    monkeypatch.setattr(work, "_choose", choose_and_pause)
    monkeypatch.setattr(reclaiming, "MIN_WORK_SECONDS", 60.0)
    engine.engine.reclaim(Reclaim(seq=1, method="precision", wanted_bytes=1, level=2))
    engine.run(until=lambda: not work.active)
    engine.run(until=lambda: batch.requests["r"].begun)

    levels = {page.level for page in batch.requests["r"].completions[0].row.rows[0].pages}
    assert levels == {0}
    engine.engine.cancel("shares")
    engine.run()
    assert engine.outcomes["r"].usage.levels == [0]
    engine.engine.start_level(StartLevel(level=0))
