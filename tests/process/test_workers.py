"""Workers that are killed, hang, fail to load or are unloaded, with a real daemon."""

from __future__ import annotations

import os
import signal
import time

import pytest

from protocol.errors import InvalidModel, KvdError, ModelFailed, Quarantined
from protocol.worker import OVER_MEMORY_LIMIT
from tests.process.helpers import Daemon, Reader, alive, source, wait_for, write_config


def test_clients_do_not_notice_a_kill_9_of_a_worker(daemon: Daemon):
    daemon.load(source(tps=50), "hit")
    daemon.load(source(tps=50), "other")
    daemon.load(source(tps=0), "quick")
    first = daemon.worker_pid("hit")
    interrupted = [Reader(daemon, "hit", f"{i}", max_tokens=90, seed=i).begun() for i in range(3)]
    other = Reader(daemon, "other", max_tokens=100).begun()
    os.kill(first, signal.SIGKILL)
    for number, reader in enumerate(interrupted):
        assert reader.finished().error is None
        with daemon.client() as kvd:
            expected = kvd.generate("quick", f"{number}", max_tokens=90, seed=number)
            read = reader.completion
            assert (expected.text, expected.tokens) == (read.text, read.tokens)
    wait_for("hit is ready again", lambda: daemon.model("hit").state == "ready")
    assert daemon.worker_pid("hit") != first
    assert daemon.model("hit").restarts == 1
    with daemon.client() as kvd:
        completion = kvd.generate("hit", "Again", max_tokens=5)
        assert completion.text
        assert len(completion.tokens) == 5
    assert other.finished().error is None
    assert len(other.completion.tokens) == 100


def test_a_step_that_hangs_ends_the_worker_and_fails_only_its_request(home, make_daemon):
    write_config(home, "[watchdog]\ndecode_s = 0.5\nterminated_s = 0.2")
    daemon = make_daemon().start()
    daemon.load(source(tps=100, hang_on="poison", deaf=1), "m")
    first = daemon.worker_pid("m")
    other = Reader(daemon, "m", max_tokens=200).begun()
    error = Reader(daemon, "m", "poison", max_tokens=5).finished().error
    assert isinstance(error, Quarantined)
    assert not error.retryable
    assert all("no sign of life for 0.5 s (decode)" in line for line in error.detail["story"])
    assert other.finished().error is None
    assert len(other.completion.tokens) == 200
    wait_for("the process is gone", lambda: not alive(first))
    wait_for("another one serves", lambda: daemon.model("m").state == "ready")
    with daemon.client() as kvd:
        assert kvd.generate("m", "Again", max_tokens=5).text
    ends = [line["event"] for line in daemon.log() if line.get("model") == "m"]
    assert ends.index("worker_terminated") < ends.index("worker_killed")


def test_a_daemon_that_was_stopped_does_not_end_its_workers(home, make_daemon):
    write_config(home, "[watchdog]\ndecode_s = 0.7")
    daemon = make_daemon().start()
    daemon.load(source(tps=6), "m")
    worker = daemon.worker_pid("m")
    reader = Reader(daemon, "m", max_tokens=14)
    # Between two reports, the daemon waits for the next timer.
    wait_for("the daemon is idle", lambda: len(reader.completion.tokens) >= 2)
    time.sleep(0.05)
    daemon.signal(signal.SIGSTOP)
    time.sleep(1.8)  # longer than decode_s, and long enough to count as a gap
    daemon.signal(signal.SIGCONT)
    assert reader.finished().error is None
    assert len(reader.completion.tokens) == 14
    assert (daemon.worker_pid("m"), daemon.model("m").restarts) == (worker, 0)
    gaps = [line for line in daemon.log() if line["event"].startswith("the event loop did not run")]
    assert max(gap["seconds"] for gap in gaps) > 1


def test_kills_from_outside_never_fail_a_model(daemon: Daemon):
    daemon.load(source(tps=50), "m")
    for killed in range(1, 4):  # three crashes would fail the model
        os.kill(daemon.worker_pid("m"), signal.SIGKILL)
        wait_for(
            f"m is ready after kill {killed}",
            lambda n=killed: (daemon.model("m").restarts, daemon.model("m").state) == (n, "ready"),
        )


