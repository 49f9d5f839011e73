"""Layers that an interrupted calibration has measured, so that the next run continues there."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

import kvd
from kvd.worker.serving import calibration
from kvd.worker.serving.calibration import LayerLoss

_log = logging.getLogger(__name__)


class _Partial(msgspec.Struct, frozen=True):
    """Contents of the file. Other versions and other texts measure something else."""

    version: str
    prompts: str
    """Hash of the texts' tokens."""
    losses: list[LayerLoss]


class PartialLosses:
    """The file of one model in the folder of calibrations, ``KEY.partial``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, key: str, prompts: Sequence[Sequence[int]]) -> dict[int, LayerLoss]:
        """Return the measured layers by number; none if the file is damaged or does not fit."""
        try:
            found = msgspec.json.decode(self._file(key).read_bytes(), type=_Partial)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return {}
        if (found.version, found.prompts) != (kvd.__version__, _hash(prompts)):
            return {}
        return {loss.layer: loss for loss in found.losses}

    def write(
        self, key: str, prompts: Sequence[Sequence[int]], losses: Mapping[int, LayerLoss]
    ) -> None:
        """Replace the file. An error is logged: only an interruption would cost more time."""
        partial = _Partial(kvd.__version__, _hash(prompts), list(losses.values()))
        try:
            calibration.replace_file(self._file(key), msgspec.json.encode(partial))
        except OSError as error:
            _log.warning("cannot keep measured layers in %s: %s", self._folder, error)

    def drop(self, key: str) -> None:
        with contextlib.suppress(OSError):
            self._file(key).unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}.partial"


def _hash(prompts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(prompts)).hexdigest()
