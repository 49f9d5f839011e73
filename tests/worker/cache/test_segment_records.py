"""Segments of a prompt, read one after another: the restored row continues bit for bit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from kvd.worker.cache import device_copy, segment_records
from kvd.worker.cache.host_copy import COPIED_TOGETHER, copy_pages
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.segment_records import SegmentReader, SegmentRecords, can_extend
from kvd.worker.cache.sequence_snapshots import SequenceSnapshot
from kvd.worker.cache.unplaced_rows import place, unplaced_row
from kvd.worker.serving import probe
from kvd.worker.serving.runner import Row, Runner
from protocol.record_file import DamagedFile
from tests.breadth import part_of
from tests.worker.architectures.reference import TOKENS
from tests.worker.architectures.zoo import build
from tests.worker.cache.invariants import check_cache
from tests.worker.cache.test_snapshot import CHUNK, SETTINGS, decode, disturb, ids

pytestmark = pytest.mark.mlx

CASES = [
    ("qwen3", "plain"),
    ("qwen3", "dense at first"),
    ("gpt_oss", "plain"),
    ("gpt_oss", "bounded"),
    ("gemma3_text", "plain"),
    ("baichuan_m1", "plain"),
    ("qwen3_next", "plain"),
    ("llama4", "plain"),
    ("mamba2", "plain"),
]
ENDS = (128, 320, 704)
PROMPT = ids(ENDS[-1])
MORE = ids(70, 8)
"""Decoded tokens during which a row commits a page. Wrong pages, tails or states show at once."""
SOME = 3


@functools.cache
def runner_of(name: str, how: str) -> Runner:
    served = probe.serve(build(name)[0], SETTINGS[how], TOKENS)
    assert isinstance(served.runner.cache, ModelCache)
    return served.runner


def prefill(runner: Runner, row: Row, start: int, end: int) -> None:
    for at in range(start, end, CHUNK):
        runner.prefill(row, PROMPT[at : at + CHUNK])


def snapshot_of(runner: Runner, length: int) -> SequenceSnapshot:
    """Return a snapshot of the prompt's first tokens."""
    row = runner.cache.new_row()
    prefill(runner, row, 0, length)
    snapshot = runner.cache.snapshots.take(row)
    runner.cache.free(row)
    return snapshot


@functools.cache
def written(runner: Runner) -> tuple[dict[int, list[bytes]], dict[int, int | None], np.ndarray]:
    """Return the records and the base of each segment, and logits after the last."""
    cache = runner.cache
    row = cache.new_row()
    files: dict[int, list[bytes]] = {}
    bases: dict[int, int | None] = {}
    for start, end in itertools.pairwise((0, *ENDS)):
        prefill(runner, row, start, end)
        bases[end] = start if start and can_extend(cache, start, end) else None
        snapshot = cache.snapshots.take(row)
        records = SegmentRecords(cache, snapshot, bases[end] or 0)
        stream = iter(records)
        files[end] = list(itertools.islice(stream, 2))
        disturb(runner)  # moves the pages that are not written yet
        files[end] += stream
        assert sum(map(len, files[end][1:])) == records.nbytes
        cache.snapshots.drop(snapshot)
    (want,) = decode(runner, [row], MORE)
    cache.free(row)
    return files, bases, want


def chain(files: dict[int, list[bytes]], bases: dict[int, int | None], end: int | None):
    while end is not None:
        yield iter(files[end])
        end = bases[end]


class Lent:
    """Records that are valid until the reader yields, like those in the memory of records.

    At most `COPIED_TOGETHER` are valid, as the memory may be needed for others.
    """

    def __init__(self) -> None:
        self._lent: list[bytearray] = []

    def records(self, content: Iterable[bytes]) -> Iterator[memoryview]:
        for record in content:
            self._take_back(COPIED_TOGETHER - 1)
            self._lent.append(bytearray(record))
            yield memoryview(self._lent[-1])

    def take_back(self) -> None:
        self._take_back(0)

    def _take_back(self, kept: int) -> None:
        while len(self._lent) > kept:
            record = self._lent.pop(0)
            record[:] = b"\xff" * len(record)


@pytest.mark.parametrize(
    ("name", "how", "held"),
    [
        (*case, held)
        for case, held in part_of([*itertools.product(CASES, (0, 64, 192, 320, 640))], 3)
    ],
)
def test_a_row_is_extended_from_any_length(name: str, how: str, held: int) -> None:
    """``held`` tokens of the prompt are in memory when the segments are read."""
    runner = runner_of(name, how)
    cache = runner.cache
    files, bases, want = written(runner)
    source = cache.new_row()
    prefill(runner, source, 0, held)
    snapshot = cache.snapshots.take(source)  # shares the row's pages, and must not change
    (kept,) = decode(runner, [source], MORE[:SOME])
    cache.free(source)
    row = unplaced_row(cache, snapshot)
    stranger, lent = cache.new_row(), Lent()
    segments = [lent.records(records) for records in chain(files, bases, ENDS[-1])]
    reader = SegmentReader(cache, row, segments)
    for count, _ in enumerate(reader.run()):
        lent.take_back()
        if count % 8 == 0:
            runner.prefill(stranger, ids(9, count))
            check_cache(cache)
    cache.free(stranger)
    disturb(runner)
    place(cache, row)

    count = len(MORE) if held == 192 else SOME
    (found,) = decode(runner, [row], MORE[:count])
    np.testing.assert_array_equal(found, want[:count])
    cache.free(row)
    again = cache.restore(snapshot)
    cache.snapshots.drop(snapshot)
    (found,) = decode(runner, [again], MORE[:SOME])
    np.testing.assert_array_equal(found, kept)
    cache.free(again)
    cache.shrink()
    assert cache.nbytes == 0


