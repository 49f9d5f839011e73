"""Records of tokenizers on disk, so that transformers loads each tokenizer once and not per worker.

A model's record is in the user's cache folder (``~/.cache/kvd/tokenizers``), under a digest of the
folder's files and of the versions of all libraries that read them. A process of its own makes it
(`kvd.worker.tools.convert_tokenizer`): it alone imports transformers, and its exit returns all of
that memory. If a tokenizer cannot be converted, the reason is kept as well, for a day.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import platformdirs

from kvd.worker.text.tokenizer_record import (
    DamagedRecordError,
    Entry,
    Refusal,
    TokenizerRecord,
    from_bytes,
    to_bytes,
)
from protocol import atomic_file

CONVERTER = "kvd.worker.tools.convert_tokenizer"
MIN_BYTES = 256 * 1024 * 1024
MAX_BYTES = 2 * 1024 * 1024 * 1024
"""Least and most memory of a conversion. Measured: 110 MiB for the embedded model."""
NOT_WRITTEN = 74
"""EX_IOERR: exit status of a conversion whose entry cannot be written, as on a full disk."""
TIMEOUT_S = 180.0
KEPT = 64
"""Entries that the folder keeps: those used last."""
_RETRY_S = 24 * 3600
"""Age at which a refusal is dropped. Its cause may have been a lack of memory."""
_TICK_S = 0.5
_LIBRARIES = ("transformers", "tokenizers", "jinja2", "mlx-lm", "mlx-kvd")
_OPTIONAL = ("protobuf", "sentencepiece", "tiktoken")
"""Libraries with which transformers reads files of some tokenizers, if they are installed."""
_WEIGHTS = frozenset(
    (".bin", ".ckpt", ".gguf", ".h5", ".npz", ".onnx", ".pt", ".pth", ".safetensors")
)
_LARGEST = 256 * 1024 * 1024
"""Largest file whose content is part of the key; it takes 0.3 s to read."""
_TEMPLATES = "additional_chat_templates"

_log = logging.getLogger("kvd.worker")


@dataclass(frozen=True)
class Place:
    """The file of one model's entry."""

    model: Path
    file: Path


def default_folder() -> Path:
    return platformdirs.user_cache_path("kvd") / "tokenizers"


def place_of(model: Path, folder: Path | None = None) -> Place:
    """Return where a model folder's entry belongs; raises ``OSError`` for unreadable files.

    ``folder``: the cache's folder, by default the user's. It is created, or made private.
    """
    found = default_folder() if folder is None else folder
    _make_private(found)
    return Place(model, found / f"{_key(model)}.tokenizer")


