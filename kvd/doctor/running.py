"""Checks of the running daemon: answers, version and errors; its HTTP port and its service."""

from __future__ import annotations

import errno
import socket

import kvd
from kvd.client import Client
from kvd.config.http import DEFAULT_PORT
from kvd.doctor.finding import Finding, fail, ok, skip, warn
from kvd.doctor.scene import Scene
from kvd.host import listen
from protocol.errors import KvdError, NotRunning
from protocol.types import DaemonStatus


def daemon(scene: Scene) -> list[Finding]:
    try:
        with Client(home=scene.home.root, timeout_s=5.0) as client:
            status = client.status()
    except NotRunning:
        if listen.holder(scene.home) is None:
            return [skip("daemon", "none runs; `kvd serve` or `kvctl service install` starts one")]
        advice = "see `socket` above; stop the daemon and start it again"
        return [fail("daemon", "a daemon runs but does not answer", advice)]
    except KvdError as error:
        observed = f"a daemon runs but gives no valid answer: {error.message}"
        return [fail("daemon", observed, "restart the daemon")]
    return [_version(status), *_complaints(status)]


def _version(status: DaemonStatus) -> Finding:
    observed = f"pid {status.pid} answers, version {status.version}, {status.state}"
    if status.version != kvd.__version__:
        advice = "restart the daemon: `kvctl service restart`, or `kvctl shutdown` and `kvd serve`"
        return fail("daemon", f"{observed}; this kvctl is {kvd.__version__}", advice)
    if status.violations:
        observed += f"; its grants exceeded the budget {status.violations} times"
        return fail("daemon", observed, "report this bug with the log")
    return ok("daemon", observed, footprint_bytes=status.footprint_bytes)


def _complaints(status: DaemonStatus) -> list[Finding]:
    found = []
    if status.config_error is not None:
        advice = (
            "correct config.toml and reload it (`kvctl reload`); until then, the previous "
            "configuration stays in effect"
        )
        found.append(fail("reload", status.config_error, advice))
    elif status.config_pending:
        keys = ", ".join(status.config_pending)
        found.append(warn("reload", f"{keys} wait for a restart", "restart the daemon"))
    for model in status.models:
        name = f"model {model.name}"
        if model.state == "failed":
            why = model.error.message if model.error else "its load failed"
            advice = f"`kvctl unload {model.name}`, then `kvctl load` it again"
            found.append(fail(name, why, advice))
        elif model.state == "backoff":
            why = model.error.message if model.error else "its worker died"
            found.append(warn(name, f"it restarts: {why}", "`kvctl status` shows its state"))
        elif model.info is not None and model.info.fused is not None and not model.info.fused.used:
            why = f"its fused kernels are not used: {model.info.fused.reason}"
            advice = "load it again on an idle machine; report it if that does not help"
            found.append(warn(name, why, advice))
    return found


def http_port(scene: Scene) -> Finding:
    http = scene.settings.http
    port = DEFAULT_PORT if http.port is None else http.port
    if not (http.enabled and http.tcp):
        return skip("http port", "HTTP over TCP is switched off")
    if port == 0:
        return ok("http port", "any free port; `kvctl status` shows it")
    observed = f"{http.host} port {port}"
    if not listen.holder(scene.home) and (taken := _taken(http.host, port)):
        advice = "end that program, or set port of [http] in config.toml (0 takes any free port)"
        return warn("http port", f"{observed}: {taken}", advice)
    return ok("http port", observed)


def _taken(host: str, port: int) -> str | None:
    """Return why the port cannot be bound; None if it can."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        return "another program uses the port" if taken else error.strerror or str(error)
    return None


def service(scene: Scene) -> Finding:
    """Check that the installed service is up to date and runs."""
    from kvd.service import installer  # noqa: PLC0415 - only here
    from kvd.service.describe import describe  # noqa: PLC0415 - as above

    try:
        manager = installer.manager_of(describe(scene.home, scene.settings))
        if manager.is_on_demand():
            manager = installer.manager_of(describe(scene.home, scene.settings, on_demand=True))
        if not installer.installed(manager):
            if foreign := installer.foreign(manager):
                advice = "find out what the file is for; kvd does not change it"
                return warn("service", installer.describe_foreign(foreign[0]), advice)
            return skip("service", "not installed; `kvctl service install` installs it")
        state = manager.state()
        if installer.outdated(manager):
            observed = (
                "the installed files are outdated: this version and configuration would write "
                "different contents"
            )
            return warn("service", observed, "`kvctl service install` updates them")
    except KvdError as error:
        return warn("service", error.message, "`kvctl service status` has more")
    if state.status == "failed":
        return fail("service", f"{manager.name}: {state.details}", "`kvctl service logs` shows why")
    shown = filter(None, (state.status, state.details))
    return ok("service", f"{manager.name}: {', '.join(shown)}")
