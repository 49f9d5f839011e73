"""The worker's own footprint: plausible values that are not read too often."""

from __future__ import annotations

import ctypes
import mmap
import threading

from kvd.worker.process import memory


def test_the_footprint_grows_with_touched_memory():
    before = memory.footprint_reading._read()
    size = 32 * 1024 * 1024
    with mmap.mmap(-1, size) as block:
        block.write(b"x" * size)
        after = memory.footprint_reading._read()
    assert 0 < before < after
    assert after - before > 0.8 * size


def test_a_cheap_reading_is_kept_for_a_quarter_of_a_second():
    values, clock = (
        iter([1, 2, 3]),
        iter([0, 0, 0, 0.1, 0.24, 0.25, 0.25, 0.25, 0.3, 0.6, 0.6, 0.6]),
    )
    reading = memory.Reading(lambda: next(values), lambda: next(clock))
    assert [reading.newest() for _ in range(6)] == [1, 1, 1, 2, 2, 3]


def test_slow_readings_take_a_small_share_of_the_time():
    now, taken = 0.0, 0

    def read():
        nonlocal now, taken
        now += 0.1
        taken += 1
        return taken

    reading = memory.Reading(read, lambda: now)
    while now < 100.0:
        reading.newest()
        now += 0.01
    assert 18 <= taken <= 20


def test_rows_do_not_wait_for_a_reading():
    values, begun, may_end = iter([5, 6]), threading.Event(), threading.Event()

    def read():
        value = next(values)
        if value == 6:
            begun.set()
            may_end.wait(30)
        return value

    now = [0.0]
    reading = memory.Reading(read, lambda: now[0])
    assert reading.latest() == 5
    now[0] = 1.0
    assert reading.latest() == 5
    assert begun.wait(30)
    assert reading.latest() == 5
    may_end.set()
    assert reading._under_way.result(30) == 6
    assert reading.latest() == 6


def test_without_smaps_rollup_the_resident_size_is_read(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_ROLLUP", tmp_path / "none")
    assert memory._read_linux() > 1024 * 1024


def test_the_rusage_structure_has_the_size_of_macos():
    # sizeof(struct rusage_info_v4) on macOS: a uuid and 35 counters.
    assert ctypes.sizeof(memory._RUsageInfoV4) == 16 + 35 * 8
    assert memory._RUsageInfoV4.ri_phys_footprint.offset == 16 + 7 * 8


def test_footprint_reads_this_process():
    assert memory.footprint() > 1024 * 1024
