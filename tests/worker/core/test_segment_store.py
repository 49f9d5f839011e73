"""An engine writes prefixes as segments, and another one continues prompts from them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvd.worker.cache import segment_records
from kvd.worker.cache.layer import LayerStore
from kvd.worker.cache.page_store import PageStore
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.scheme import full_pages
from kvd.worker.core import pace
from kvd.worker.core.segment_reads import _bytes_to_read
from kvd.worker.engine import ignore_phase
from kvd.worker.prefix import segment_files, segment_index
from kvd.worker.prefix.record_memory import RecordMemory
from kvd.worker.prefix.segment_io import NOT_YET, BackgroundReader
from protocol import segment_file
from protocol.key_file import create_key
from protocol.record_format import PLAIN
from protocol.segments import SegmentInfo, segment_path
from protocol.worker import RowTokens
from tests.worker import shallow
from tests.worker.core.driver import Driver
from tests.worker.core.faulty_disk.disk import settle
from tests.worker.core.prompts import prompt_of
from tests.worker.core.segments import KV, Clock, Engine, Store, alone

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def plain() -> Driver:
    return Driver(shallow.path(), kv=KV)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(Store(tmp_path_factory.mktemp("segments")), clock=Clock())


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """An engine whose memory and store are empty."""
    yield shared
    settle(shared)  # otherwise the next test finds what this one has offered
    assert not list(shared.store.folder.rglob("*.part"))
    shared.delete_all()
    assert shared.engine._runner.cache.usage.pages_used == 0


@pytest.fixture
def store(engine: Engine) -> Store:
    return engine.store


def kept(engine: Engine, *prompts: list[int]) -> Engine:
    """Write the prefixes of prompts and forget them, as a worker that is loaded again."""
    for prompt in prompts:
        engine.alone(prompt, max_tokens=2)
        engine.write_all()
    engine.forget()
    return engine


def test_a_second_engine_continues_from_the_first_ones_prefixes(
    tmp_path: Path, plain: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real clock: both measure how fast they prefill and read."""
    monkeypatch.setattr(segment_index, "MIN_SECONDS", 0.0)  # fast machines prefill this in 0.2 s
    store = Store(tmp_path)
    prompt = prompt_of(2000, 1)
    first = Engine(store)
    first.alone(prompt, max_tokens=4)
    first.write_all()
    assert [one.segment.tokens for one in store.offered] == [1792]
    longer = prompt + prompt_of(900, 2)
    first.alone(longer, max_tokens=4)
    first.write_all()
    assert sorted(one.tokens for one in store.segments.values()) == [1792, 2816]
    (leaf,) = [one for one in store.segments.values() if one.base is not None]
    assert store.segments[leaf.base].tokens == 1792

    second = Engine(store)
    for text, cached in (
        ([*longer, 7, 8], 2816),
        (prompt, 1792),
        (prompt + prompt_of(600, 3), 1792),
    ):
        second.engine._prefix_cache.tree.clear()
        found = second.alone(text, max_tokens=12, logprobs=2)
        assert found.cached == cached
        assert found == alone(plain, text)
    assert [one.tokens for one in store.used] == [2816, 1792, 1792]
    assert all(one.seconds > 0 and one.prefill_s > 0 for one in store.used)
    assert not store.damaged


def test_memory_disk_and_prefill_each_give_a_part(
    engine: Engine, store: Store, plain: Driver
) -> None:
    prompt = prompt_of(1400, 1)
    kept(engine, prompt)
    use = engine.engine._prefix_cache.usage
    before = use.hit_tokens, use.disk_tokens
    engine.alone(prompt[:600], max_tokens=2)
    found = engine.alone([*prompt, 5, 6], max_tokens=12, logprobs=2)
    assert found.cached == 1280
    assert found == alone(plain, [*prompt, 5, 6])
    assert store.used[-1].tokens == 1280 - 512
    assert store.used[-1].nbytes > 0
    use = engine.engine._prefix_cache.usage
    parts = [(part.reason, part.tokens) for part in engine.found["alone"].parts]
    assert parts == [("memory", 512), ("disk", 768), ("end", 122)]
    found_tokens = use.hit_tokens - before[0], use.disk_tokens - before[1]
    assert found_tokens == (512, 1280 - 512)


