"""Runs all checks in order; an exception in a check becomes a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvd.doctor import installation, journal, limits, place, prefixes, running
from kvd.doctor.finding import Finding, Section, fail
from kvd.doctor.scene import Scene

Check = Callable[[Scene], Finding | list[Finding]]
CHECKS: dict[str, tuple[Check, ...]] = {
    "Installation": (
        installation.python,
        installation.versions,
        installation.device,
        installation.openblas,
        installation.native,
    ),
    "Machine": (
        limits.host_memory,
        installation.wired_limit,
        limits.cgroup,
        limits.open_files,
        limits.locked_memory,
        limits.disk,
        limits.hub_cache,
    ),
    "Home": (
        place.folder,
        place.configuration,
        place.environment,
        place.models,
        place.models_folder,
        place.lock,
        place.sockets,
        journal.records,
        prefixes.store,
        place.log,
    ),
    "Daemon": (running.daemon, running.http_port, running.service),
}


def examine(scene: Scene) -> Iterator[Section]:
    for title, checks in CHECKS.items():
        yield Section(title, [finding for check in checks for finding in _run(check, scene)])


def _run(check: Check, scene: Scene) -> list[Finding]:
    try:
        found = check(scene)
    except Exception as error:  # noqa: BLE001 - the other checks must still run
        name = check.__name__.replace("_", " ")
        observed = f"the check itself failed: {type(error).__name__}: {error}"
        return [fail(name, observed, "report this bug of kvctl doctor")]
    return found if isinstance(found, list) else [found]