def read(place: Place) -> Entry | None:
    """Return the entry; None if there is none that can be used. Raises ``OSError``.

    A damaged entry, an old refusal, a link, and a file of another user are deleted.
    """
    if place.file.is_symlink():
        place.file.unlink(missing_ok=True)
    try:
        handle = os.open(place.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        data = file.read() if status.st_uid == os.geteuid() else b""
    try:
        entry = from_bytes(data)
    except DamagedRecordError as error:
        _log.warning("%s is damaged (%s); the tokenizer is converted again", place.file, error)
        place.file.unlink(missing_ok=True)
        return None
    age = time.time() - status.st_mtime
    if isinstance(entry, Refusal) and not 0 <= age < _RETRY_S:
        place.file.unlink(missing_ok=True)
        return None
    if isinstance(entry, TokenizerRecord):
        with contextlib.suppress(OSError):
            os.utime(place.file)  # `_prune` keeps what was used last
    return entry


def write(place: Place, entry: Entry) -> None:
    """Write an entry atomically, readable for this user only; raises ``OSError``."""
    folder = place.file.parent
    _make_private(folder)
    _prune(folder)
    atomic_file.write(place.file, to_bytes(entry))


def find(
    model: Path,
    *,
    memory_bytes: int,
    tick: Callable[[], None] = lambda: None,
    folder: Path | None = None,
) -> TokenizerRecord | None:
    """Return the record of a model folder's tokenizer, made first if needed; None: it has none.

    ``memory_bytes``: memory that a conversion may take, raised to `MIN_BYTES` and lowered to
    `MAX_BYTES`. ``tick`` is called about twice a second meanwhile; what it raises ends the
    conversion. ``folder``: as for `place_of`.
    """
    try:
        place = place_of(model, folder)
        entry = read(place)
        if entry is None:
            problem = _convert(place, min(max(memory_bytes, MIN_BYTES), MAX_BYTES), tick)
            entry = read(place)
            if entry is None:
                entry = Refusal(reason=problem or "the converter wrote no record")
                write(place, entry)
    except OSError as error:
        _log.warning("no tokenizer is kept in %s (%s)", folder or default_folder(), error)
        return None
    if isinstance(entry, Refusal):
        _log.info("the tokenizer is used with transformers: %s", entry.reason)
        return None
    return entry


def _convert(place: Place, memory_bytes: int, tick: Callable[[], None]) -> str:
    """Run the converter; return what went wrong, empty if nothing did.

    Raises ``OSError`` if only the entry could not be written.
    """
    # The converter ends with this process: it sees the end of the pipe.
    alive, held = os.pipe()
    command = [sys.executable, "-m", CONVERTER, str(place.model), str(place.file)]
    command += ["--memory", str(memory_bytes), "--alive", str(alive)]
    # One thread each: RLIMIT_DATA counts the threads' stacks and buffers.
    single = dict.fromkeys(("OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS", "OMP_NUM_THREADS"), "1")
    try:
        process = subprocess.Popen(  # noqa: S603 - this interpreter, with our own module
            command, stdin=subprocess.DEVNULL, pass_fds=[alive], env=os.environ | single
        )
        try:
            return _wait(process, tick)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    finally:
        os.close(alive)
        os.close(held)


def _wait(process: subprocess.Popen[bytes], tick: Callable[[], None]) -> str:
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if (status := process.wait(_TICK_S)) == NOT_WRITTEN:
                raise OSError("the disk may be full")
            return "" if status == 0 else f"the converter ended with status {status}"
        tick()
    return f"the conversion took more than {TIMEOUT_S:g} s"


def _key(model: Path) -> str:
    """Return a digest of all that the tokenizer depends on."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update("\0".join([sys.version, *_versions()]).encode())
    for file in sorted([*model.iterdir(), *model.glob(f"{_TEMPLATES}/*")]):
        if file.suffix in _WEIGHTS or not file.is_file():
            continue
        name = str(file.relative_to(model)).encode("utf-8", "surrogateescape")
        digest.update(len(name).to_bytes(4, "little") + name + _content(file))
    return digest.hexdigest()


def _versions() -> Iterator[str]:
    yield from (version(name) for name in _LIBRARIES)
    for name in _OPTIONAL:
        try:
            yield version(name)
        except PackageNotFoundError:
            yield ""


def _content(file: Path) -> bytes:
    """Return a digest of a file; of its size and time if it is too large for a tokenizer's."""
    status = file.stat()
    if status.st_size > _LARGEST:
        return f"{status.st_size} {status.st_mtime_ns}".encode()
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").digest()


def _make_private(folder: Path) -> None:
    """Create the folder, or take others' access to it away; raises ``OSError``."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user")
    if stat.S_IMODE(status.st_mode) & 0o077:
        folder.chmod(0o700)


def _prune(folder: Path) -> None:
    """Delete all but `KEPT` - 1 entries: those that were not used for longest."""
    entries = []
    for file in folder.glob("*.tokenizer"):
        with contextlib.suppress(OSError):
            entries.append((file.lstat().st_mtime, file))
    for _, file in sorted(entries)[: max(0, len(entries) - KEPT + 1)]:
        with contextlib.suppress(OSError):
            file.unlink()
