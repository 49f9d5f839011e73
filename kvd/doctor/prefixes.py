"""Checks of the prefix store: its folder, its index and the space that it needs."""

from __future__ import annotations

import os
import shlex
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

from kvd.doctor.finding import Finding, fail, ok, skip, warn
from kvd.doctor.scene import Scene
from kvd.host import listen
from kvd.host.units import format_bytes
from protocol.segments import SUFFIX

_NAME = "prefix store"


def store(scene: Scene) -> list[Finding]:
    """Check the folder of stored prefixes, as the next start of the daemon uses it."""
    root, limits = scene.home.prefixes, scene.settings.prefix_store.limits
    try:
        if not root.exists():
            unused = "the first start with a limit creates it"
            return [skip(_NAME, f"no {root}: {unused}")]
        if (fault := _folder(root)) is not None:
            return [fault]
        files = {it.stem: it.stat().st_size for it in root.glob(f"??/*{SUFFIX}")}
        nbytes = sum(files.values())
        size = f"{format_bytes(nbytes)} in {len(files)} segments"
        if not limits.limit_bytes:
            advice = f"rm -r {shlex.quote(str(root))} if you do not turn the store on again"
            return [
                warn(_NAME, f"off, but {root} has {size}", advice) if files else skip(_NAME, "off")
            ]
        found = [_space(scene, root, nbytes, size)]
        if listen.holder(scene.home) is None:
            found.append(_index(root, set(files)))
        if (copy := root / "index.damaged").exists():
            advice = f"check the disk, then rm {shlex.quote(str(copy))}"
            observed = "a start of the daemon found a damaged index and built a new one"
            found.append(warn("prefix index copy", observed, advice))
    except OSError as error:
        return [fail(_NAME, f"cannot read {root}: {error.strerror}", _repair(root))]
    return found


def _folder(root: Path) -> Finding | None:
    status = root.stat()
    if not stat.S_ISDIR(status.st_mode):
        return fail(_NAME, f"{root} is not a folder", "move it away")
    if status.st_uid != os.geteuid():
        return fail(_NAME, f"{root} belongs to another user (uid {status.st_uid})", "move it away")
    mode = stat.S_IMODE(status.st_mode)
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK) or not mode & stat.S_IWUSR:
        return fail(_NAME, f"{root} cannot be written (mode {mode:o})", _repair(root))
    if mode & 0o077:
        observed = f"{root} is open to others (mode {mode:o})"
        return warn(_NAME, observed, f"chmod 700 {shlex.quote(str(root))}")
    return None


def _repair(root: Path) -> str:
    return f"chmod -R u+rwX {shlex.quote(str(root))}, or repair the disk"


def _space(scene: Scene, root: Path, nbytes: int, size: str) -> Finding:
    limits, system = scene.settings.prefix_store.limits, os.statvfs(root)
    free = system.f_bavail * system.f_frsize
    numbers = {"stored_bytes": nbytes, "free_bytes": free}
    usable, wanted = f"{format_bytes(free)} of the disk are free", limits.keep_free_bytes
    if free < limits.keep_free_bytes:
        observed = f"{size}; {usable}, and prefix_store.keep_free is {format_bytes(wanted)}"
        advice = "free space or lower prefix_store.keep_free; until then nothing is stored"
        return warn(_NAME, observed, advice, **numbers)
    if free + nbytes - limits.keep_free_bytes < limits.limit_bytes:
        observed = (
            f"{size}; {usable}, so the limit of {format_bytes(limits.limit_bytes)} is not reached"
        )
        return warn(_NAME, observed, "free space or lower prefix_store.limit", **numbers)
    return ok(_NAME, f"{size} of at most {format_bytes(limits.limit_bytes)} in {root}", **numbers)


def _index(root: Path, files: set[str]) -> Finding:
    """Compare the index with the files, while no daemon changes them."""
    name, path = "prefix index", root / "index.sqlite"
    if not path.exists():
        return ok(name, f"no {path}: the next start reads the files")
    rebuilt = "nothing to do: the next start builds a new index from the files"
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
            (state,) = database.execute("PRAGMA quick_check(1)").fetchone()
            known = {key.hex() for (key,) in database.execute("SELECT key FROM segments")}
    except (sqlite3.Error, AttributeError) as error:
        return warn(name, f"{path} is damaged: {error}", rebuilt)
    if state != "ok":
        return warn(name, f"{path} is damaged: {state}", rebuilt)
    unknown, gone = len(files - known), len(known - files)
    if unknown or gone:
        observed = f"{unknown} files are not in {path}, and {gone} of its segments have no file"
        advice = "nothing to do: the next start makes both agree"
        return warn(name, observed, advice, unknown=unknown, gone=gone)
    return ok(name, f"{len(known)} segments, as in the folder", segments=len(known))
