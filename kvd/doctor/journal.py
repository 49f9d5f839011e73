"""Checks of the journal: damaged records, and the copy that a start keeps of a damaged file."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path

from kvd.doctor.finding import Finding, fail, ok, warn
from kvd.doctor.scene import Scene
from kvd.host import listen
from kvd.host.journal_file import Damage, JournalFile
from kvd.host.units import format_bytes


def records(scene: Scene) -> Finding:
    """Check for damaged records, and for the copy of a damaged journal."""
    path = scene.home.journal / "requests"
    copy = path.with_suffix(".damaged")
    try:
        if copy.exists():
            return _damaged_copy(copy)
        if not path.exists():
            return ok("journal", f"no {path}: no requests of an earlier daemon")
        if listen.holder(scene.home) is not None:
            return ok("journal", f"the daemon writes {path}")
        found, damage, size = _examine(path)
    except OSError as error:
        advice = f"chmod -R u+rwX {shlex.quote(str(path.parent))}, or repair the disk"
        return fail("journal", f"cannot read {path.parent}: {error.strerror}", advice)
    observed = f"{found} records of an earlier daemon in {path}, {format_bytes(size)}"
    if damage.records:
        return warn(
            "journal",
            f"{observed}; {_describe(damage)}",
            "nothing to do: the next start skips the damage and keeps a copy of the file",
            damaged_records=damage.records,
            damaged_bytes=damage.nbytes,
        )
    return ok("journal", observed, bytes=size)


def _damaged_copy(path: Path) -> Finding:
    found, damage, size = _examine(path)
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    return warn(
        "journal",
        f"a start of the daemon found a damaged journal, last written {written}, and restored "
        f"{found} of its records; {_describe(damage)}",
        "check the disk, unless kvd was updated or the machine lost power; then "
        f"rm {shlex.quote(str(path))} ({format_bytes(size)}), which contains prompts",
        damaged_records=damage.records,
        damaged_bytes=damage.nbytes,
    )


def _examine(path: Path) -> tuple[int, Damage, int]:
    """Return the usable records, what is damaged, and the bytes of a journal's file."""
    damage, file = Damage(), JournalFile(path, os.O_RDONLY)
    try:
        return sum(1 for _ in file.records(damage)), damage, file.size
    finally:
        file.close()


def _describe(damage: Damage) -> str:
    return (
        f"{damage.records} records with {format_bytes(damage.nbytes)} are damaged or of another "
        "version"
    )
