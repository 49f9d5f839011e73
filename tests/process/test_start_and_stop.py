"""`kvd serve`: how it starts, drains, stops and is killed, and which starts it refuses."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from kvd.host.home import Home
from protocol.errors import Draining, NotRunning, WorkerDied
from tests.process.helpers import Daemon, Reader, alive, folder_mode, source, wait_for, write_config


def test_the_daemon_prints_its_socket_and_first_commands(home: Home, make_daemon):
    write_config(home, f'models = [{{source = "{source(tps=100)}", alias = "m"}}]')
    daemon = make_daemon().start()
    text = wait_for("the banner", daemon.output.read_text)
    assert f"socket  {daemon.home.socket}" in text
    assert text.count(f"kvctl --home {daemon.home.root} ") == 3
    assert "Ctrl-C" in text


def test_folder_and_socket_are_private(daemon: Daemon):
    assert folder_mode(daemon.home.root) == 0o700
    assert folder_mode(daemon.home.socket) == 0o600
    assert folder_mode(daemon.home.logs / "kvd.log") == 0o600


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_daemon_with_0(daemon: Daemon, number):
    daemon.load(source(tps=100), "m")
    worker = daemon.worker_pid("m")
    daemon.signal(number)
    assert daemon.wait() == 0
    assert not alive(worker)
    assert not daemon.home.socket.exists()


def test_sigterm_finishes_running_requests_and_accepts_no_new_ones(daemon: Daemon):
    daemon.load(source(tps=50), "m")
    running = Reader(daemon, "m", max_tokens=60).begun()
    with daemon.client() as kvd:
        daemon.signal(signal.SIGTERM)
        wait_for("draining", lambda: kvd.status().state == "draining")
        with pytest.raises(Draining):
            _ = kvd.generate("m", "Too late").text
    assert daemon.wait() == 0
    running.finished()
    assert running.error is None
    assert running.completion.reason == "length"
    assert len(running.completion.tokens) == 60


def test_ctrl_c_in_a_terminal_reaches_the_workers_and_they_still_finish(daemon: Daemon):
    daemon.load(source(tps=50), "m")
    running = Reader(daemon, "m", max_tokens=60).begun()
    os.killpg(daemon.pid, signal.SIGINT)
    assert daemon.wait() == 0
    running.finished()
    assert (running.error, len(running.completion.tokens)) == (None, 60)


def test_a_stop_does_not_wait_for_a_load(home: Home, make_daemon):
    write_config(home, f'models = [{{source = "{source(load=600)}", alias = "m"}}]')
    daemon = make_daemon().start()
    wait_for("the model loads", lambda: "loading" in daemon.kvctl("status").stdout)
    worker = json.loads(daemon.kvctl("status", "--json").stdout)["models"][0]["worker_pid"]
    daemon.signal(signal.SIGTERM)
    assert daemon.wait(15) == 0
    assert not alive(worker)
    assert "kvctl" not in daemon.output.read_text()


def test_a_second_signal_ends_the_daemon_at_once(daemon: Daemon):
    daemon.load(source(tps=10), "m")
    worker = daemon.worker_pid("m")
    running = Reader(daemon, "m", max_tokens=10_000).begun()
    daemon.signal(signal.SIGTERM)
    daemon.signal(signal.SIGTERM)  # counts as the same signal, which `make` may send twice
    time.sleep(0.6)
    assert alive(daemon.pid)
    daemon.signal(signal.SIGTERM)
    assert daemon.wait(10) == 0
    assert isinstance(running.finished().error, (Draining, WorkerDied))
    assert not alive(worker)


def test_a_drain_has_a_timeout(home: Home, make_daemon):
    write_config(home, "drain_timeout_s = 0.3")
    daemon = make_daemon().start()
    daemon.load(source(tps=10), "m")
    running = Reader(daemon, "m", max_tokens=10_000).begun()
    daemon.signal(signal.SIGTERM)
    assert daemon.wait(10) == 0
    assert running.finished().error is not None
    assert "drain timed out" in [line["event"] for line in daemon.log()]


def test_a_second_daemon_on_the_home_fails_and_the_first_continues(daemon: Daemon):
    second = Daemon(daemon.home, "--fake")
    process = second.launch()
    assert process.wait(30) == 4
    assert f"a daemon (pid {daemon.pid}) already serves" in second.errors.read_text()
    assert daemon.answers()


def test_models_of_the_configuration_are_loaded(home: Home, make_daemon):
    model = f'{{source = "{source(tps=100)}", alias = "mine", kv = "k8v4"}}'
    write_config(home, f'budget = "2GiB"\nmodels = [{model}]')
    daemon = make_daemon().start()
    wait_for(
        "mine is ready", lambda: [m for m in daemon.kvctl("status").stdout.split() if m == "ready"]
    )
    assert daemon.model("mine").kv.name == "k8v4"
    with daemon.client() as kvd:
        assert kvd.status().budget_bytes == 2 * 2**30


def test_the_error_of_an_invalid_configuration_names_the_key(home: Home, make_daemon):
    write_config(home, "bugdet = 1")
    daemon = make_daemon()
    assert daemon.launch().wait(30) == 5
    assert "did you mean budget?" in daemon.errors.read_text()


@pytest.mark.parametrize("place", ["kvd.lock", "logs/kvd.log"])
def test_a_folder_in_place_of_the_lock_or_the_log_is_an_error(home: Home, make_daemon, place):
    home.create()
    (home.root / place).mkdir()
    daemon = make_daemon()
    assert daemon.launch().wait(30) == 5
    errors = daemon.errors.read_text()
    assert errors.startswith(f"error: cannot use {home.root / place}")
    assert "Traceback" not in errors


def test_a_budget_of_zero_is_refused(make_daemon):
    daemon = make_daemon()
    assert daemon.launch("--budget", "0").wait(30) == 2
    assert "out of range" in daemon.errors.read_text()


def test_after_kill_9_no_worker_is_left_and_the_next_start_works(daemon: Daemon):
    daemon.load(source(tps=50), "idle")
    daemon.load(source(tps=50), "busy")
    workers = [daemon.worker_pid("idle"), daemon.worker_pid("busy")]
    running = Reader(daemon, "busy", max_tokens=10_000).begun()
    daemon.signal(signal.SIGKILL)
    daemon.wait()
    wait_for("no worker is left", lambda: not any(map(alive, workers)), 10.0)
    assert isinstance(running.finished().error, NotRunning)
    assert daemon.home.socket.exists()
    refused = daemon.kvctl("status")
    assert refused.returncode == 3
    assert "start one with `kvd serve`" in refused.stderr
    again = Daemon(daemon.home, "--fake").start()
    try:
        assert again.answers()
    finally:
        again.end()


def test_shutdown_by_a_client_frees_the_home_before_it_returns(daemon: Daemon):
    daemon.load(source(tps=100), "m")
    worker = daemon.worker_pid("m")
    done = daemon.kvctl("shutdown")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "stopped\n")
    assert not alive(worker)
    again = Daemon(daemon.home, "--fake")
    try:
        again.start()
    finally:
        again.end()
    assert daemon.wait() == 0