class Device:
    """Copies records only when the reader waits for that, as late as a device may."""

    def __init__(self) -> None:
        self.pending = 0
        self.most = 0
        self._waits = False

    def copy(
        self, arrays: Sequence[mx.array], slots: Sequence[int | None], record: NDArray[np.uint8]
    ) -> Callable[[], None] | None:
        if self._waits:
            return None  # the copy is made on the host
        self.pending += 1
        self.most = max(self.most, self.pending)

        def wait() -> None:
            self._waits = True
            copy_pages(arrays, slots, record.data)
            self._waits = False
            self.pending -= 1

        return wait


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(device_copy, "copy", made.copy)
    return made


@pytest.mark.parametrize(("name", "how"), CASES)
@pytest.mark.parametrize(
    ("held", "together"), [(0, COPIED_TOGETHER), (192, COPIED_TOGETHER), (0, 1)]
)
def test_a_device_copies_several_records_together(
    name: str, how: str, held: int, together: int, device: Device
) -> None:
    """The memory of a record is used again only after its copy has ended."""
    runner = runner_of(name, how)
    cache = runner.cache
    files, bases, want = written(runner)
    snapshot = snapshot_of(runner, held)
    row, lent = unplaced_row(cache, snapshot), Lent()
    segments = [lent.records(records) for records in chain(files, bases, ENDS[-1])]
    reader = SegmentReader(cache, row, segments, together=lambda: together)
    for _ in reader.run():
        assert not device.pending
        lent.take_back()
    assert not device.pending
    place(cache, row)
    (found,) = decode(runner, [row], MORE[:SOME])
    np.testing.assert_array_equal(found, want[:SOME])
    cache.free(row)
    cache.snapshots.drop(snapshot)
    assert device.most <= together
    assert device.most > 1 or together == 1 or name != "qwen3", (
        "other models have few records in a slice"
    )


def test_copies_under_way_end_before_a_read_that_fails(device: Device) -> None:
    runner = runner_of("qwen3", "plain")
    files, bases, _ = written(runner)
    records = [list(one) for one in chain(files, bases, ENDS[-1])]
    for count in range(2, len(records[0])):
        row = unplaced_row(runner.cache)
        device.most = 0
        reader = SegmentReader(
            runner.cache, row, [iter(records[0][:count]), *map(iter, records[1:])]
        )
        with pytest.raises(DamagedFile):
            list(reader.run())
        assert not device.pending
        reader.forget()
    assert device.most
    runner.cache.shrink()


@pytest.mark.parametrize(("name", "how"), CASES)
def test_pages_may_move_between_two_records(name: str, how: str) -> None:
    """As when pools are cut for another request."""
    runner = runner_of(name, how)
    cache = runner.cache
    files, bases, want = written(runner)
    for records in range(2, max(map(len, files.values())) + 1):
        stranger, row = cache.new_row(), unplaced_row(cache)
        prefill(runner, stranger, 0, 640)
        reader = SegmentReader(cache, row, list(chain(files, bases, ENDS[-1])))
        for count, _ in enumerate(reader.run()):
            if count == records:
                cache.free(stranger)
                cache.compact()
                check_cache(cache)
        if stranger.alive:
            cache.free(stranger)
        place(cache, row)
        (found,) = decode(runner, [row], MORE[:SOME])
        np.testing.assert_array_equal(found, want[:SOME])
        cache.free(row)
        cache.shrink()


@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_row_within_a_longer_segment_takes_its_pages(name: str, how: str) -> None:
    runner = runner_of(name, how)
    cache = runner.cache
    files, bases, _ = written(runner)
    row = cache.new_row()
    prefill(runner, row, 0, 512)
    snapshot = cache.snapshots.take(row)
    base = ENDS[-1] if can_extend(cache, 512, ENDS[-1]) else 0
    inside = list(SegmentRecords(cache, snapshot, base))
    if not any(store.kind.bounded for store in cache.stores):
        assert len(inside) == 2, "it needs no pages of its own"
    cache.snapshots.drop(snapshot)
    (want,) = decode(runner, [row], MORE[:SOME])
    cache.free(row)
    disturb(runner)

    row = unplaced_row(cache)
    chain_of = [iter(inside), *chain(files, bases, ENDS[-1] if base else None)]
    for _ in SegmentReader(cache, row, chain_of).run():
        check_cache(cache)
    place(cache, row)
    (found,) = decode(runner, [row], MORE[:SOME])
    np.testing.assert_array_equal(found, want)
    cache.free(row)


