"""`Spawner` with real child processes, each of which runs a few lines of Python as its worker."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from actors.ports import Exit
from kvd.daemon.spawn import Spawner
from kvd.host.environment import environment
from kvd.host.memory.oom import OomWatch
from kvd.worker.serving import calibration
from protocol.worker import LoadModel, Progress, Started, Stop

PREAMBLE = """
import os, socket, sys, time
from protocol.framing import FrameDecoder, decode_command, encode_frame
from protocol.worker import Progress, Started
link = socket.socket(fileno=int(sys.argv[1]))
say = lambda report: link.sendall(encode_frame(report))
say(Started(pid=os.getpid()))
"""


class Scripted(Spawner):
    """Starts processes that run a script instead of a worker."""

    def __init__(self, script: str) -> None:
        super().__init__()
        self._script = script

    def _arguments(self, fd: int) -> list[str]:
        return [sys.executable, "-c", PREAMBLE + self._script, str(fd)]


class Child:
    """Spawns one child, and records its reports and its exit."""

    def __init__(self) -> None:
        self.reports: list[object] = []
        self.exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.first = asyncio.Event()

    async def spawn(self, script: str):
        return await Scripted(script)("demo", on_report=self.report, on_exit=self.ended)

    def report(self, report) -> None:
        assert not self.exit.done(), "a report after the exit"
        self.reports.append(report)
        self.first.set()

    def ended(self, how: Exit) -> None:
        self.exit.set_result(how)


def open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


@pytest.fixture
async def heard():
    async with asyncio.timeout(20):
        yield Child()


async def test_all_reports_come_before_the_exit_and_nothing_after(heard):
    worker = await heard.spawn(
        "for i in range(3000): say(Progress(stage=f'stage {i}', fraction=i / 3000))\nsys.exit(3)"
    )
    assert await heard.exit == Exit(3)
    assert heard.reports[0] == Started(pid=worker.pid)
    assert len(heard.reports) == 3001
    assert heard.reports[-1] == Progress(stage="stage 2999", fraction=2999 / 3000)


async def test_commands_sent_before_the_worker_reads_arrive_in_order(heard):
    worker = await heard.spawn(
        """
decoder, seen = FrameDecoder(), []
while len(seen) < 2:
    seen += [decode_command(frame) for frame in decoder.receive(link.recv(65536))]
say(Progress(stage=' '.join(type(c).__name__ for c in seen), fraction=len(seen[0].source)))
"""
    )
    worker.send(LoadModel(source="x" * 1_000_000))
    worker.send(Stop())
    assert await heard.exit == Exit(0)
    assert heard.reports[-1] == Progress(stage="LoadModel Stop", fraction=1_000_000)
    worker.send(Stop())
    worker.terminate()
    worker.kill()


async def test_a_worker_reads_the_end_of_the_stream_when_the_daemon_closes_it(heard):
    worker = await heard.spawn("assert link.recv(1) == b''\nsys.exit(9)")
    await heard.first.wait()
    worker._frames.close()
    assert await heard.exit == Exit(9)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_signal_is_a_negative_status(heard, number):
    worker = await heard.spawn("time.sleep(60)")
    await heard.first.wait()
    if number == signal.SIGTERM:
        worker.terminate()
    else:
        worker.kill()
    assert await heard.exit == Exit(-number)


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("counted", [False, True])
async def test_an_out_of_memory_kill_is_recognized(heard, tmp_path, ours, counted):
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("pgfault 7\noom_kill 4\n")
    spawner = Scripted("time.sleep(60)")
    spawner._oom = OomWatch(vmstat)
    worker = await spawner("demo", on_report=heard.report, on_exit=heard.ended)
    await heard.first.wait()
    if counted:
        vmstat.write_text("pgfault 9\noom_kill 5\n")
    worker.kill() if ours else os.kill(worker.pid, signal.SIGKILL)
    assert await heard.exit == Exit(-9, starved=counted and not ours)


def test_one_kill_of_the_kernel_explains_one_death(tmp_path):
    vmstat = tmp_path / "vmstat"
    watch = OomWatch(vmstat)
    assert not watch.killed_process()  # the file does not exist
    vmstat.write_text("oom_kill 1\n")
    assert [watch.killed_process(), watch.killed_process()] == [True, False]
    vmstat.write_text("oom_kill 2\n")
    watch.process_started()
    assert not watch.killed_process()


@pytest.mark.parametrize("garbage", [r"b'\0\0\0\3abc'", r"b'\xff\xff\xff\xff'"])
async def test_a_worker_that_breaks_the_protocol_is_killed_with_its_own_status(heard, garbage):
    with capture_logs() as logs:
        await heard.spawn(f"link.sendall({garbage})\ntime.sleep(60)")
        assert await heard.exit == Exit(76)
    assert [log["event"] for log in logs] == ["worker broke the protocol"]


async def test_a_grandchild_that_keeps_the_pipes_open_does_not_delay_the_exit_for_long(heard):
    await heard.spawn("if os.fork(): os._exit(5)\ntime.sleep(4)")
    started = asyncio.get_running_loop().time()
    assert await heard.exit == Exit(5)
    assert asyncio.get_running_loop().time() - started < 3.5


async def test_what_a_worker_prints_goes_into_the_log_line_by_line(heard):
    with capture_logs() as logs:
        worker = await heard.spawn(
            """
