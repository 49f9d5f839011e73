"""`Spawner` with real child processes, each of which runs a few lines of Python as its worker."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from actors.ports import Exit
from kvd.daemon.spawn import Spawner, free_addresses
from kvd.host.environment import environment
from kvd.host.memory.oom import OomWatch
from kvd.worker.serving import calibration
from protocol.gang import PEER_LOST
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

    def _arguments(self, fd, gang):
        return [sys.executable, "-c", PREAMBLE + self._script, str(fd), *gang]


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
    worker._ranks[0]._frames.close()
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


GANG = """
own = {key: value for key, value in zip(sys.argv[2::2], sys.argv[3::2])}
rank = int(own['--rank'])
controls = [socket.socket(fileno=int(fd)) for fd in own['--controls'].split(',')]
"""


class GangChild(Child):
    """Spawns several ranks, each of which runs the script."""

    async def spawn(self, script: str, ranks: int = 3):
        worker = await Scripted(GANG + script)(
            "demo", ranks=ranks, on_report=self.report, on_exit=self.ended
        )
        self.pids = worker.pids
        return worker

    async def started(self) -> None:
        while len(self.reports) < len(self.pids):
            self.first.clear()
            await self.first.wait()


@pytest.fixture
async def gang():
    async with asyncio.timeout(20):
        yield GangChild()


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_each_follower_has_a_socket_to_the_leader_and_an_address_in_the_ring(gang):
    worker = await gang.spawn(
        """
if rank:
    controls[0].sendall(b'%d' % rank)
    assert controls[0].recv(1) == b'', 'the leader ends'
    sys.exit(0)
heard = [one.recv(1).decode() for one in controls]
for address in own['--ring'].split(','):
    socket.create_server((address.split(':')[0], int(address.split(':')[1])))
say(Progress(stage=' '.join([own['--ranks'], own['--ring'], *heard]), fraction=0))
"""
    )
    assert worker.pid == worker.pids[0]
    assert await gang.exit == Exit(0, rank=0)
    ranks, ring, *heard = next(it.stage for it in gang.reports if isinstance(it, Progress)).split()
    assert (ranks, heard) == ("3", ["1", "2"])
    assert len(set(ring.split(","))) == 3
    assert {it.pid for it in gang.reports if isinstance(it, Started)} == set(worker.pids)


async def test_a_rank_inherits_only_its_own_sockets(gang):
    await gang.spawn(
        """
fds = {int(f) for f in os.listdir('/dev/fd')} - {0, 1, 2, link.fileno()}
fds -= {one.fileno() for one in controls}
open_fds = [f for f in fds if os.path.exists(f'/dev/fd/{f}')]
sys.exit(50 + len(open_fds))
"""
    )
    assert (await gang.exit).returncode == 50


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stopped", [None, 0, 1])
async def test_the_death_of_a_rank_ends_all_and_explains_the_end(gang, ranks, stopped):
    await gang.spawn("time.sleep(60)", ranks)
    await gang.started()
    victim = ranks - 1
    if stopped is not None:
        os.kill(gang.pids[stopped], signal.SIGSTOP)
        victim = max({*range(ranks)} - {stopped})  # only SIGKILL ends a stopped process
    os.kill(gang.pids[victim], signal.SIGSEGV)
    assert await gang.exit == Exit(-signal.SIGSEGV, rank=victim)
    assert not any(map(lives, gang.pids))


async def test_a_rank_that_noticed_the_death_of_another_is_not_taken_for_its_cause(gang):
    await gang.spawn(
        f"""
if rank == 1:
    time.sleep(60)
if rank == 0:
    controls[0].recv(1)
    os._exit({PEER_LOST})
