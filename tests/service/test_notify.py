"""The datagrams of sd_notify, and the sockets that systemd and launchd pass on."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import sys
from pathlib import Path

import pytest

from kvd.service.activation import from_launchd, from_systemd
from kvd.service.notify import Notifier


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as subject:
        subject.bind(str(tmp_path / "n"))
        subject.settimeout(5)
        yield subject


def heard(manager: socket.socket) -> dict[str, str]:
    return dict(line.split("=", 1) for line in manager.recv(4096).decode().splitlines())


def test_the_environment_is_read_and_cleared(manager):
    ours = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "0", "HOME": "/"}
    Notifier.from_environment(ours).ready("a\nb  c")
    assert ours == {"HOME": "/"}
    assert heard(manager) == {"READY": "1", "STATUS": "a b c"}


async def test_keepalives_start_if_the_environment_has_a_watchdog(manager):
    ours = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "60000000"}
    it = Notifier.from_environment(ours)
    it.ready("x")
    assert heard(manager)["READY"] == "1"
    assert heard(manager) == {"WATCHDOG": "1"}
    it.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract names")
def test_the_name_of_the_socket_may_be_abstract():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as subject:
        subject.bind(b"\0kvd-test-%d" % os.getpid())
        Notifier(f"@kvd-test-{os.getpid()}").ready("x")
        assert heard(subject) == {"READY": "1", "STATUS": "x"}


async def test_keepalives_are_sent_only_while_the_event_loop_runs(manager):
    it = Notifier(manager.getsockname(), watchdog_s=0.02)
    it.ready("x")
    assert heard(manager) == {"READY": "1", "STATUS": "x"}
    assert heard(manager) == {"WATCHDOG": "1"}
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):  # the event loop has not run since
        manager.recv(4096)
    await asyncio.sleep(0.05)
    assert heard(manager) == {"WATCHDOG": "1"}
    it.close()


def test_a_watchdog_for_another_process_is_ignored():
    found = Notifier.from_environment({"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"})
    assert found._every_s is None


def test_a_reload_reports_its_start_and_a_stop_its_timeout(manager):
    it = Notifier(manager.getsockname())
    it.reloading()
    said = heard(manager)
    assert said["RELOADING"] == "1"
    assert int(said["MONOTONIC_USEC"]) > 0
    it.stopping("ends", 20)
    assert heard(manager)["EXTEND_TIMEOUT_USEC"] == "35000000"


def test_without_a_manager_or_with_a_dead_one_nothing_happens(tmp_path):
    Notifier().ready("x")
    Notifier(str(tmp_path / "gone")).ready("x")


def listening(path: Path | None = None) -> socket.socket:
    one = socket.socket(socket.AF_UNIX if path else socket.AF_INET, socket.SOCK_STREAM)
    one.bind(str(path) if path else ("127.0.0.1", 0))
    one.listen()
    return one


def _is_free(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return True
    return False


def _three_free() -> int:
    """Return the first of three consecutive free descriptors below every limit."""
    return next(fd for fd in range(100, 250) if all(_is_free(fd + more) for more in range(3)))


@pytest.fixture
def passed(tmp_path):
    """Return the first of three consecutive descriptors of sockets. The test closes them."""
    made = [listening(tmp_path / "k"), listening(tmp_path / "h"), listening()]
    first = _three_free()
    for index, one in enumerate(made):
        os.dup2(one.fileno(), first + index, inheritable=True)
        one.close()
    return first


def test_systemds_sockets_are_found_by_name(passed):
    variables = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "3",
                 "LISTEN_FDNAMES": "kvd:http:http", "HOME": "/"}  # fmt: skip
    found = from_systemd(variables, passed)
    assert variables == {"HOME": "/"}
    assert [one.fileno() for one in found["kvd"]] == [passed]
    assert [one.family for one in found["http"]] == [socket.AF_UNIX, socket.AF_INET]
    for one in [*found["kvd"], *found["http"]]:
        assert not one.get_inheritable()
        assert not one.getblocking()
        one.close()


@pytest.mark.parametrize(
    "names", ["", "unknown:unknown:unknown", "kvd.socket:x.socket:kvd-http.socket"]
)
def test_sockets_without_known_names_are_assigned_by_their_kind(passed, names):
    variables = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "3", "LISTEN_FDNAMES": names}
    found = from_systemd(variables, passed)
    assert {name: len(of_it) for name, of_it in found.items()} == {"kvd": 2, "http": 1}
    for of_it in found.values():
        for one in of_it:
            one.close()


def test_sockets_for_another_process_and_files_are_not_used(tmp_path):
    with (tmp_path / "f").open("w") as file:
        first = _three_free()
        assert from_systemd({"LISTEN_PID": "1", "LISTEN_FDS": "1"}, first) == {}
        os.dup2(file.fileno(), first)
        assert from_systemd({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}, first) == {}
        assert _is_free(first)


def test_closed_descriptors_are_passed_over(passed):
    os.close(passed)
    variables = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "3",
                 "LISTEN_FDNAMES": "kvd:http:http"}  # fmt: skip
    found = from_systemd(variables, passed)
    assert {name: len(of_it) for name, of_it in found.items()} == {"http": 2}
    for one in found["http"]:
        one.close()


class Libsystem:
    """Fakes launch_activate_socket of <launch.h>: returns 0 and an array that the caller frees."""

    ESRCH = 3

    def __init__(self, **fds: list[int]) -> None:
        self._fds = fds
        self._kept = []
        self.freed = 0

    def launch_activate_socket(self, name, fds, count) -> int:
        if name.decode() not in self._fds:
            return self.ESRCH
        numbers = self._fds[name.decode()]
        array = (ctypes.c_int * len(numbers))(*numbers)
        self._kept.append(array)
        fds._obj.contents = ctypes.c_int.from_buffer(array)
        count._obj.value = len(numbers)
        return 0

    def free(self, _) -> None:
        self.freed += 1


def test_launchds_sockets(tmp_path):
    made = [listening(tmp_path / "k"), listening()]
    library = Libsystem(kvd=[made[0].detach()], http=[made[1].detach()])
    found = from_launchd(library)
    assert [one.getsockname() for one in found["kvd"]] == [str(tmp_path / "k")]
    assert [one.family for one in found["http"]] == [socket.AF_INET]
    assert library.freed == 2
    for of_it in found.values():
        for one in of_it:
            one.close()
    assert from_launchd(Libsystem()) == {}
