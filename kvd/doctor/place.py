"""Checks of the home: access, configuration, lock, sockets and log."""

from __future__ import annotations

import os
import shlex
import socket
import stat
from pathlib import Path

from kvd.doctor.finding import Finding, fail, ok, warn
from kvd.doctor.scene import Scene
from kvd.host import listen
from kvd.host.home import SOCKET_PATH_LIMIT
from kvd.host.logs import FILE_BYTES, FILES_KEPT
from kvd.host.units import format_bytes
from protocol.errors import ConfigError


def folder(scene: Scene) -> Finding:  # noqa: PLR0911 - one for each case
    """Check that the home is the user's and private."""
    root = scene.home.root
    try:
        found = root.stat()
    except FileNotFoundError:
        return ok("home", f"{root} is not there yet; the first start makes it")
    except OSError as error:
        return fail("home", f"cannot look at {root}: {error.strerror}", _ANOTHER)
    if not stat.S_ISDIR(found.st_mode):
        return fail("home", f"{root} is no folder", _ANOTHER)
    if found.st_uid != os.geteuid():
        return fail("home", f"{root} belongs to another user (uid {found.st_uid})", _ANOTHER)
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        todo = f"chmod 700 {shlex.quote(str(root))} (the next start does it, too)"
        return warn("home", f"{root} is open to others (mode {mode:o})", todo)
    if not os.access(root, os.W_OK | os.X_OK):
        return fail("home", f"{root} cannot be written", f"chmod 700 {shlex.quote(str(root))}")
    return ok("home", f"{root}, private")


_ANOTHER = "give kvd a folder of your own with KVD_HOME or --home"


def configuration(scene: Scene) -> Finding:
    """Check that `config.toml` is valid."""
    path, found = scene.home.config, scene.config
    if isinstance(found, ConfigError):
        key = found.detail.get("key")
        where = f"mend {key!r} in {path}" if key else f"mend {path}"
        return fail("config", found.message, f"{where}; docs/configuration.md lists the keys")
    if not path.exists():
        return ok("config", f"no {path}: the defaults hold")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o022:
        todo = f"chmod 600 {shlex.quote(str(path))}"
        return fail("config", f"others can write {path} (mode {mode:o})", todo)
    entries = found.entries
    missing = [one.source for one in entries if one.source.startswith(("/", "~", "."))
               and not _there(one.source, scene.home.root)]  # fmt: skip
    if missing:
        return fail(
            "config",
            f"models that are not there: {', '.join(missing)}",
            f"mend models in {path}",
        )
    return ok("config", f"{path} is understood; {len(entries)} models in it")


def _there(source: str, root: Path) -> bool:
    return (root / Path(source).expanduser()).exists()


def lock(scene: Scene) -> Finding:
    """Report whether a daemon uses the home."""
    path = scene.home.lock
    if path.is_dir():
        return fail("lock", f"{path} is a folder", "move it away")
    pid = listen.holder(scene.home)
    if pid is None:
        return ok("lock", "free: no daemon runs here")
    return ok("lock", f"held by the daemon, pid {pid or 'unknown'}")


def sockets(scene: Scene) -> list[Finding]:
    """Check that clients can reach the daemon."""
    return [
        _socket("socket", scene.home.socket, scene),
        _socket("http.sock", scene.home.http_socket, scene),
    ]


def _socket(name: str, path: Path, scene: Scene) -> Finding:  # noqa: PLR0911 - as above
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_LIMIT:
        return fail(
            name,
            f"{path} has {size} bytes, and this system allows {SOCKET_PATH_LIMIT}",
            "choose a shorter KVD_HOME",
        )
    try:
        found = path.lstat()
    except FileNotFoundError:
        return _absent(name, path, scene)
    except OSError as error:
        return fail(name, f"cannot look at {path}: {error.strerror}", "see `home` above")
    if not stat.S_ISSOCK(found.st_mode):
        return fail(name, f"{path} is in the way and no socket", "move it")
    reason = _refusal(path)
    if reason is not None:
        return _stale(name, path, reason, scene)
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        todo = f"chmod 600 {shlex.quote(str(path))}"
        return warn(name, f"{path} is open to others (mode {mode:o})", todo)
    return ok(name, f"{path} is listened on; {SOCKET_PATH_LIMIT - size} bytes to the path's limit")


def _absent(name: str, path: Path, scene: Scene) -> Finding:
    if name == "socket" and listen.holder(scene.home) is not None:
        return fail(
            name,
            f"a daemon runs, and {path} is gone: nobody can reach it",
            "end it (SIGTERM) and start it again; let nothing clean up the home",
        )
    return ok(name, f"{path}: none while no daemon runs")


def _refusal(path: Path) -> str | None:
    """Return why a connect fails; None if a process listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(2.0)
        try:
            client.connect(str(path))
        except TimeoutError:
            return "it does not take clients"
        except OSError as error:
            return error.strerror or str(error)
    return None


def _stale(name: str, path: Path, reason: str, scene: Scene) -> Finding:
    if (pid := listen.holder(scene.home)) is not None:
        todo = f"look at the log; end it (`kill {pid}`) if it hangs" if pid else "look at the log"
        return fail(name, f"{path}: {reason}, though a daemon lives", todo, stale="no")
    return warn(
        name,
        f"{path} is stale: the daemon that made it is dead ({reason})",
        "nothing: the next start replaces it; or `rm` it",
        stale="yes",
    )


def log(scene: Scene) -> Finding:
    """Check that the log can be written."""
    there = scene.home.logs
    if there.exists() and not os.access(there, os.W_OK):
        return fail("log", f"{there} cannot be written", f"chmod 700 {shlex.quote(str(there))}")
    size = sum(file.stat().st_size for file in there.glob("*.log*")) if there.exists() else 0
    most = FILE_BYTES * (FILES_KEPT + 1)
    return ok("log", f"{format_bytes(size)} of at most {format_bytes(most)} in {there}", bytes=size)