def test_half_of_a_segment_is_read_if_memory_has_the_other_half(
    engine: Engine, store: Store, plain: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread reads one record ahead, so it learns in time what is not needed."""

    def one_ahead(folder, keys, open_records, _memory, **more):
        return BackgroundReader(folder, keys, open_records, RecordMemory(1), **more)

    monkeypatch.setattr(segment_files, "BackgroundReader", one_ahead)
    prompt = prompt_of(4700, 5)
    kept(engine, prompt)
    (segment,) = store.segments.values()
    assert segment.tokens == 4608
    engine.alone(prompt[:3700], max_tokens=2)  # leaves a checkpoint at 3584
    del store.used[:]
    found = engine.alone(prompt, max_tokens=12, logprobs=2)
    assert found == alone(plain, prompt)
    (used,) = store.used
    assert used.tokens == 1024
    assert used.nbytes < 0.4 * segment.nbytes


def test_what_memory_has_counts_as_no_byte_to_read(
    engine: Engine, store: Store, plain: Driver
) -> None:
    """Reading all of the segment would take twice as long as prefilling what memory lacks."""
    prompt = prompt_of(4700, 5)
    kept(engine, prompt)
    (segment,) = store.segments.values()
    engine.alone(prompt[:3700], max_tokens=2)  # leaves a checkpoint at 3584
    del store.used[:]
    rates = engine.engine._rates
    lacking_s = rates.seconds("prefill", segment.tokens - 3584)
    rates._measured["read"] = segment.nbytes / (2 * lacking_s)
    found = engine.alone(prompt, max_tokens=12, logprobs=2)
    rates._measured.clear()
    assert found == alone(plain, prompt)
    assert [one.tokens for one in store.used] == [segment.tokens - 3584]


@pytest.mark.parametrize(
    ("held", "nbytes"),
    [(0, 500 + 1000), (512, 500), (768, 500 / 2), (900, 500 * 124 / 512)],
)
def test_bytes_that_a_prefix_needs_of_its_segments(held: int, nbytes: float) -> None:
    base = SegmentInfo(key=b"base", base=None, tokens=512, nbytes=1000)
    leaf = SegmentInfo(key=b"leaf", base=b"base", tokens=1024, nbytes=500)
    assert _bytes_to_read([leaf, base], held) == int(nbytes)
    longer = SegmentInfo(key=b"longer", base=None, tokens=2048, nbytes=4000)
    tail = SegmentInfo(key=b"tail", base=b"longer", tokens=1024, nbytes=0)
    assert _bytes_to_read([tail, longer], held) == 4000 * (1024 - held) // 2048


def test_each_byte_is_copied_once_from_memory_that_all_records_share(
    engine: Engine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(4700, 5)
    kept(engine, prompt)
    (segment,) = store.segments.values()
    memory = RecordMemory(3 * segment.nbytes // 40)  # less than the file: it is used again
    files = engine.engine._prompts.segments._files
    monkeypatch.setattr(files, "_memory", memory)
    write_record, copied = LayerStore.write_record, []

    def write(layer, level, slots, record):
        block = np.frombuffer(memory._block, np.uint8)
        assert np.shares_memory(np.frombuffer(record, np.uint8), block)
        copied.append(len(record))
        write_record(layer, level, slots, record)

    monkeypatch.setattr(LayerStore, "write_record", write)
    engine.alone(prompt, max_tokens=2)
    (page_store,) = engine.engine._runner.cache.stores
    pages = full_pages(segment.tokens) * page_store.pages.page_bytes()
    assert sum(copied) == pages
    assert max(copied) <= memory.nbytes < pages // 2
    assert not memory.is_open, "an idle engine has freed it"


def test_prompts_that_end_near_a_stored_end(engine: Engine, store: Store, plain: Driver) -> None:
    """A prompt's last token is decoded, so a prefix of the whole prompt is not used."""
    prompt = prompt_of(600, 1)
    kept(engine, prompt)
    assert [one.tokens for one in store.segments.values()] == [512]
    for length in (511, 512, 513, 512 + 63, 512 + 64, 512 + 65):
        found = alone(engine, prompt[:length])
        assert found.cached == (512 if length > 512 else 0)
        assert found == alone(plain, prompt[:length])


def test_a_shorter_prefix_is_read_if_the_longer_one_is_damaged(
    engine: Engine, store: Store, plain: Driver
) -> None:
    prompt = prompt_of(1200, 1)
    kept(engine, prompt[:600], prompt)
    base, leaf = sorted(store.segments.values(), key=lambda one: one.tokens)
    assert leaf.base == base.key
    path = segment_path(store.folder, leaf.key)
    path.write_bytes(path.read_bytes()[:-100])

    found = engine.alone(prompt, max_tokens=12, logprobs=2)
    assert found.cached == base.tokens == 512
    assert found == alone(plain, prompt)
    assert [one.key for one in store.damaged] == [leaf.key]


def test_other_rows_decode_while_a_prefix_is_read(
    engine: Engine, store: Store, plain: Driver
) -> None:
    prompts = [prompt_of(600 + 100 * number, number) for number in range(3)]
    kept(engine, *prompts)
    wanted = [alone(plain, prompt) for prompt in prompts]
    others = [prompt_of(40, 20 + number) for number in range(3)]
    wanted += [plain.alone(other, max_tokens=40) for other in others]

    for number, other in enumerate(others):
        engine.submit(f"other{number}", other, max_tokens=40)
    for _ in range(4):
        engine.step()
    for number, prompt in enumerate(prompts):
        engine.submit(f"r{number}", prompt, max_tokens=12, logprobs=2)
    engine.run()
    found = [engine.outcomes[f"r{number}"] for number in range(3)]
    found += [engine.outcomes[f"other{number}"] for number in range(3)]
    assert found == wanted
    assert [one.cached for one in found[:3]] == [512, 512, 768]


def noted(monkeypatch: pytest.MonkeyPatch, steps: list[set[str]], owner: Any, name: str) -> None:
    """Note calls of a method in the last of ``steps``."""
    plain_method = getattr(owner, name)

    def call(*args, **more):
        steps[-1].add(name)
        return plain_method(*args, **more)

    monkeypatch.setattr(owner, name, call)


def test_pools_grow_for_a_read_behind_the_steps(
    engine: Engine, store: Store, plain: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One piece grows in a step. Earlier reads have shown how long that takes."""
    prompt, other = prompt_of(6000, 5), prompt_of(40, 20)
    engine.engine._prompts.segments._growth._measured[:] = [1e-9, 1e-9]
    wanted = alone(plain, prompt), plain.alone(other, max_tokens=200)
    kept(engine, prompt)
    monkeypatch.setattr(pace, "MOST_SECONDS", 0.0)
    batch, steps = engine.engine._batch, [set[str]()]
    batch.cache.shrink()
    noted(monkeypatch, steps, PagePool, "resize")
    noted(monkeypatch, steps, PagePool, "resize_behind_steps")
    noted(monkeypatch, steps, batch, "synchronize")
    engine.submit("other", other, max_tokens=200)
    while len(engine.outcomes["other"].tokens) < 30:
        engine.step()
    engine.submit("r", prompt, max_tokens=12, logprobs=2)
    del steps[:]
    reads = len(store.used)
    while len(store.used) == reads:
        steps.append(set())
        engine.step()
    growing = [step for step in steps if "resize_behind_steps" in step]
    steps.append(set())
    engine.run()

    assert (engine.outcomes["r"], engine.outcomes["other"]) == wanted
    assert len(growing) == 2 * len(batch.cache.stores[0].layers)
    assert growing == [{"resize_behind_steps"}] * len(growing)


def test_a_transfer_that_always_has_work_does_not_keep_pools_from_growing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next flush would copy the pools of all layers."""
    pool = engine.engine._batch.cache.stores[0]
    engine.submit("r", prompt_of(70, 5), max_tokens=200)
    while len(engine.outcomes["r"].tokens) < 10:
        engine.step()
    monkeypatch.setattr(engine, "check", lambda: None)  # no row has these pages:
    taken = pool.pages.take(0, pool.pages.allocators[0].free)
    steps = [set[str]()]
    noted(monkeypatch, steps, PageStore, "_grow")
    flushes = pool.flushes
    work = itertools.takewhile(lambda _: pool.flushes == flushes, itertools.repeat(0.0))
    engine.engine._preemption.start("another", work)
    while pool.flushes == flushes:
        engine.step()

    assert steps == [set()]
    pool.pages.release(taken)
    engine.run()


def test_tokens_are_sent_before_a_read_waits_for_the_step_in_flight(
    engine: Engine, store: Store, plain: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, other = prompt_of(4700, 5), prompt_of(40, 20)
    wanted = alone(plain, prompt), plain.alone(other, max_tokens=200)
    kept(engine, prompt)
    batch, unsent = engine.engine._batch, list[int]()
    batch.cache.shrink()
    engine.engine._prompts.segments._growth._measured.clear()  # growth is waited for
    synchronize, read = batch.synchronize, batch.transfers.reading

    def noted() -> None:
        if read:
            unsent.append(sum(isinstance(report, RowTokens) for report in batch.reports))
        synchronize()

    monkeypatch.setattr(batch, "synchronize", noted)
    engine.engine.watch(ignore_phase, engine.take)
    engine.submit("other", other, max_tokens=200)
    while len(engine.outcomes["other"].tokens) < 70:
        engine.step()
    engine.submit("r", prompt, max_tokens=12, logprobs=2)
    engine.run()
    engine.engine.watch(ignore_phase)

    assert (engine.outcomes["r"], engine.outcomes["other"]) == wanted
    assert unsent
    assert not any(unsent)


def test_copies_wait_for_no_step_and_pause_before_one_that_writes_pages(
    engine: Engine, store: Store, plain: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One record is copied in a step, and rows that decode write a page about every 64 steps."""
    monkeypatch.setattr(segment_records, "RECORD_PAGES", 4)
    prompt, other = prompt_of(5700, 5), prompt_of(40, 20)  # 66 records
    wanted = alone(plain, prompt), plain.alone(other, max_tokens=400)
    kept(engine, prompt)
    monkeypatch.setattr(pace, "MOST_SECONDS", 0.0)
    batch, steps = engine.engine._batch, [set[str]()]
    noted(monkeypatch, steps, LayerStore, "write_record")
    noted(monkeypatch, steps, batch, "synchronize")
    noted(monkeypatch, steps, batch.cache, "flush")
    engine.submit("other", other, max_tokens=400)
    engine.submit("another", prompt_of(72, 21), max_tokens=400)
    while len(engine.outcomes["other"].tokens) < 70:
        engine.step()
    request = engine.engine._admission.request_spare(256, engine.engine._memory.held())
    engine.take([] if request is None else [request])  # for the read, and for the next flush
    engine.submit("r", prompt, max_tokens=12, logprobs=2)
    while not engine.outcomes["r"].tokens:
        steps.append(set())
        engine.step()
    engine.run()

    assert (engine.outcomes["r"], engine.outcomes["other"]) == wanted
    copying = [at for at, step in enumerate(steps) if "write_record" in step]
    writing = [at for at, step in enumerate(steps) if "flush" in step]
    assert len(copying) == 66
    assert any(copying[0] < at < copying[-1] for at in writing), "the row has written a page"
    assert not {at - 1 for at in writing}.intersection(copying)
    waiting = [at for at in range(copying[0], copying[-1] + 1) if "synchronize" in steps[at]]
    assert [at for at in waiting if at not in writing] == []


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "other", "longer", "index"])
def test_a_damaged_segment_is_a_miss(
    engine: Engine, store: Store, plain: Driver, damage: str
) -> None:
    prompt = prompt_of(700, 1)
    kept(engine, prompt, prompt_of(700, 2))
    assert len(store.segments) == 2
    for segment in list(store.segments.values()):
        path = segment_path(store.folder, segment.key)
        content = bytearray(path.read_bytes())
        match damage:
            case "cut":
                path.write_bytes(content[: random.Random(1).randrange(len(content))])
            case "flip":
                content[len(content) // 2] ^= 16
                path.write_bytes(content)
            case "gone":
                path.unlink()
            case "longer":
                path.write_bytes(content + content[-48:])
            case "index":  # its file in the daemon has no checksums
                wrong = replace(segment, nbytes=segment.nbytes - 256)
                store.segments[segment.key] = wrong
            case "other":
                *_, other = (one for one in store.segments if one != segment.key)
                path.write_bytes(segment_path(store.folder, other).read_bytes())

    engine.forget()
    found = engine.alone(prompt, max_tokens=12, logprobs=2)
    assert found.cached == 0
    assert found == alone(plain, prompt)
    assert [one.key in store.segments for one in store.damaged] == [True]


def test_a_wrong_base_in_the_index_is_a_miss(engine: Engine, store: Store, plain: Driver) -> None:
    prompt, other = prompt_of(600, 1), prompt_of(600, 9)
    longer = prompt + prompt_of(600, 2)
    kept(engine, prompt, other, longer)
    (leaf,) = [one for one in store.segments.values() if one.base is not None]
    (foreign,) = store.segments.keys() - {leaf.key, leaf.base}
    store.segments[leaf.key] = replace(leaf, base=foreign)

    engine.forget()
    found = engine.alone([*longer, 7, 8], max_tokens=12, logprobs=2)
    assert found == alone(plain, [*longer, 7, 8])
    assert [one.key for one in store.damaged] == [leaf.key]


def test_a_cancelled_request_frees_what_was_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(1200, 1)
    kept(engine, prompt)
    taken, next_record = [], BackgroundReader.next_record

    def three_records(reader: BackgroundReader) -> object:
        if len(taken) == 3 or (record := next_record(reader)) is NOT_YET:
            return NOT_YET
        taken.append(record)
        return record

    with monkeypatch.context() as patch:
        patch.setattr(BackgroundReader, "next_record", three_records)
        engine.submit("r", prompt, max_tokens=4)
        while len(taken) < 3:
            engine.step()
        assert engine.engine._transfers.reading
    engine.engine.cancel("r")
    engine.run()
    assert engine.outcomes["r"].reason == "cancelled"
    assert not engine.engine._transfers.reading
    assert engine.engine._runner.cache.usage.pages_used == 0


def windows(records: list[bytes]) -> Iterator[bytes]:
    """Yield samples of 24 bytes that are in no other file by chance."""
    for record in records:
        for at in range(0, len(record) - 24, max(24, len(record) // 20)):
            if len(set(sample := record[at : at + 24])) > 8:
                yield sample


def test_encrypted_segments_restore_the_same_and_reveal_nothing(
    engine: Engine, tmp_path: Path, plain: Driver
) -> None:
    prompt = prompt_of(700, 1)
    key_file = tmp_path / "prefixes.key"
    create_key(key_file)
    bare, encrypted = engine.store, Store(tmp_path / "encrypted", key_file)
    encrypted.folder.mkdir()
    second = Engine(encrypted, clock=Clock())
    kept(engine, prompt)
    kept(second, prompt)
    ((bare_key, bare_segment),) = bare.segments.items()
    ((key, segment),) = encrypted.segments.items()
    assert segment.tokens == bare_segment.tokens
    assert segment.nbytes == bare_segment.nbytes + 32, "the salt is all that is added"
    assert key != bare_key, "who knows a prompt could tell that it is stored"

    content = segment_path(encrypted.folder, key).read_bytes()
    bare_path = segment_path(bare.folder, bare_key)
    records = [bytes(one) for one in segment_file.read_records(bare_path, PLAIN)]
    header = segment_file.read_header(bare_path, PLAIN)
    samples = [*windows(records), header.space, header.key, b"length", b"pages"]
    assert len(samples) > 80
    assert all(sample in bare_path.read_bytes() for sample in samples)
    assert not [sample for sample in samples if sample in content]

    found = second.alone([*prompt, 5, 6], max_tokens=12, logprobs=2)
    assert found.cached == segment.tokens
    assert found == alone(plain, [*prompt, 5, 6])

    key_file.write_bytes(bytes(32))
    found = Engine(encrypted, clock=Clock()).alone([*prompt, 5, 6], max_tokens=12, logprobs=2)
    assert found.cached == 0, "with another key nothing is stored under this name"
    assert found == alone(plain, [*prompt, 5, 6])


def test_without_a_usable_key_an_engine_neither_writes_nor_reads(
    tmp_path: Path, plain: Driver
) -> None:
    prompt = prompt_of(700, 1)
    store = Store(tmp_path, tmp_path / "prefixes.key")
    engine = Engine(store, clock=Clock())
    found = engine.alone(prompt, max_tokens=12, logprobs=2)
    assert found == alone(plain, prompt)
    assert not engine.engine.has_work
    assert not store.offered
    assert not list(tmp_path.iterdir())


def test_a_request_that_is_cancelled_before_the_first_record_leaves_no_page(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(1200, 1)
    kept(engine, prompt)
    with monkeypatch.context() as patch:
        patch.setattr(BackgroundReader, "next_record", lambda _: NOT_YET)
        engine.submit("r", prompt, max_tokens=4)
        while not engine.engine._transfers.reading:
            engine.step()
    engine.engine.cancel("r")
    engine.run()
    assert engine.engine._runner.cache.usage.pages_used == 0


def test_a_refused_segment_is_offered_again_after_a_hit(engine: Engine, store: Store) -> None:
    store.allows = False
    prompt = prompt_of(700, 1)
    engine.alone(prompt, max_tokens=2)
    engine.write_all()
    assert len(store.offered) == 1
    assert not store.segments
    engine.alone([*prompt, 3], max_tokens=2)
    store.allows = True
    engine.run(until=lambda: not engine.engine.has_work)
    engine.write_all()
    assert [one.hits for one in store.offered][:2] == [0, 1]
    assert len(store.segments) == 1