def test_a_stopped_daemon_does_not_stall_the_worker(daemon: Daemon):
    # 20 rows at 100 tokens a second for 5 s: some 10000 reports, more than the socket holds. Longer
    # answers would need memory from the daemon.
    daemon.load(source(tps=100), "m")
    worker = daemon.worker_pid("m")
    readers = [Reader(daemon, "m", f"{i}", max_tokens=500, seed=i) for i in range(20)]
    for reader in readers:
        reader.begun()
    daemon.signal(signal.SIGSTOP)
    time.sleep(5)  # the worker keeps generating while the daemon is stopped
    daemon.signal(signal.SIGCONT)
    resumed = time.monotonic()
    for reader in readers:
        reader.finished()
        assert reader.error is None
        assert len(reader.completion.tokens) == 500
    # A worker that had blocked would still need nearly 5 s.
    assert max(reader.ended_at for reader in readers) - resumed < 4
    assert daemon.worker_pid("m") == worker
    assert daemon.model("m").restarts == 0


def test_a_failed_load_has_a_typed_error(daemon: Daemon):
    with daemon.client() as kvd, pytest.raises(KvdError) as caught:
        _ = kvd.load(source(load_error="invalid_model"), alias="broken").result
    assert isinstance(caught.value, (InvalidModel, ModelFailed))


def test_a_load_that_takes_memory_without_end_fails_once_and_costs_no_other_model(make_daemon):
    daemon = make_daemon("--budget", "200MiB").start()
    daemon.load(source(tps=50), "idle")
    daemon.load(source(tps=50), "busy")
    other = Reader(daemon, "busy", max_tokens=300).begun()
    with daemon.client() as kvd:
        with pytest.raises(InvalidModel, match="takes more memory than its files need"):
            _ = kvd.load(source(load_grow=1), alias="hostile").result
        assert not {"evict", "reclaim_precision", "reclaim_preempt"} & {
            it.kind for it in kvd.events()
        }
        assert {model.name for model in kvd.status().models} == {"idle", "busy"}
    assert other.finished().error is None
    exits = [it for it in daemon.log() if it["event"] == "worker_exit"]
    assert [(it["model"], it["returncode"]) for it in exits] == [("hostile", OVER_MEMORY_LIMIT)]


def test_a_request_that_takes_memory_without_end_is_quarantined_and_others_continue(
    daemon: Daemon,
):
    daemon.load(source(tps=50, grow_on="poison"), "m")
    other = Reader(daemon, "m", max_tokens=100).begun()
    error = Reader(daemon, "m", "poison", max_tokens=5).finished().error
    assert isinstance(error, Quarantined)
    assert all("ended itself at its memory limit" in line for line in error.detail["story"])
    assert other.finished().error is None
    assert len(other.completion.tokens) == 100


def test_unload_finishes_running_requests_and_frees_the_memory(daemon: Daemon):
    daemon.load(source(tps=50), "m")
    worker = daemon.worker_pid("m")
    running = Reader(daemon, "m", max_tokens=50).begun()
    with daemon.client() as kvd:
        assert kvd.unload("m").freed_bytes > 0
        assert kvd.status().granted_bytes == 0
        assert kvd.status().models == []
    assert not alive(worker)
    assert (running.finished().error, len(running.completion.tokens)) == (None, 50)


def test_requests_of_a_client_that_disconnects_are_cancelled(daemon: Daemon):
    daemon.load(source(tps=50), "m")
    with daemon.client() as kvd:
        completion = kvd.generate("m", "Hi", max_tokens=10_000)
        next(iter(completion))
        wait_for("the request runs", lambda: daemon.model("m").stats.rows_running == 1)
    wait_for("the request is gone", lambda: daemon.model("m").requests == 0)
    wait_for("the row is gone", lambda: daemon.model("m").stats.rows_running == 0)