print('one\\ntwo', flush=True)
sys.stderr.buffer.write(b'10%\\r20%\\r\\xff bad\\n\\n' + b'x' * 20000 + b'\\nno newline')
"""
        )
        assert await heard.exit == Exit(0)
    lines = [log["line"] for log in logs]
    assert lines[:5] == ["one", "two", "10%", "20%", "\ufffd bad"]
    assert "".join(lines[5:-1]) == "x" * 20000
    assert lines[-1] == "no newline"
    assert {(log["model"], log["worker_pid"]) for log in logs} == {("demo", worker.pid)}


async def test_a_process_that_cannot_be_started_raises_and_leaks_nothing(heard, monkeypatch):
    before = open_files()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(OSError, match="nowhere"):
        await heard.spawn("")
    assert open_files() == before


async def test_a_worker_inherits_only_its_end_of_the_socket(heard):
    reader, writer = os.pipe()
    try:
        await heard.spawn(
            "fds = [int(f) for f in os.listdir('/dev/fd')]\nsay(Progress(stage='', "
            "fraction=sum(1 for f in fds if f > 2 and f != link.fileno())))"
        )
        assert await heard.exit == Exit(0)
    finally:
        os.close(reader)
        os.close(writer)
    assert heard.reports[-1].fraction <= 1  # the descriptor that lists /dev/fd


def test_the_environment_preloads_the_blas(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so")
    variables = environment(Path("/lib/libopenblas.so.0"))
    assert variables["LD_PRELOAD"] == "/lib/libopenblas.so.0:/lib/other.so"
    assert variables["KVD_BLAS_PRELOADED"] == "/lib/libopenblas.so.0"
    assert "KVD_BLAS_PRELOADED" not in environment(None)
    assert environment(None)["LD_PRELOAD"] == "/lib/other.so"


def test_workers_get_the_attention_setting():
    assert Spawner()._environment["KVD_ATTENTION"] == "auto"
    assert Spawner(attention="reference")._environment["KVD_ATTENTION"] == "reference"


def test_workers_get_the_calibration_folder(tmp_path, monkeypatch):
    monkeypatch.delenv(calibration.FOLDER_VARIABLE, raising=False)
    assert Spawner(calibration=tmp_path)._environment[calibration.FOLDER_VARIABLE] == str(tmp_path)
    assert calibration.FOLDER_VARIABLE not in Spawner()._environment
