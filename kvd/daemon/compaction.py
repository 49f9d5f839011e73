"""Compaction of the journal: a new file without the records that are no longer needed.

It runs in parts, one with each record that the journal writes, because copying the usual journal
at once blocks the event loop for hundreds of milliseconds. Records that are appended meanwhile are
copied as well.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

from kvd.host.journal_file import Damage, Files, Head, JournalFile, Scan

Run = Callable[[Callable[[], None]], "Future[None]"]
"""Runs work that blocks on the disk. The future has its result, or its OSError."""


def at_once(work: Callable[[], None]) -> Future[None]:
    future: Future[None] = Future()
    try:
        work()
    except OSError as error:
        future.set_exception(error)
    else:
        future.set_result(None)
    return future


def in_thread(work: Callable[[], None]) -> Future[None]:
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            future.set_exception(error)
        else:
            future.set_result(None)

    Thread(target=run, name="journal", daemon=True).start()
    return future


class Compaction:
    """A compaction that has begun. Every method raises OSError if the disk fails: `abandon` it."""

    def __init__(
        self, file: JournalFile, path: Path, files: Files, run: Run, found: Damage | None = None
    ) -> None:
        """``found``: damage that is known, and for which the old file is kept as a copy."""
        self.damage = Damage()
        """Damage in the part of the old file that has been copied."""
        self.found = found
        self.sizes: Counter[str] = Counter()
        """Bytes of each request in the new file."""
        self._path, self._files, self._run = path, files, run
        self._scan = Scan(file, self.damage)
        self._synced: Future[None] | None = None
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self._fresh = JournalFile(path.with_suffix(".new"), flags, files)

    def copy(self, nbytes: int | None, kept_bytes: Callable[[str], int | None]) -> None:
        """Copy what is needed of the next ``nbytes`` of the old file; None: of the rest.

        ``kept_bytes`` returns how many bytes a request's usable records have, or None if the
        request is not needed.
        """
        self._fresh.extend(
            data
            for head, data in self._scan.heads(nbytes)
            if self._is_needed(head, len(data), kept_bytes)
        )

    def install(self, *, wait: bool) -> JournalFile | None:
        """Return the new file when it has replaced the old one; None: it is not complete yet."""
        if not self._scan.at_end:
            return None
        if self._synced is None:
            # Without it, a power loss could leave an empty file in place of the journal.
            self._synced = self._run(self._fresh.sync)
        if not (wait or self._synced.done()):
            return None
        self._synced.result()
        if self.damage.records or (self.found is not None and self.found.records):
            self._keep_copy()
        self._files.replace(self._path.with_suffix(".new"), self._path)
        return self._fresh

    def abandon(self) -> None:
        """Delete the new file. Raises nothing."""
        if self._synced is None:
            self._fresh.close()
        else:  # closed now, its descriptor could become another file's before the sync ends
            self._synced.add_done_callback(lambda _: self._fresh.close())
        delete_unfinished(self._path, self._files)

    def _is_needed(self, head: Head, nbytes: int, kept_bytes: Callable[[str], int | None]) -> bool:
        """Decide about a request at its first record: a later drop is then copied, too."""
        rid, kept = head.rid, kept_bytes(head.rid)
        if head.t == "request":
            self.sizes.pop(rid, None)
            if kept is None:
                return False
        elif rid not in self.sizes:
            return False
        if head.t == "dropped":
            del self.sizes[rid]
            return True
        # Beyond these bytes are records that the journal could not use.
        if kept is not None and self.sizes[rid] + nbytes > kept:
            return False
        self.sizes[rid] += nbytes
        return True

    def _keep_copy(self) -> None:
        """Give the file a second name, in place of an older copy; without it if the disk fails."""
        copy = self._path.with_suffix(".damaged")
        with contextlib.suppress(OSError):
            self._files.unlink(copy)
        with contextlib.suppress(OSError):
            self._files.link(self._path, copy)


def delete_unfinished(path: Path, files: Files) -> None:
    """Delete the new file of a compaction that has not finished, if there is one."""
    with contextlib.suppress(OSError):
        files.unlink(path.with_suffix(".new"))