time.sleep(60)
"""
    )
    await gang.started()
    os.kill(gang.pids[1], signal.SIGKILL)
    assert await gang.exit == Exit(-signal.SIGKILL, rank=1)


async def test_ranks_that_stay_after_the_leader_was_lost_are_killed(gang):
    await gang.spawn(f"os._exit({PEER_LOST}) if rank == 1 else time.sleep(60)")
    assert await gang.exit == Exit(PEER_LOST, rank=1)
    assert not any(map(lives, gang.pids))


async def test_a_signal_reaches_all_ranks(gang):
    worker = await gang.spawn("time.sleep(60)")
    await gang.started()
    os.kill(gang.pids[2], signal.SIGSTOP)
    worker.terminate()
    assert (await gang.exit).returncode == -signal.SIGTERM
    assert not any(map(lives, gang.pids))


async def sleeping_while_the_kernel_kills(gang, folder):
    """Return a worker; meanwhile the kernel has counted a kill for lack of memory."""
    vmstat = folder / "vmstat"
    vmstat.write_text("oom_kill 4\n")
    worker = await gang.spawn("time.sleep(60)")
    worker._oom = OomWatch(vmstat)
    await gang.started()
    vmstat.write_text("oom_kill 5\n")
    return worker


async def test_the_daemons_kill_is_no_kill_by_the_kernel(gang, tmp_path):
    worker = await sleeping_while_the_kernel_kills(gang, tmp_path)
    worker.kill()
    assert (await gang.exit).returncode == -signal.SIGKILL
    assert not gang.exit.result().starved


@pytest.mark.parametrize("rank", [0, 2])
async def test_a_kill_of_any_rank_by_the_kernel_is_recognized(gang, tmp_path, rank):
    await sleeping_while_the_kernel_kills(gang, tmp_path)
    os.kill(gang.pids[rank], signal.SIGKILL)
    assert await gang.exit == Exit(-signal.SIGKILL, starved=True, rank=rank)


async def test_a_follower_may_only_report_its_start(gang):
    with capture_logs() as logs:
        await gang.spawn("rank and say(Progress(stage='mine', fraction=0))\ntime.sleep(60)", 2)
        assert await gang.exit == Exit(76, rank=1)
    assert [(log["event"], log["rank"]) for log in logs] == [("worker broke the protocol", 1)]


async def test_the_log_names_the_rank_of_each_line(gang):
    with capture_logs() as logs:
        await gang.spawn(
            """
print('I am', rank, flush=True)
rank and controls[0].sendall(b'1')
[one.recv(1) for one in controls]
"""
        )
        await gang.exit
    assert {(log["line"], log["rank"]) for log in logs} == {(f"I am {r}", r) for r in range(3)}
    assert {(log["worker_pid"], log["rank"]) for log in logs} == {
        (pid, rank) for rank, pid in enumerate(gang.pids)
    }


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_a_rank_that_cannot_be_started_ends_those_that_were(failing, monkeypatch):
    before, pids = open_files(), []
    start = Spawner._start

    async def sometimes(self, name, rank, wiring, device):
        if rank == failing:
            raise OSError("no more processes")
        process = await start(self, name, rank, wiring, device)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(Spawner, "_start", sometimes)
    calls: list[object] = []
    with pytest.raises(OSError, match="no more"):
        await Scripted("time.sleep(60)")(
            "demo", ranks=3, on_report=calls.append, on_exit=calls.append
        )
    assert (len(pids), calls) == (failing, [])
    assert not any(map(lives, pids))
    assert open_files() == before


async def test_a_spawn_that_is_cancelled_leaves_no_rank(monkeypatch):
    before, pids, reached = open_files(), [], asyncio.Event()
    start = Spawner._start

    async def slow(self, name, rank, wiring, device):
        if rank == 2:
            reached.set()
            await asyncio.Event().wait()
        process = await start(self, name, rank, wiring, device)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(Spawner, "_start", slow)
    nothing = lambda _: None  # noqa: E731
    scripted = Scripted("time.sleep(60)")
    spawn = asyncio.create_task(scripted("demo", ranks=3, on_report=nothing, on_exit=nothing))
    await reached.wait()
    spawn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await spawn
    assert len(pids) == 2
    assert not any(map(lives, pids))
    assert open_files() == before


def test_free_addresses_differ_and_nothing_listens_there():
    addresses = free_addresses(8)
    assert len(set(addresses)) == 8
    for address in addresses:
        host, port = address.split(":")
        socket.create_server((host, int(port))).close()
