"""Where `kvctl pull` puts a model: a hidden staging folder until the model is complete.

One process at a time writes there. The staging folder becomes the model's folder by a rename, so
the models folder never offers half a model, and a killed download continues.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvd.cli.local_models import STAGING
from protocol.errors import DownloadFailed

if TYPE_CHECKING:
    from kvd.cli.hub import HubFile, HubModel

_MARKER = ".kvd-pull.json"
RESERVE_BYTES = 1 << 30
"""Free space of the file system that a download leaves."""


class Origin(msgspec.Struct, frozen=True):
    """Where a model's folder came from."""

    source: str
    revision: str


def origin_of(folder: Path) -> Origin | None:
    """Return the Hub id that a folder was pulled from; None if it was not."""
    try:
        return msgspec.json.decode((folder / _MARKER).read_bytes(), type=Origin)
    except (OSError, msgspec.DecodeError):
        return None


@dataclass(frozen=True)
class Place:
    """The folder of one model, and its staging folder."""

    models: Path
    """The models folder."""
    name: str

    @property
    def folder(self) -> Path:
        return self.models / self.name

    @property
    def staging(self) -> Path:
        return self.models / f"{STAGING}{self.name}"

    @contextmanager
    def locked(self, on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold the model's lock, which the system releases when the process ends.

        Calls ``on_wait`` if another process has it, and waits.
        """
        self.models.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.models / f".lock-{self.name}").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def part(self, file: HubFile) -> Path:
        """Return the path of a file whose download is not complete."""
        return self.staging / f"{file.checksum}.part"

    def whole(self, file: HubFile) -> Path:
        """Return the path of a file that is complete and checked."""
        return self.staging / file.checksum

    def missing_bytes(self, model: HubModel) -> int:
        """Return the bytes that are still to be downloaded."""
        return sum(file.size - self._have(file) for file in model.files)

    def _have(self, file: HubFile) -> int:
        for path in (self.whole(file), self.part(file)):
            if path.exists():
                return min(file.size, path.stat().st_size)
        return 0

    def check_disk(self, model: HubModel) -> None:
        """Raise `DownloadFailed` if the download would not leave `RESERVE_BYTES`."""
        free, missing = shutil.disk_usage(self.models).free, self.missing_bytes(model)
        if missing + RESERVE_BYTES > free:
            raise DownloadFailed(
                f"{model.id} needs {missing} more bytes in {self.models}, which has {free} bytes"
                f" free, of which {RESERVE_BYTES} are left to other programs; `kvctl rm` deletes"
                " models",
                model=model.id,
            )

    def finish(self, model: HubModel) -> None:
        """Give the files their names, and make the folder visible."""
        complete = self.staging / "model"
        shutil.rmtree(complete, ignore_errors=True)  # of a process that was killed here
        complete.mkdir()
        for file in model.files:
            path = complete / file.name
            path.parent.mkdir(exist_ok=True)
            try:
                path.hardlink_to(self.whole(file))
            except OSError:  # the file system has no hard links
                shutil.copyfile(self.whole(file), path)
        (complete / _MARKER).write_bytes(msgspec.json.encode(Origin(model.id, model.revision)))
        complete.rename(self.folder)
        self.discard()

    def discard(self) -> None:
        """Delete the staging folder."""
        shutil.rmtree(self.staging, ignore_errors=True)
