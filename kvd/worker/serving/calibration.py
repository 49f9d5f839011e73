"""Verdicts of `kvctl calibrate`: where they are kept, whose they are, and what they forbid.

One JSON file a model, named by a key of its content, so that a verdict follows the model through
renames and copies and is void for any other one. A load lifts its ladder to the lowest level that
the verdict allows. A file that cannot be read is no verdict, and the log says so.

Does not cover the measuring (`kvd.worker.tools.fidelity`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvd.worker.cache.scheme import Scheme
from kvd.worker.serving.model_files import Headers

FOLDER_VARIABLE = "KVD_CALIBRATION"
"""Environment variable: the folder of the verdicts that a worker obeys; absent: none."""
DENSE = Scheme(16, 16)
"""What is left where not even the top of the measured ladder keeps the floor."""
_SAMPLE_BYTES = 4096
"""Of each tensor: fine-tunes of one model differ in nothing else."""

_log = logging.getLogger(__name__)


class MeasuredLevel(msgspec.Struct, frozen=True, kw_only=True):
    """One level's numbers, as in `kvd.worker.tools.fidelity.Agreement`; null where not finite."""

    scheme: str
    allowed: bool
    """Whether it keeps the floor, for itself."""
    kl: float | None
    top1: float | None
    perplexity_change: float | None
    positions: int


class CalibrationResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a calibration found. Raises ``ValueError`` where ``lowest`` is no scheme."""

    key: str
    model: str
    """As the user wrote it; the key decides."""
    lowest: str
    """The scheme that pages of this model do not go below."""
    max_kl: float
    min_top1: float
    levels: list[MeasuredLevel]
    prompts: int
    tokens: int
    """Of the longest prompt."""
    date: str
    """ISO 8601, UTC."""
    device: str
    versions: dict[str, str]

    def __post_init__(self) -> None:
        Scheme.parse(self.lowest)


def content_key(headers: Headers) -> str:
    """Return 32 hex digits that name a model's content.

    Covers ``config.json``, the headers and sizes of all weight files, and the first 4 KiB of each
    tensor. Raises ``OSError``.
    """
    digest = hashlib.sha256((headers.path / "config.json").read_bytes())
    for file in headers.weight_files:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = stream.read(length)
            digest.update(f"\n{file.name} {file.stat().st_size} {length}\n".encode())
            digest.update(header)
            tensors = json.loads(header)
            tensors.pop("__metadata__", None)
            for start, end in sorted(one["data_offsets"] for one in tensors.values()):
                stream.seek(8 + length + start)
                digest.update(stream.read(min(end - start, _SAMPLE_BYTES)))
    return digest.hexdigest()[:32]


def store(folder: Path, verdict: CalibrationResult) -> Path:
    """Write a verdict whole or not at all, in place of an older one; return its file.

    Raises ``OSError``.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / f"{verdict.key}.json"
    text = msgspec.json.format(msgspec.json.encode(verdict), indent=2) + b"\n"
    handle, name = tempfile.mkstemp(prefix=f".{verdict.key}", dir=folder)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    return file


def find(headers: Headers, folder: Path | None = None) -> CalibrationResult | None:
    """Return the model's verdict in the folder, by default that of the environment.

    A file that is damaged, or whose key is not that of its name, counts for nothing.
    """
    if folder is None:
        folder = Path(named) if (named := os.environ.get(FOLDER_VARIABLE)) else None
    if folder is None or not folder.is_dir():
        return None
    try:
        file = folder / f"{content_key(headers)}.json"
        verdict = msgspec.json.decode(file.read_bytes(), type=CalibrationResult)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        _log.warning("the calibration of %s is ignored: %s", headers.path, error)
        return None
    if verdict.key != file.stem:
        _log.warning("the calibration %s is ignored: it is of another model", file)
        return None
    return verdict


def apply_floor(schemes: Sequence[Scheme], verdict: CalibrationResult | None) -> list[Scheme]:
    """Return the ladder without what lies below the verdict's lowest level.

    A level that does is lifted to it, each side apart, so that a model whose own scheme lies below
    starts with the lowest one allowed.
    """
    if verdict is None:
        return list(schemes)
    lowest = Scheme.parse(verdict.lowest)
    return list(dict.fromkeys(scheme.at_least(lowest) for scheme in schemes))
