"""The worker process: its start, its exit status, and that it ends soon after its daemon."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvd.worker.fake.model import CRASH_STATUS
from protocol.worker import LoadModel, Progress, Ready, RowFinished, RowTokens, Started, Stop
from tests.worker.process.peer import Process, alive, submit, wait_until

pytestmark = pytest.mark.process
SOON_S = 10.0
"""Seconds within which a worker must exit after its daemon has."""


@pytest.fixture
def worker():
    made = Process()
    yield made
    made.close()


def test_a_worker_serves_and_exits_with_status_0(worker):
    worker.load()
    worker.send(submit("a", max_tokens=5))
    worker.wait_for_end("a")
    worker.send(Stop())
    worker.read_all()
    assert worker.wait() == 0
    assert worker.of(Started)[0].pid == worker.process.pid
    assert worker.of(Started)[0].mlx
    assert worker.of(RowFinished)[0].reason == "length"


def exits_soon(worker):
    start = time.monotonic()
    worker.sock.close()
    worker.wait()
    assert time.monotonic() - start < SOON_S
    return worker.process.returncode


def test_the_end_of_the_stream_ends_an_idle_worker(worker):
    worker.load()
    assert exits_soon(worker) == 0


def test_the_end_of_the_stream_ends_a_worker_during_a_step(worker):
    worker.load("fake:tps=0.02")  # a step takes 50 s
    worker.send(submit("a", prompt="x", max_tokens=100))
    worker.wait_for(lambda: worker.of(RowTokens))  # tokens of the first step; the second is running
    assert exits_soon(worker) == 0


@pytest.mark.parametrize("fault", ["load=600", "load_hang=1"])
def test_the_end_of_the_stream_ends_a_worker_during_the_load(worker, fault):
    worker.send(LoadModel(source=f"fake:{fault}"))
    worker.wait_for(lambda: worker.of(Progress))
    assert exits_soon(worker) == 0


def test_the_end_of_the_stream_ends_a_worker_with_unread_reports(worker):
    worker.load("fake:tps=0")
    for row in range(16):
        worker.send(submit(f"r{row}", max_tokens=16_000))
    assert exits_soon(worker) == 0


@pytest.mark.parametrize("source", ["fake:tps=0", "fake:tps=0.02", "fake:hang_after=1"])
def test_a_killed_daemon_ends_its_worker(source):
    """The daemon is a child process of this test, and the worker its grandchild."""
    code = f"""
import sys, time
from tests.worker.process.peer import Process, submit
worker = Process()
worker.load({source!r})
worker.send(submit("a", max_tokens=100))
print(worker.process.pid, flush=True)
time.sleep(600)
"""
    daemon = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(daemon.stdout.readline())
    assert alive(pid)
    daemon.kill()
    daemon.communicate()
    wait_until(lambda: not alive(pid), SOON_S)


def test_a_crash_has_its_exit_status(worker):
    worker.load("fake:tps=0,crash_after=50")
    worker.send(submit("a", max_tokens=100))
    assert worker.wait() == CRASH_STATUS


def test_only_the_poisonous_prompt_crashes_the_worker(worker):
    worker.load("fake:tps=0,crash_on=poison")
    worker.send(submit("a", max_tokens=3))
    worker.wait_for_end("a")
    worker.send(submit("b", prompt="some poison", max_tokens=3))
    assert worker.wait() == CRASH_STATUS


def test_a_crash_during_the_load_has_its_exit_status(worker):
    worker.send(LoadModel(source="fake:load_crash=1"))
    worker.read_all()
    assert worker.wait() == CRASH_STATUS


def test_a_hung_worker_can_be_terminated(worker):
    worker.load("fake:tps=0,hang_after=3")
    worker.send(submit("a", max_tokens=100))
    worker.wait_for(lambda: worker.tokens("a"))
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait() == -signal.SIGTERM


def test_the_worker_ignores_ctrl_c(worker):
    worker.load()
    worker.process.send_signal(signal.SIGINT)
    worker.send(submit("a", max_tokens=3))
    worker.wait_for_end("a")


@pytest.mark.parametrize("data", [b"\0\0\0\1\xc1", b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_daemon_that_breaks_the_protocol_ends_the_worker(worker, data):
    worker.sock.sendall(data)
    assert worker.wait() == 1
    assert "protocol.errors." in worker.errors()


def test_the_first_command_must_be_a_load(worker):
    worker.send(submit("a"))
    assert worker.wait() == 1
    assert "not a load" in worker.errors()


def test_a_fake_worker_never_imports_mlx():
    code = (
        "import sys, kvd.worker.__main__, kvd.worker.fake.engine;"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm', 'transformers')];"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_idle_worker_takes_no_cpu_time(worker):
    worker.load()
    before = cpu_ticks(worker.process.pid)
    count = len(worker.reports)
    worker.read(0.5)  # an idle worker sends nothing, or its first counters
    worker.read(0.5)
    assert len(worker.reports) <= count + 1
    assert cpu_ticks(worker.process.pid) - before <= 5  # of 100 per second


def cpu_ticks(pid):
    stat = Path(f"/proc/{pid}/stat").read_text()
    return sum(map(int, stat.rpartition(")")[2].split()[11:13]))


@pytest.mark.mlx
def test_a_worker_imports_no_other_framework(tmp_path, monkeypatch):
    """PyTorch takes more than a worker without a grant may hold, and seconds of each load."""
    (tmp_path / "torch").mkdir()
    module = f"import os; os.mkdir({str(tmp_path / 'imported')!r}); __version__ = '2.11.0'"
    (tmp_path / "torch" / "__init__.py").write_text(module)
    (tmp_path / "torch-2.11.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n"
    (tmp_path / "torch-2.11.0.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = Process("mlx")
    try:
        worker.load("demo")
        assert worker.of(Ready)
    finally:
        worker.close()
    assert not (tmp_path / "imported").exists()