class Skipping:
    """Segments whose skipped records are empty."""

    def __init__(self, segments: Iterable[Iterator[bytes]]) -> None:
        self._skipped: dict[int, Container[int]] = {}
        self.read_bytes = 0
        self.segments = [self._records(index, one) for index, one in enumerate(segments)]

    def skip(self, index: int, numbers: Container[int]) -> None:
        self._skipped[index] = numbers

    def _records(self, index: int, records: Iterator[bytes]) -> Iterator[bytes]:
        for number, record in enumerate(records):
            found = b"" if number in self._skipped.get(index, ()) else record
            self.read_bytes += len(found)
            yield found


@pytest.mark.parametrize(("name", "how"), CASES)
def test_the_rests_of_bases_are_skipped(name: str, how: str) -> None:
    runner = runner_of(name, how)
    cache = runner.cache
    files, bases, want = written(runner)
    row = unplaced_row(cache)
    segments = Skipping(chain(files, bases, ENDS[-1]))
    for _ in SegmentReader(cache, row, segments.segments, segments.skip).run():
        pass
    place(cache, row)
    (found,) = decode(runner, [row], MORE[:SOME])
    np.testing.assert_array_equal(found, want[:SOME])
    cache.free(row)
    if (name, how) == ("qwen3", "plain"):
        total = sum(len(record) for records in files.values() for record in records)
        rests = sum(len(files[end][1]) for end in ENDS[:-1])
        assert segments.read_bytes == total - rests


@pytest.mark.parametrize(("name", "how"), [("qwen3", "plain"), ("gpt_oss", "plain")])
@pytest.mark.parametrize(("held", "end", "slices"), [(384, 704, 3), (0, 384, 3), (192, 384, 2)])
def test_slices_without_a_missing_page_are_skipped(
    name: str, how: str, held: int, end: int, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages in memory, and those of a longer base that lie beyond the prompt."""
    monkeypatch.setattr(segment_records, "RECORD_PAGES", 2)
    runner = runner_of(name, how)
    cache = runner.cache
    files = []
    for length, base in [(end, 704), (704, 0)][end == 704 :]:
        source = cache.new_row()
        prefill(runner, source, 0, length)
        snapshot = cache.snapshots.take(source)
        files.append(list(SegmentRecords(cache, snapshot, base)))
        cache.snapshots.drop(snapshot)
        if length == end:
            (want,) = decode(runner, [source], MORE[:SOME])
        cache.free(source)
    snapshot = snapshot_of(runner, held)
    row = unplaced_row(cache, snapshot)
    segments = Skipping(map(iter, files))
    for _ in SegmentReader(cache, row, segments.segments, segments.skip).run():
        pass
    place(cache, row)
    cache.snapshots.drop(snapshot)
    (found,) = decode(runner, [row], MORE[:SOME])
    np.testing.assert_array_equal(found, want)
    cache.free(row)
    if name == "qwen3":
        needed = sum(map(len, files[0][:2])) + len(files[1][0] if files[1:] else b"")
        pages = sum(map(len, files[-1][2:]))
        assert segments.read_bytes == needed + pages * slices // 5


@pytest.mark.parametrize("cut", range(6))
def test_missing_records_are_found(cut: int) -> None:
    runner = runner_of("gpt_oss", "plain")
    cache = runner.cache
    files, bases, _ = written(runner)
    files = {end: list(records) for end, records in files.items()}
    files[ENDS[-1 - cut % 3]].pop(cut % len(files[ENDS[0]]))
    reader = SegmentReader(cache, unplaced_row(cache), list(chain(files, bases, ENDS[-1])))

    with pytest.raises(DamagedFile):
        list(reader.run())
    reader.forget()
    cache.shrink()
    assert cache.nbytes == 0


def test_a_base_that_is_not_given_is_found() -> None:
    runner = runner_of("qwen3", "plain")
    files, _, _ = written(runner)
    reader = SegmentReader(runner.cache, unplaced_row(runner.cache), [iter(files[ENDS[-1]])])

    with pytest.raises(DamagedFile, match="lack pages"):
        list(reader.run())
    reader.forget()


def test_segments_hold_each_page_once() -> None:
    """A long prefix in three segments takes as many bytes as in one, tails excepted."""
    runner = runner_of("qwen3", "plain")
    cache = runner.cache
    files, bases, _ = written(runner)
    assert bases == {128: None, 320: 128, 704: 320}
    row = cache.new_row()
    prefill(runner, row, 0, ENDS[-1])
    whole = list(SegmentRecords(cache, cache.snapshots.take(row), 0))

    assert sum(len(record) for records in files.values() for record in records[2:]) == sum(
        len(record) for record in whole[2:]
    )
