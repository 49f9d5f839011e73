"""The quick selftest, and how trials are reported that die, hang or find a fault."""

from __future__ import annotations

import socket

import mlx.core as mx
import pytest

from kvd import demo
from kvd.client import Client
from kvd.doctor import living, selftest, speed
from kvd.doctor.finding import Finding, Section
from kvd.doctor.scene import Scene
from kvd.doctor.speed import Limits, Measured, Model
from kvd.doctor.system import guarded
from kvd.host.home import Home
from kvd.worker.attention import decode
from kvd.worker.cache.store import KVStore
from kvd.worker.selftest import attention, memory
from tests.worker.attention.stand_in import StandIn


@pytest.mark.slow
@pytest.mark.mlx
@pytest.mark.process
def test_the_quick_selftest_finds_no_fault_on_this_machine(home: Home, monkeypatch):
    limits = Limits(speed.QUICK_SIZES[:1], rounds=1, measure_s=60.0, task_s=60.0)
    monkeypatch.setattr(speed, "QUICK", limits)
    measured, scene = Measured(), Scene(home)
    steps = list(selftest.run(scene, Model("demo", demo.path()), measured, quick=True))
    sections = [step for step in steps if isinstance(step, Section)]
    found = {one.name: one for section in sections for one in section.findings}
    assert {one.verdict for one in found.values()} <= {"ok", "skip"}, found
    assert {"attention, plain", "flush in place", "footprint", "unix socket"} <= found.keys()
    assert {"load", "whole layers", "peak memory"} <= found.keys()
    plain = found["attention, plain"].numbers
    assert plain["path"] == "plain operations"
    assert 0 < plain["float32_error"] < plain["float32_bound"]
    assert plain["seconds"] > 0
    assert measured.speed is not None
    assert measured.speed.cells[0].ratio is not None


@pytest.mark.process
def test_a_trial_that_kills_its_process_or_hangs_does_not_affect_the_others():
    steps = list(selftest.computing(quick=True, module="tests.doctor.crashing", most_s=1.5))
    found = [step for step in steps if isinstance(step, Finding)]
    assert [(one.name, one.verdict) for one in found] == [
        ("first", "ok"),
        ("dies", "fail"),
        ("second", "ok"),
        ("hangs", "fail"),
        ("third", "ok"),
    ]
    assert found[1].observed == "its process died: SIGSEGV; Fatal Python error: Segmentation fault"
    assert "more than 1.5 s" in found[3].observed
    assert all(one.advice for one in found if one.verdict == "fail")


@pytest.mark.process
def test_trials_that_cannot_begin_are_reported():
    (found,) = selftest.computing(quick=True, module="kvd.nothing")
    assert isinstance(found, Finding)
    assert (found.name, found.verdict) == ("worker", "fail")
    assert "No module named kvd.nothing" in found.observed


@pytest.mark.mlx
def test_wrong_results_of_attention_are_found(monkeypatch):
    right = decode.decode_attention

    def off(queries: mx.array, handle, scale: float, sinks: mx.array | None) -> mx.array:
        found = right(queries, handle, scale, sinks)
        return found.at[0, 0, 0, 0].add(1e-3)

    assert attention.reference(quick=True).verdict == "ok"
    monkeypatch.setattr(attention, "decode_attention", off)
    found = attention.reference(quick=True)
    assert (found.verdict, "beyond 2e-05" in found.observed) == ("fail", True)


@pytest.mark.mlx
def test_a_flush_that_copies_its_pools_is_found(monkeypatch):
    right = KVStore.flush

    def copying(self: KVStore) -> None:
        """Flush with a copy of all pools, as MLX makes of arrays that a step in flight has."""
        pools = [pool for layer in self.layers for pool in layer.pools]
        copies = [array + 0 for pool in pools for array in pool.arrays()]
        mx.eval(copies)
        right(self)
        mx.eval(self.arrays())
        del copies

    monkeypatch.setattr(KVStore, "flush", copying)
    found = memory.flush(quick=True)
    assert found.verdict == "fail"
    assert found.numbers["moment_bytes"] > found.numbers["pool_bytes"] / 4


@pytest.mark.process
def test_a_daemon_that_is_killed_and_one_that_is_stopped(home: Home):
    home.create()
    home.config.write_text("http = {enabled = false}\n")
    with living._serving(home, "--fake") as process:
        assert living._orphan(home, process).verdict == "ok"
    with living._serving(home, "--fake") as process:
        living._wait_until_up(home, process)
        assert living._stop(process).verdict == "ok"


@pytest.mark.process
def test_the_trial_daemon_ignores_the_users_port_and_budget(home: Home, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("KVD_PORT", str(port))
    monkeypatch.setenv("KVD_BUDGET", "64MiB")
    home.create()
    with living._serving(home, "--fake") as process:
        living._wait_until_up(home, process)
        with Client(home=home.root) as client:
            status = client.status()
    assert status.budget_bytes == 2 << 30
    assert not status.http


@pytest.mark.process
def test_a_worker_that_outlives_its_daemon_is_found(home: Home, monkeypatch):
    monkeypatch.setattr(living, "_ORPHAN_S", 0.05)
    monkeypatch.setattr(living, "_lives", lambda _: True)
    home.create()
    home.config.write_text("http = {enabled = false}\n")
    with living._serving(home, "--fake") as process:
        found = guarded("an orphan", lambda: living._orphan(home, process))
    assert found.verdict == "fail"


class OneIsRefused(Client):
    """A client whose request with seed 9 asks for more tokens than fit into the context."""

    def generate(self, model, prompt=None, **options):
        if options["seed"] == 9:
            options["max_tokens"] = 10**6
        return super().generate(model, prompt, **options)


@pytest.mark.process
def test_a_failed_request_among_others_is_found(home: Home, monkeypatch):
    home.create()
    home.config.write_text("http = {enabled = false}\n")
    with living._serving(home, "--fake") as process:
        living._wait_until_up(home, process)
        with Client(home=home.root) as client:
            assert client.load("fake:tps=1000", alias="demo").result.state == "ready"
        assert guarded("completions", lambda: living._complete(home)).verdict == "ok"
        monkeypatch.setattr(living, "Client", OneIsRefused)
        found = guarded("completions", lambda: living._complete(home))
    assert (found.verdict, "context" in found.observed) == ("fail", True), found


@pytest.mark.mlx
def test_kernels_are_compared_if_there_are_any(monkeypatch):
    monkeypatch.setattr(attention, "_CALLS", 1)
    monkeypatch.setattr(attention, "_KEYS", 128)
    two = [attention.Case(), attention.Case(mx.bfloat16, lengths=(2, 70))]
    monkeypatch.setattr(attention, "cases", lambda *, quick: iter(two))
    kernels = StandIn()
    monkeypatch.setattr(attention.kernel_choice, "find_kernels", kernels.backend)
    found = attention.kernels(quick=True)
    assert (found.verdict, found.numbers["shapes"]) == ("ok", 2)
    assert found.numbers["launches"] >= 2
    assert found.numbers["kernel_ms"] > 0

    monkeypatch.setattr(attention.kernel_choice, "find_kernels", StandIn(error=1e-3).backend)
    assert "beyond 2e-05" in attention.kernels(quick=True).observed

    monkeypatch.setattr(attention.kernel_choice, "find_kernels", lambda: None)
    assert attention.kernels(quick=True).verdict == "skip"
