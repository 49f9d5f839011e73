"""Checks of the home: access, configuration, lock, sockets and log."""

from __future__ import annotations

import os
import shlex
import socket
import stat
from pathlib import Path

from kvd.config.models_dir import models_dir
from kvd.config.sources import absolute
from kvd.doctor.finding import Finding, fail, ok, skip, warn
from kvd.doctor.scene import Scene
from kvd.host import listen
from kvd.host.home import SOCKET_PATH_LIMIT
from kvd.host.logs import FILE_BYTES, FILES_KEPT
from kvd.host.models_dir import check_model
from kvd.host.units import format_bytes
from protocol import paths
from protocol.errors import ConfigError, KvdError
from protocol.model_source import EMBEDDED, is_hub_id, unknown_source


def folder(scene: Scene) -> Finding:  # noqa: PLR0911 - one for each case
    """Check that the home is the user's and private."""
    root = scene.home.root
    try:
        found = root.stat()
    except FileNotFoundError:
        return ok("home", f"{root} does not exist; the first start creates it")
    except OSError as error:
        return fail("home", f"cannot read {root}: {error.strerror}", _ANOTHER)
    if not stat.S_ISDIR(found.st_mode):
        return fail("home", f"{root} is not a folder", _ANOTHER)
    if found.st_uid != os.geteuid():
        return fail("home", f"{root} belongs to another user (uid {found.st_uid})", _ANOTHER)
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        advice = f"chmod 700 {shlex.quote(str(root))}, or start the daemon, which does the same"
        return warn("home", f"{root} is open to others (mode {mode:o})", advice)
    if not os.access(root, os.W_OK | os.X_OK):
        return fail("home", f"{root} cannot be written", f"chmod 700 {shlex.quote(str(root))}")
    return ok("home", f"{root}, private")


_ANOTHER = "give kvd a folder of your own with KVD_HOME or --home"


def configuration(scene: Scene) -> Finding:
    path, found = scene.home.config, scene.config
    if isinstance(found, ConfigError):
        key = found.detail.get("key")
        advice = f"correct {key!r} in {path}" if key else f"correct {path}"
        return fail("config", found.message, f"{advice}; docs/configuration.md lists the keys")
    if not path.exists():
        return ok("config", f"no {path}: the defaults apply")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o022:
        advice = f"chmod 600 {shlex.quote(str(path))}"
        return fail("config", f"others can write {path} (mode {mode:o})", advice)
    return ok("config", f"{path} is valid and lists {len(found.entries)} models")


def environment(scene: Scene) -> list[Finding]:
    """Check the variables that `kvd serve` reads."""
    return [
        fail("environment", problem, "correct the variable, or `kvd serve` does not start")
        for problem in scene.invalid_variables
    ]


def models(scene: Scene) -> Finding | list[Finding]:
    """Check the sources of the configuration's models as a load does, without the Hub."""
    if isinstance(scene.config, ConfigError):
        return skip("models", "the configuration is invalid")
    entries = scene.config.entries
    faults = []
    for index, entry in enumerate(entries):
        try:
            _check_source(absolute(entry.source, scene.home.root))
        except KvdError as error:
            advice = f"correct models in {scene.home.config}"
            faults.append(fail(f"models[{index}]", error.message, advice))
    if faults:
        return faults
    hub = sum(is_hub_id(absolute(entry.source, scene.home.root)) for entry in entries)
    return ok("models", f"{len(entries)} in the configuration, of which the Hub has {hub}")


def _check_source(source: str) -> None:
    if source in EMBEDDED or is_hub_id(source):
        return
    if not source.startswith("/"):
        raise unknown_source(source)
    check_model(Path(source))


def models_folder(scene: Scene) -> Finding:
    """Check that all folders of the models folder could be loaded."""
    if isinstance(scene.config, ConfigError):
        return skip("models folder", "the configuration is invalid")
    folder = models_dir(scene.config, scene.home.root)
    if folder.path is None:
        return ok("models folder", 'models_dir = "": there is none')
    found = folder.scan()
    broken = [f"{one.name}: {one.problem}" for one in found if one.problem]
    if broken:
        return warn("models folder", "; ".join(broken), f"complete or remove it in {folder.path}")
    if not paths.is_folder(folder.path):
        return ok("models folder", f"{folder.path} does not exist; it is optional")
    return ok("models folder", f"{folder.path} has {len(found)} models")


def lock(scene: Scene) -> Finding:
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
        observed = f"{path} has {size} bytes, and this system allows {SOCKET_PATH_LIMIT}"
        return fail(name, observed, "choose a shorter KVD_HOME")
    try:
        found = path.lstat()
    except FileNotFoundError:
        return _absent(name, path, scene)
    except OSError as error:
        return fail(name, f"cannot read {path}: {error.strerror}", "see `home` above")
    if not stat.S_ISSOCK(found.st_mode):
        return fail(name, f"{path} is not a socket", "move it away")
    reason = _refusal(path)
    if reason is not None:
        return _stale(name, path, reason, scene)
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        advice = f"chmod 600 {shlex.quote(str(path))}"
        return warn(name, f"{path} is open to others (mode {mode:o})", advice)
    left = SOCKET_PATH_LIMIT - size
    return ok(name, f"a process listens on {path}, {left} bytes below the length limit")


def _absent(name: str, path: Path, scene: Scene) -> Finding:
    if name == "socket" and listen.holder(scene.home) is not None:
        observed = f"a daemon runs, but {path} was deleted, so no client can connect"
        return fail(
            name,
            observed,
            "stop the daemon (SIGTERM), start it again, and exclude the home from cleanup",
        )
    return ok(name, f"no {path}: the socket exists only while a daemon listens on it")


def _refusal(path: Path) -> str | None:
    """Return why a connect fails; None if a process listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(2.0)
        try:
            client.connect(str(path))
        except TimeoutError:
            return "it accepts no clients"
        except OSError as error:
            return error.strerror or str(error)
    return None


def _stale(name: str, path: Path, reason: str, scene: Scene) -> Finding:
    if (pid := listen.holder(scene.home)) is not None:
        advice = f"read the log; `kill {pid}` if the daemon hangs" if pid else "read the log"
        return fail(name, f"{path}: {reason}, though a daemon runs", advice, stale="no")
    observed = f"{path} is stale: the daemon that created it is dead ({reason})"
    return warn(
        name, observed, "nothing to do: the next start of the daemon replaces it", stale="yes"
    )


def log(scene: Scene) -> Finding:
    logs = scene.home.logs
    if logs.exists() and not os.access(logs, os.W_OK):
        return fail("log", f"{logs} cannot be written", f"chmod 700 {shlex.quote(str(logs))}")
    size = sum(file.stat().st_size for file in logs.glob("*.log*"))
    most = FILE_BYTES * (FILES_KEPT + 1)
    return ok("log", f"{format_bytes(size)} of at most {format_bytes(most)} in {logs}", bytes=size)
