"""Checks of the running daemon: answers, version and errors; its HTTP port and its service."""

from __future__ import annotations

from msgspec.structs import replace

import kvd
from kvd.config import variables
from kvd.config.http import DEFAULT_PORT
from kvd.doctor.finding import Finding, fail, ok, skip, warn
from kvd.doctor.scene import Scene
from kvd.host import listen
from kvd.http.listeners import try_tcp
from protocol.errors import ConfigError, KvdError, NotRunning
from protocol.types import DaemonStatus


def daemon(scene: Scene) -> list[Finding]:
    status = scene.status
    if isinstance(status, NotRunning):
        if listen.holder(scene.home) is None:
            return [skip("daemon", "none runs; `kvd serve` or `kvctl service install` starts one")]
        advice = "see `socket` above; stop the daemon and start it again"
        return [fail("daemon", "a daemon runs but does not answer", advice)]
    if isinstance(status, KvdError):
        observed = f"a daemon runs but gives no valid answer: {status.message}"
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
    found = [warn(one.key, one.observed, one.advice) for one in status.problems]
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
    """Check that the daemon's next start can listen; a running daemon has the port already."""
    http, status = scene.served.http, scene.status
    if not (http.enabled and http.tcp):
        return skip("http port", "HTTP over TCP is switched off")
    runs = isinstance(status, DaemonStatus) or listen.holder(scene.home) is not None
    try:
        problems = try_tcp(replace(http, port=0) if runs else http)
    except ConfigError as error:
        own = http.port == scene.settings.http.port
        source = f"[http] in {scene.home.config}" if own else variables.PORT
        return fail("http port", error.message, f"correct {source}")
    for problem in problems:
        return warn("http port", problem.observed, problem.advice)
    if isinstance(status, DaemonStatus):
        tcp = [address for address in status.http if address.startswith("http:")]
        listens = f"the daemon listens on {', '.join(tcp) or 'no port'}"
        return ok("http port", listens) if tcp else skip("http port", listens)
    if http.port == 0:
        return ok("http port", "any free port; `kvctl status` shows it")
    return ok("http port", f"{http.host} port {http.port or DEFAULT_PORT}")


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
