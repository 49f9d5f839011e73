"""The folder of segment files. Its methods block and raise OSError."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from actors.machines.segment_index import Segment
from actors.machines.segment_writes import DAY_S
from protocol.record_format import PLAIN, RecordFormat
from protocol.segment_file import DamagedSegment, read_header
from protocol.segments import KEY_BYTES, PART_SUFFIX, SUFFIX, segment_path

_FOLDER = re.compile(r"[0-9a-f]{2}")
_FILE = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})((?:\..*)?)")


@dataclass
class Scan:
    """What the folder contains."""

    sizes: dict[bytes, int] = field(default_factory=dict)
    """Bytes of the segments by key."""
    deleted: list[tuple[int, int]] = field(default_factory=list)
    """Day of the last write and bytes of each incomplete file that was deleted."""


class SegmentFolder:
    """The segment files below one folder. Other files in it are left alone."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.form: RecordFormat = PLAIN
        """Format of the segments. Those of another one are damaged."""
        self.damaged: list[str] = []
        """Reason for each file that `read` deleted, until it is reported."""
        self._log = structlog.get_logger("kvd.daemon.prefix_store")

    def create(self) -> None:
        self.root.mkdir(mode=0o700, exist_ok=True)

    def prepare(self, key: bytes) -> None:
        """Create the subfolder of a segment."""
        segment_path(self.root, key).parent.mkdir(mode=0o700, exist_ok=True)

    def free_bytes(self) -> int:
        """Return the bytes of the file system that this user may still write."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def scan(self, writing: Collection[bytes]) -> Scan:
        """Find all segments, and delete incomplete files except of ``writing``."""
        found = Scan()
        for folder in os.scandir(self.root):
            if _FOLDER.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
                for entry in os.scandir(folder):
                    if entry.name.startswith(folder.name):
                        self._scan_file(entry, writing, found)
        return found

    def _scan_file(self, entry: os.DirEntry[str], writing: Collection[bytes], found: Scan) -> None:
        if (match := _FILE.fullmatch(entry.name)) is None:
            return
        try:
            status, key = entry.stat(follow_symlinks=False), bytes.fromhex(match[1])
        except FileNotFoundError:  # a worker renamed or deleted it in the meantime
            return
        if match[2] == SUFFIX and stat.S_ISREG(status.st_mode):
            found.sizes[key] = status.st_size
        elif match[2].endswith(PART_SUFFIX) and key not in writing:
            Path(entry.path).unlink(missing_ok=True)
            found.deleted.append((int(status.st_mtime // DAY_S), status.st_size))

    def read(self, key: bytes, *, expects_damage: bool = False) -> Segment | None:
        """Return a segment as its file describes it; delete a damaged file."""
        path = segment_path(self.root, key)
        try:
            header, written = read_header(path, self.form), path.stat().st_mtime
        except FileNotFoundError:
            return None
        except DamagedSegment as error:
            if not expects_damage:
                self._log.warning("damaged segment deleted", path=str(path), reason=str(error))
            self.damaged.append(str(error))
            self.delete(key)
            return None
        return Segment(
            key=key,
            space=header.space,
            base=header.base,
            tokens=header.tokens,
            nbytes=header.nbytes,
            created=written,
            used=written,
        )

    def delete(self, key: bytes) -> None:
        segment_path(self.root, key).unlink(missing_ok=True)

    def delete_part(self, key: bytes) -> None:
        """Delete what a worker has written of a segment that it did not complete."""
        folder = segment_path(self.root, key).parent
        for path in folder.glob(f"{key.hex()}*{PART_SUFFIX}"):
            path.unlink(missing_ok=True)
