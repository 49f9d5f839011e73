"""Trials of the system: sockets, memory readings and the service's files."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kvd.config.config import Config
from kvd.doctor.finding import REPORT, Finding, fail, ok, skip
from kvd.doctor.scene import Scene
from kvd.host import listen, memory
from kvd.host.home import Home
from kvd.service import installer
from kvd.service.describe import describe


def trials(scene: Scene) -> Iterator[str | Finding]:
    """Run the trials in order; an exception becomes a finding."""
    for trial in (unix_socket, other_process, service_file):
        name = trial.__name__.replace("_", " ")
        yield name
        with tempfile.TemporaryDirectory(prefix="kvd-", dir=short_folder()) as folder:
            yield guarded(name, lambda: trial(scene, Path(folder)))  # noqa: B023 - called at once


def short_folder() -> str | None:
    """Return the folder for temporary homes; macOS's default path is too long for a socket."""
    return "/tmp" if sys.platform == "darwin" else None  # noqa: S108 - made private by mkdtemp


def guarded(name: str, trial: Callable[[], Finding]) -> Finding:
    try:
        return trial()
    except Exception as error:  # noqa: BLE001 - the other trials must still run
        return fail(name, f"{type(error).__name__}: {error}", REPORT)


def unix_socket(_scene: Scene, folder: Path) -> Finding:
    """Check a socket's mode, peer and disconnect, and the lock."""
    home = Home(folder / "h")
    home.create()
    wrong = []
    with listen.hold_lock(home), listen.bind(home.socket) as listener:
        mode = home.socket.stat().st_mode & 0o777
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.connect(str(home.socket))
        peer, _ = listener.accept()
        with peer:
            uid = listen.peer_uid(peer)
            early = listen.hung_up(peer)
            client.close()
            late = listen.hung_up(peer)
        if mode != 0o600:
            wrong.append(f"its mode is {mode:o}")
        if uid != os.geteuid():
            wrong.append(f"the peer's uid is read as {uid}")
        if early or not late:
            wrong.append("a disconnect is not detected")
        if listen.holder(home) != os.getpid():
            wrong.append(f"the lock's holder is read as {listen.holder(home)}")
    if listen.holder(home) is not None:
        wrong.append("the lock stays held")
    if wrong:
        return fail("unix socket", "; ".join(wrong), REPORT)
    observed = f"mode 600, peer uid {uid}, disconnects are detected, the lock shows its holder"
    return ok("unix socket", observed)


def other_process(_scene: Scene, _folder: Path) -> Finding:
    """Check that footprints of other processes can be read, as the daemon does for workers."""
    size = 128 * 2**20
    command = [sys.executable, "-c", f"b = bytearray(b'x') * {size}; print(flush=True); input()"]
    reader = memory.reader()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:  # noqa: S603
        assert child.stdout is not None
        child.stdout.readline()
        read = reader.footprint(child.pid)
        child.kill()
    gone = reader.footprint(child.pid)
    observed = (
        f"the footprint of a process that holds {size >> 20} MiB is {read >> 20} MiB, and {gone} "
        "after its end"
    )
    if size < read < 1.5 * size and gone == 0:
        return ok("other process", observed, footprint_bytes=read)
    return fail("other process", observed, REPORT, footprint_bytes=read)


def service_file(scene: Scene, folder: Path) -> Finding:
    """Check the files of `service install` with the system's own tool."""
    name = "service file"
    checker = _CHECKERS.get(scene.platform)
    if checker is None or shutil.which(checker[0]) is None:
        return skip(name, "this system has no program to check it with")
    home = Home(folder / "h")
    home.create()
    count, complaints = 0, ""
    for on_demand in (False, True):
        below = folder / str(on_demand)  # checked separately: units of the same name conflict
        below.mkdir()
        manager = installer.manager_of(describe(home, Config(), on_demand=on_demand))
        for path, content in manager.files().items():
            (below / path.name).write_bytes(content)
        paths = sorted(below.iterdir())
        count += len(paths)
        complaints += _complaint([*checker, *map(str, paths)])
    if complaints:
        return fail(name, complaints, REPORT)
    return ok(name, f"{checker[0]} finds nothing wrong in {count} files")


_CHECKERS = {"darwin": ("plutil", "-lint", "-s"), "linux": ("systemd-analyze", "--user", "verify")}


def _complaint(command: list[str]) -> str:
    """Return a checker's output, which counts as an error even with exit status 0."""
    variables = os.environ | {"XDG_RUNTIME_DIR": os.environ.get("XDG_RUNTIME_DIR") or "/tmp"}  # noqa: S108
    done = subprocess.run(  # noqa: S603 - the system's own program
        command, capture_output=True, text=True, check=False, timeout=30, env=variables
    )
    output = (done.stdout + done.stderr).strip()
    return output or (f"exit status {done.returncode}" if done.returncode else "")
