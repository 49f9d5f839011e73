"""The index of the prefix store, a sqlite file.

All methods block, and raise `sqlite3.Error` and OSError.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path

import structlog

from actors.machines.segment_index import Segment

_APPLICATION = 0x6B766473  # "kvds", in the header of the file
_VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS segments (
    key BLOB PRIMARY KEY, space BLOB NOT NULL, base BLOB, tokens INTEGER NOT NULL,
    nbytes INTEGER NOT NULL, created REAL NOT NULL, used REAL NOT NULL, hits INTEGER NOT NULL,
    saved_s REAL NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS days (day INTEGER PRIMARY KEY, nbytes INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS models (
    space BLOB NOT NULL, model TEXT NOT NULL, PRIMARY KEY (space, model)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS encryption (key_id BLOB NOT NULL) STRICT;
"""
_FIELDS = Segment.__struct_fields__
_ADD = (
    f"INSERT OR REPLACE INTO segments ({', '.join(_FIELDS)}) "  # noqa: S608 - constants
    f"VALUES ({', '.join('?' * len(_FIELDS))})"
)
_NOT_DAMAGED = {
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM,
}  # fmt: skip
"""Error codes that say nothing about the contents of the file."""


class IndexFile:
    """An open index. Use it in one thread."""

    def __init__(self, path: Path | None) -> None:
        """Open or create the file. A damaged or foreign one is renamed to ``.damaged``.

        ``path`` None: keep the index in memory.
        """
        self._path = path
        try:
            self._database = self._open()
        except sqlite3.Error as error:
            code = error.sqlite_errorcode & 0xFF
            # It also means that the process has too many open files.
            cannot_open = code == sqlite3.SQLITE_CANTOPEN and path is not None and path.is_file()
            if path is None or code in _NOT_DAMAGED or cannot_open:
                raise
            _set_aside(path, str(error))
            self._database = self._open()

    def _open(self) -> sqlite3.Connection:
        if self._path is not None:
            with contextlib.suppress(IsADirectoryError):  # sqlite reports it below
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        database = sqlite3.connect(self._path or ":memory:", isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            if self._check(database):  # a complete index opens without a write
                database.executescript(_TABLES)
                database.execute(f"PRAGMA application_id = {_APPLICATION}")
                database.execute(f"PRAGMA user_version = {_VERSION}")
        except BaseException:
            database.close()
            raise
        return database

    def _check(self, database: sqlite3.Connection) -> bool:
        """Return whether the file is new or incomplete.

        Raises `sqlite3.DatabaseError` for a damaged file, and for one of another program.
        """
        ids = [
            database.execute(f"PRAGMA {it}").fetchone()[0]
            for it in ("application_id", "user_version")
        ]
        empty = not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if ids != [_APPLICATION, _VERSION] and not (empty and ids == [0, 0]):
            raise _damaged(f"the file is of application {ids[0]:#x}, version {ids[1]}")
        if (found := database.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise _damaged(found)
        if not empty:
            for table in ("segments", "days", "models", "encryption"):
                database.execute(f"SELECT * FROM {table} LIMIT 1")  # noqa: S608 - constants
        return empty or ids != [_APPLICATION, _VERSION]

    def close(self) -> None:
        self._database.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            raise

    def segments(self) -> dict[bytes, Segment]:
        rows = self._database.execute(f"SELECT {', '.join(_FIELDS)} FROM segments")  # noqa: S608
        return {row[0]: Segment(**dict(zip(_FIELDS, row, strict=True))) for row in rows}

    def written(self) -> dict[int, int]:
        """Return the bytes written by day, in days since 1970."""
        return dict(self._database.execute("SELECT day, nbytes FROM days"))

    def models(self) -> dict[bytes, list[str]]:
        """Return the names of the models by space."""
        found: dict[bytes, list[str]] = {}
        for space, model in self._database.execute("SELECT space, model FROM models"):
            found.setdefault(space, []).append(model)
        return found

    def key_id(self) -> bytes | None:
        """Return what `set_key_id` set last; None: the index is new."""
        row = self._database.execute("SELECT key_id FROM encryption").fetchone()
        return None if row is None else bytes(row[0])

    def set_key_id(self, key_id: bytes) -> None:
        """Record which key the segments are encrypted with; empty: they are not."""
        self._database.execute("DELETE FROM encryption")
        self._database.execute("INSERT INTO encryption VALUES (?)", (key_id,))

    def add(self, segment: Segment) -> None:
        self._database.execute(_ADD, [getattr(segment, field) for field in _FIELDS])

    def remove(self, keys: Iterable[bytes]) -> None:
        self._database.executemany("DELETE FROM segments WHERE key = ?", [(key,) for key in keys])

    def count_written(self, day: int, nbytes: int) -> None:
        self._database.execute(
            "INSERT INTO days VALUES (?1, ?2) ON CONFLICT DO UPDATE SET nbytes = nbytes + ?2",
            (day, nbytes),
        )

    def record_uses(self, segments: Iterable[Segment]) -> None:
        """Update segments that are still in the index."""
        self._database.executemany(
            "UPDATE segments SET used = ?, hits = ?, saved_s = ? WHERE key = ?",
            [(it.used, it.hits, it.saved_s, it.key) for it in segments],
        )

    def forget_models(self, spaces: AbstractSet[bytes]) -> None:
        """Delete the names of models of all other spaces."""
        gone = self.models().keys() - spaces
        self._database.executemany("DELETE FROM models WHERE space = ?", [(it,) for it in gone])

    def add_model(self, space: bytes, model: str) -> None:
        self._database.execute("INSERT OR IGNORE INTO models VALUES (?, ?)", (space, model))


def _set_aside(path: Path, reason: str) -> None:
    aside = path.with_suffix(".damaged")
    log = structlog.get_logger("kvd.daemon.prefix_store")
    log.warning("the index is damaged and built anew", copy=str(aside), reason=reason)
    path.replace(aside)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _damaged(reason: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(reason)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error
