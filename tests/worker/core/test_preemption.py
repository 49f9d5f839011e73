"""Running rows are preempted, free their memory, and continue with the same tokens."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvd.worker.core import memory_account, out_of_memory, pace, reclaiming, swap
from kvd.worker.core.rates import Rates
from kvd.worker.process import shortage
from protocol.kv import KVSpec
from protocol.record_cipher import RecordCipher
from protocol.record_file import DamagedFile, read_records
from protocol.record_format import PLAIN
from protocol.types import Sampling
from protocol.worker import Reclaim
from tests.worker import shallow
from tests.worker.core.driver import Driver, Outcome
from tests.worker.core.faults import memory_runs_out
from tests.worker.core.prompts import periodic_prompt

pytestmark = pytest.mark.mlx

WARM = Sampling(temperature=0.9, seed=5)
EVERYTHING = 1 << 40
QUICK = 1e15
"""Rate, in units per second, of work that practically takes no time."""


def prefer(driver: Driver, where: str) -> None:
    rates = driver.engine._rates
    fast = ("write", "read_swapped") if where == "disk" else ("prefill", "decode")
    rates._measured = {"write": 1.0, "read_swapped": 1.0, "prefill": 1.0, "decode": 1.0}
    rates._measured |= dict.fromkeys(fast, QUICK)
    rates.note = lambda *_: None


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    folder = tmp_path_factory.mktemp("swap")
    return Driver(shallow.path(), swap_folder=str(folder), swap_bytes=1 << 30)


@pytest.fixture
def driver(loaded: Driver) -> Iterator[Driver]:
    yield loaded
    folder = loaded.engine._transfers.folder
    for rid in list(loaded.engine._batch.requests):
        loaded.engine.cancel(rid)
    loaded.run(until=lambda: not loaded.engine.has_work)
    assert folder is not None
    assert list(folder._path.iterdir()) == [], "a file outlived its request"
    assert folder.held_bytes == 0
    assert not loaded.engine._runner.cache.sequences
    loaded.engine._prefix_cache.tree.clear()
    assert loaded.engine._runner.cache.usage.pages_used == 0
    assert loaded.engine._scheduler.reserved_pages == 0
    for record in (loaded.outcomes, loaded.preemptions, loaded.positions, loaded.reclaimed):
        record.clear()
    loaded.engine._rates.__dict__.pop("note", None)


def submit_three(driver: Driver) -> None:
    """Submit a greedy request, one with a seed, two choices and a penalty, and one with a long
    prompt."""
    driver.submit("greedy", periodic_prompt(500, 1), max_tokens=70, ignore_eos=True)
    penalized = Sampling(temperature=0.9, seed=3, frequency_penalty=0.5)
    driver.submit("two", periodic_prompt(330, 2), penalized, max_tokens=70, ignore_eos=True, n=2)
    driver.run(until=lambda: len(driver.outcomes["two"].tokens) > 7)
    driver.submit("long", periodic_prompt(1700, 3), WARM, max_tokens=40, prompt_logprobs=0)


def undisturbed(driver: Driver) -> dict[str, Outcome]:
    submit_three(driver)
    driver.run()
    found = dict(driver.outcomes)
    driver.outcomes.clear()
    driver.engine._prefix_cache.tree.clear()
    return found


def files(driver: Driver) -> list[Path]:
    return list(driver.engine._transfers.folder._path.iterdir())


@pytest.mark.parametrize("where", ["disk", "recompute"])
def test_preempted_rows_continue_with_the_same_tokens(driver: Driver, where: str) -> None:
    prefer(driver, where)
    wanted = undisturbed(driver)
    submit_three(driver)
    driver.run(until=lambda: len(driver.outcomes["two"].tokens) > 9)
    assert driver.engine._scheduler.prefilling == 1, "the long prompt is in prefill"
    active = driver.engine._runner.cache.nbytes
    reclaimable = driver.engine.stats().reclaimable
    answer = driver.reclaim("preempt", EVERYTHING)

    assert answer.exhausted
    assert {one[0] for one in driver.preemptions.values()} == {where}
    assert answer.freed_bytes >= reclaimable.preempt > 0
    assert driver.engine._runner.cache.nbytes < active / 3
    driver.run()
    assert driver.outcomes == wanted
    assert all(one[-1] == "resumed" for one in driver.preemptions.values())


def test_swapped_rows_are_encrypted_with_a_key_that_is_only_in_memory(tmp_path: Path) -> None:
    key_file = str(tmp_path / "no.key")
    driver = Driver(
        shallow.path(), swap_folder=str(tmp_path), swap_bytes=1 << 30, key_file=key_file
    )
    prefer(driver, "disk")
    prompt = periodic_prompt(500, 4)
    wanted = driver.alone(prompt, WARM, max_tokens=40, ignore_eos=True)
    driver.submit("a", prompt, WARM, max_tokens=40, ignore_eos=True)
    driver.run(until=lambda: len(driver.outcomes["a"].tokens) > 9)
    driver.reclaim("preempt", EVERYTHING)
    assert driver.preemptions["a"][0] == "disk"
    (swapped,) = files(driver)
    with pytest.raises(DamagedFile, match="another format"):
        list(read_records(swapped, PLAIN))
    with pytest.raises(DamagedFile, match="wrong check of record 0"):
        list(read_records(swapped, RecordCipher.with_random_key()))
    driver.run()
    assert driver.outcomes["a"] == wanted


def test_snapshots_stay_in_memory_if_that_frees_enough(driver: Driver) -> None:
    prefer(driver, "disk")
    prompt = periodic_prompt(300, 4)
    wanted = driver.alone(prompt, WARM, max_tokens=200, ignore_eos=True)
    driver.submit("a", prompt, WARM, max_tokens=200, ignore_eos=True)
    driver.run(until=lambda: len(driver.outcomes["a"].tokens) > 5)
    unit = driver.engine._admission.budget.page_bytes
    driver.reclaim("preempt", unit)
    assert driver.preemptions["a"][0] == "memory"
    driver.run()
    assert driver.outcomes["a"] == wanted


def test_a_resumed_row_generates_tokens_before_it_is_preempted_again(driver: Driver) -> None:
    prefer(driver, "disk")
    driver.submit("a", periodic_prompt(300, 4), WARM, max_tokens=330, ignore_eos=True)
    driver.run(until=lambda: len(driver.outcomes["a"].tokens) == 20)
    driver.reclaim("preempt", EVERYTHING)
    driver.run(until=lambda: len(driver.outcomes["a"].tokens) == 270)
    assert driver.engine.stats().reclaimable.preempt == 0
    assert driver.reclaim("preempt", EVERYTHING).exhausted
    assert driver.preemptions["a"] == ["disk", "resumed"]
    driver.run(until=lambda: len(driver.outcomes["a"].tokens) == 280)
    assert driver.engine.stats().reclaimable.preempt > 0
    driver.reclaim("preempt", EVERYTHING)
    driver.run()
    assert driver.preemptions["a"] == ["disk", "resumed"] * 2


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [cut, flip, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_file_costs_time_and_no_request(driver: Driver, harm) -> None:
    prefer(driver, "disk")
    prompt = periodic_prompt(400, 6)
    wanted = driver.alone(prompt, WARM, max_tokens=40, n=2, ignore_eos=True)
    driver.submit("a", prompt, WARM, max_tokens=40, n=2, ignore_eos=True)
    driver.run(until=lambda: len(driver.outcomes["a"].tokens) > 9)
    driver.others = driver.budget  # prevents an early resume
    driver.reclaim("preempt", EVERYTHING)
    (path,) = files(driver)
    harm(path)
    driver.others = 0
    driver.retry()
    driver.run()
    assert driver.outcomes["a"] == wanted
    assert driver.preemptions["a"] == ["disk", "resumed"]


def test_a_full_disk_loses_no_request(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(driver, "disk")
    prompt = periodic_prompt(400, 7)
    wanted = driver.alone(prompt, WARM, max_tokens=40, ignore_eos=True)

    def full(fd: int, data: bytes | memoryview) -> int:
        if len(data) > 20_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    write = os.write
    monkeypatch.setattr(os, "write", full)
    driver.submit("a", prompt, WARM, max_tokens=40, ignore_eos=True)
    driver.run(until=lambda: len(driver.outcomes["a"].tokens) > 9)
    driver.reclaim("preempt", EVERYTHING)
    assert driver.preemptions["a"][0] == "recompute"
    driver.run()
    assert driver.outcomes["a"] == wanted


def test_beyond_the_folders_limits_rows_are_recomputed(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(driver, "disk")
    folder = driver.engine._transfers.folder
    full = SimpleNamespace(free=swap.SPARE_DISK_BYTES)
    for owner, bound, value in (
        (folder, "_limit_bytes", 1000),
        (shutil, "disk_usage", lambda _: full),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, bound, value)
            driver.submit(bound, periodic_prompt(400, 8), WARM, max_tokens=30, ignore_eos=True)
            driver.run(until=lambda rid=bound: len(driver.outcomes[rid].tokens) > 3)
            driver.reclaim("preempt", EVERYTHING)
            assert driver.preemptions[bound][0] == "recompute"
            driver.run()
            assert len(driver.outcomes[bound].tokens) == 30


@pytest.mark.parametrize("steps", [0, 2])
def test_a_request_can_end_while_it_is_written_or_read(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr(reclaiming, "MIN_WORK_SECONDS", 0.0)
    monkeypatch.setattr(reclaiming, "STEP_SHARE", 0.0)
    monkeypatch.setattr(pace, "MOST_SECONDS", 0.0)
    prefer(driver, "disk")
    driver.submit("b", periodic_prompt(300, 1), WARM, max_tokens=60, ignore_eos=True, priority=1)
    preemption, transfers = driver.engine._preemption, driver.engine._transfers
    for rid, under_way in (("written", transfers.writing), ("read", transfers.reading)):
        driver.submit(rid, periodic_prompt(900, 9), WARM, max_tokens=60, ignore_eos=True)
        driver.run(until=lambda rid=rid: len(driver.outcomes[rid].tokens) > 3)
        driver.engine.reclaim(_reclaim_one(driver))
        driver.run(until=lambda under_way=under_way: bool(under_way))
        for _ in range(steps):
            driver.step()
        driver.engine.cancel(rid)
        driver.run(until=lambda: not (preemption.busy or driver.engine._reclaiming.active))
        assert driver.outcomes[rid].reason == "cancelled"
        assert files(driver) == []
    driver.run()


def _reclaim_one(driver: Driver):
    rid = driver.engine._scheduler.victims()[0]
    wanted = driver.engine._scheduler.find(rid).pages * driver.engine._admission.budget.page_bytes
    return Reclaim(seq=1, method="preempt", wanted_bytes=wanted)


@pytest.mark.parametrize("meanwhile", ["nothing", "cancel", "memory", "reclaim"])
def test_snapshots_of_queued_requests_are_moved_out_for_the_head_of_the_queue(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """No request runs, and snapshots of requests behind the head hold the memory that it needs."""
    monkeypatch.setattr(pace, "MOST_SECONDS", 0.0)
    prefer(driver, "disk")
    requests = {rid: periodic_prompt(500, seed) for seed, rid in enumerate("abc")}
    wanted = {rid: driver.alone(requests[rid], max_tokens=30, ignore_eos=True) for rid in "abc"}
    driver.engine._prefix_cache.tree.clear()
    for rid, prompt in requests.items():
        driver.submit(rid, prompt, max_tokens=30, ignore_eos=True)
    driver.run(until=lambda: all(len(driver.outcomes[rid].tokens) > 3 for rid in "abc"))
    driver.reclaim("prefixes", EVERYTHING)
    unit = driver.engine._admission.budget.page_bytes
    for rid in "abc":
        driver.preempt(rid)
    driver.engine._reclaiming.add(Reclaim(seq=1, method="spare", wanted_bytes=EVERYTHING))
    driver.run(until=lambda: not driver.engine._reclaiming.active)
    for rid in "abc":
        driver.requeue(rid)
    kept = sum(one.kept_pages for one in driver.engine._batch.requests.values())
    assert kept > 8
    assert driver.engine._admission.budget.pages <= kept + 1
    # Two pages more than the snapshots take: not enough for a row.
    driver.others = driver.budget - driver.total - 2 * unit
    driver.run(until=lambda: driver.engine._preemption.busy)
    if meanwhile == "cancel":
        driver.engine.cancel("c")
    elif meanwhile == "memory":
        driver.others = 0
        driver.retry()
    elif meanwhile == "reclaim":
        driver.engine.reclaim(Reclaim(seq=2, method="preempt", wanted_bytes=EVERYTHING))
    driver.run(until=lambda: all(one.over for one in driver.outcomes.values()))
    if meanwhile == "cancel":
        assert driver.outcomes.pop("c").reason == "cancelled"
        del wanted["c"]
    assert driver.outcomes == wanted
    driver.others = 0


def test_queued_requests_get_reports_of_their_position(driver: Driver) -> None:
    driver.submit("runs", periodic_prompt(20, 1), max_tokens=40, ignore_eos=True)
    driver.run(until=lambda: bool(driver.outcomes["runs"].tokens))
    assert driver.positions == {}
    driver.others = driver.budget - driver.total
    try:
        for rid in "ab":
            driver.submit(rid, periodic_prompt(2000, 1), max_tokens=3)
        driver.run(until=lambda: not driver.engine.has_work)
        assert driver.positions == {"a": [1], "b": [2]}
        driver.engine.cancel("a")
        driver.run(until=lambda: not driver.engine.has_work)
        assert driver.positions == {"a": [1], "b": [2, 1]}
    finally:
        driver.others = 0
    driver.retry()
    driver.run()
    assert len(driver.outcomes["b"].tokens) == 3


def _request(rng: random.Random, index: int) -> tuple[list[int], dict]:
    more = {
        "sampling": Sampling(temperature=rng.choice([0.0, 0.8]), seed=index),
        "max_tokens": rng.choice([5, 30, 60]),
        "n": rng.choice([1, 1, 2]),
        "priority": rng.choice([0, 0, 1]),
        "ignore_eos": True,
    }
    return periodic_prompt(rng.choice([1, 40, 300, 600]), 20 + index % 5), more


@pytest.mark.parametrize("seed", [1])
def test_random_reclaims_change_no_tokens(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    requests = [_request(rng, index) for index in range(9)]
    alone = [driver.alone(prompt, **more) for prompt, more in requests]
    driver.engine._prefix_cache.tree.clear()
    monkeypatch.setattr(reclaiming, "MIN_WORK_SECONDS", 0.0)
    monkeypatch.setattr(reclaiming, "STEP_SHARE", 0.0)
    monkeypatch.setattr(pace, "MOST_SECONDS", 0.0)
    monkeypatch.setattr(memory_account, "MIN_TOKENS_BETWEEN_PREEMPTIONS", 4)
    waiting = list(enumerate(requests))
    for step in range(4000):
        if waiting and rng.random() < 0.1:
            index, (prompt, more) = waiting.pop()
            driver.submit(f"r{index}", prompt, **more)
        if rng.random() < 0.08:
            prefer(driver, rng.choice(["disk", "recompute"]))
            wanted = rng.choice([1, 10**6, EVERYTHING])
            method = rng.choice(["spare", "prefixes", "preempt", "preempt"])
            driver.engine.reclaim(Reclaim(seq=step, method=method, wanted_bytes=wanted))
        if rng.random() < 0.05:  # another model takes or returns memory
            driver.others = rng.choice([0, driver.budget - driver.total])
        if not driver.engine.has_work:
            driver.others = 0
            driver.retry()
        driver.step()
        if not waiting and all(one.over for one in driver.outcomes.values()):
            break
    driver.others = 0
    assert [driver.outcomes[f"r{index}"] for index in range(9)] == alone
    assert sum(len(one) for one in driver.preemptions.values()) > 3


def test_swapping_out_does_not_stop_other_rows_and_leaves_no_file_at_the_end(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaiming, "MIN_WORK_SECONDS", 0.0)
    monkeypatch.setattr(reclaiming, "STEP_SHARE", 0.0)
    prefer(driver, "disk")
    driver.submit("stays", periodic_prompt(300, 1), max_tokens=200, ignore_eos=True, priority=1)
    driver.submit("goes", periodic_prompt(900, 2), max_tokens=200, ignore_eos=True)
    driver.run(until=lambda: len(driver.outcomes["goes"].tokens) > 3)
    driver.engine.reclaim(_reclaim_one(driver))
    driver.others = driver.budget  # prevents an early resume
    steps, before = 0, len(driver.outcomes["stays"].tokens)
    while driver.engine._reclaiming.active:
        driver.step()
        steps += 1
    made = len(driver.outcomes["stays"].tokens) - before
    assert steps > 5
    assert made >= steps - 2, "the row that stays did not decode in each step"
    assert len(files(driver)) == 1
    driver.engine.close()
    assert files(driver) == []
    driver.others = 0
    driver.retry()
    driver.run()
    assert len(driver.outcomes["goes"].tokens) == 200


@pytest.mark.parametrize("nth", [3, 21, 75])
def test_a_shortage_during_transfers_changes_no_tokens(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    monkeypatch.setattr(reclaiming, "MIN_WORK_SECONDS", 0.0)
    monkeypatch.setattr(reclaiming, "STEP_SHARE", 0.0)
    monkeypatch.setattr(pace, "MOST_SECONDS", 0.0)
    prefer(driver, "disk")
    requests = {"a": periodic_prompt(300, 1), "b": periodic_prompt(500, 2)}
    wanted = {rid: driver.alone(one, WARM, max_tokens=40, n=2) for rid, one in requests.items()}
    driver.engine._prefix_cache.tree.clear()
    for rid, prompt in requests.items():
        driver.submit(rid, prompt, WARM, max_tokens=40, n=2)
    driver.run(until=lambda: len(driver.outcomes["b"].tokens) > 3)
    driver.engine.reclaim(Reclaim(seq=1, method="preempt", wanted_bytes=EVERYTHING))
    driver.engine._out_of_memory.calm_steps = out_of_memory.CALM_STEPS
    tries = shortage.TRIES + 1
    with memory_runs_out(range(nth, nth + tries).__contains__) as seen:
        driver.run()
    assert seen.failed == tries
    assert driver.engine._out_of_memory.count == 1
    assert driver.outcomes == wanted
    assert len(driver.reclaimed) == 1


def test_files_of_an_earlier_process_are_deleted(tmp_path: Path) -> None:
    for name in ("old.swap", "half.part"):
        (tmp_path / name).write_bytes(b"x")
    folder = swap.SwapFolder.open(str(tmp_path / "m"), 100, PLAIN)
    assert folder is not None
    folder = swap.SwapFolder.open(str(tmp_path), 100, PLAIN)
    assert folder is not None
    assert [one.name for one in tmp_path.iterdir()] == ["m"]
    assert not folder.has_room(101)
    (tmp_path / "file").write_bytes(b"")
    assert not swap.SwapFolder.open(str(tmp_path / "file"), 100, PLAIN).has_room(1)


def test_a_disk_that_does_not_delete_ends_no_worker(tmp_path: Path) -> None:
    folder = swap.SwapFolder.open(str(tmp_path), 1000, PLAIN)
    path = folder.create("a", 100).path
    path.mkdir()  # `unlink` fails, as on a disk that became read-only
    folder.delete(path)
    assert folder.held_bytes == 0


@pytest.mark.parametrize(
    "kv",
    [
        KVSpec(k_bits=4, v_bits=4),
        KVSpec(k_bits=16, v_bits=16),
        KVSpec(max_kv_size=256, keep=4),
        KVSpec(quantized_kv_start=300),
    ],
    ids=["k4v4", "dense", "window", "dense at first"],
)
def test_rows_of_every_kv_layout_are_restored_from_disk(kv: KVSpec, tmp_path: Path) -> None:
    driver = Driver(shallow.path(), kv=kv, swap_folder=str(tmp_path), swap_bytes=1 << 30)
    prompt = periodic_prompt(420, 5)
    wanted = driver.alone(prompt, WARM, max_tokens=40, n=2, ignore_eos=True)
    for where in ("disk", "recompute"):
        prefer(driver, where)
        driver.submit(where, prompt, WARM, max_tokens=40, n=2, ignore_eos=True)
        driver.run(until=lambda rid=where: len(driver.outcomes[rid].tokens) > 9)
        driver.reclaim("preempt", EVERYTHING)
        driver.run()
        assert driver.preemptions[where] == [where, "resumed"]
        assert driver.outcomes.pop(where) == wanted


@pytest.mark.parametrize("waits", [False, True])
def test_a_step_without_decoding_rows_waits_for_a_transfer(driver: Driver, waits: bool) -> None:
    """Each step between two records would cost more than the record."""
    preemption, ready, waited = driver.engine._preemption, [True], list[float]()

    def work() -> Iterator[float]:
        for _ in range(3):
            ready[0] = False
            yield 0.0

    def wait(seconds: float) -> None:
        waited.append(seconds)
        ready[0] = True

    preemption.start("r", work(), lambda: ready[0], wait=wait, needs_idle_device=lambda: False)
    preemption.work(60.0, delays_rows=False, waits=waits)
    assert preemption.busy is not waits
    assert len(waited) == (3 if waits else 0)
    assert all(0 < seconds <= 60.0 for seconds in waited)
    while preemption.busy:
        preemption.wait(1.0)
        preemption.work(60.0)


def test_waiting_for_a_transfer_ends_with_the_time(driver: Driver) -> None:
    preemption, ready = driver.engine._preemption, [True]

    def work() -> Iterator[float]:
        ready[0] = False
        yield 0.0

    preemption.start("r", work(), lambda: ready[0], needs_idle_device=lambda: False)
    preemption.work(0.05, delays_rows=False, waits=True)
    assert preemption.busy
    ready[0] = True
    preemption.work(0.05, delays_rows=False, waits=True)
    assert not preemption.busy


def test_rates_estimate_seconds() -> None:
    rates = Rates()
    rates.note("write", 100, 1.0)
    rates.note("read_swapped", 200, 1.0)
    assert rates.swap_seconds(1000) == pytest.approx(15.0)
    rates.note("prefill", 10, 1.0)
    rates.note("decode", 1, 0.5)
    assert rates.recompute_seconds(100, 4) == pytest.approx(12.0)
    rates.note("decode", 0, 0.5)
    assert rates.recompute_seconds(0, 4) == pytest.approx(2.0)
