"""Results of `kvctl calibrate`: where they are stored, which model they belong to, what they allow.

There is one JSON file per model, named after a hash of the model's content. So a result follows the
model through renames and copies, and does not apply to any other model. A load raises all precision
levels below the quality floor to the floor. An unreadable file counts as no result. So does a
result of other versions of kvd or mlx-lm, because these decide what is quantized. Both are logged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

import kvd
from kvd.worker.cache.scheme import Scheme
from kvd.worker.serving.fingerprint import fingerprint
from kvd.worker.serving.model_files import Headers
from protocol import atomic_file
from protocol.weights import BrokenFileError

FOLDER_VARIABLE = "KVD_CALIBRATION"
"""Environment variable with the folder of results. Without it, a worker applies no result."""
DENSE = Scheme(16, 16)
"""The quality floor if not even the top measured level is good enough."""

_log = logging.getLogger(__name__)


class LayerLoss(msgspec.Struct, frozen=True, kw_only=True):
    """KL divergence in nats if only one layer is quantized, by bits: its keys, or its values."""

    layer: int
    keys: dict[int, float]
    values: dict[int, float]
    estimated: bool = False
    """Whether it follows from the model's gradients and was not measured."""


class MeasuredLevel(msgspec.Struct, frozen=True, kw_only=True):
    """One level's numbers, as in `kvd.worker.tools.fidelity.Agreement`; null if not finite.

    Raises ``ValueError`` if ``mix`` has a text that is no scheme.
    """

    scheme: str
    """The level's name. Its size is that of this scheme in all layers."""
    mix: list[str] = []
    """Schemes by layer that cost less quality at the same size; empty: ``scheme`` in all."""
    uniform_kl: float | None = None
    """KL divergence with ``scheme`` in all layers; ``kl`` and the others are those of ``mix``."""
    allowed: bool
    kl: float | None
    top1: float | None
    perplexity_change: float | None
    positions: int

    def __post_init__(self) -> None:
        for name in self.mix:
            Scheme.parse(name)


class CalibrationResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a calibration found. Raises ``ValueError`` if ``lowest`` is not a scheme."""

    key: str
    model: str
    """The name that the user gave. Only ``key`` identifies the model."""
    lowest: str
    """The quality floor: the scheme that pages of this model do not go below."""
    max_kl: float
    min_top1: float
    levels: list[MeasuredLevel]
    losses: list[LayerLoss] = []
    """Losses by which the mixes were chosen."""
    text: str = ""
    """File whose text was measured; empty: kvd's own recall tasks."""
    prompts: int
    tokens: int
    date: str
    device: str
    versions: dict[str, str]
    """Versions of kvd, mlx and mlx-lm that measured it."""

    def __post_init__(self) -> None:
        Scheme.parse(self.lowest)

    @property
    def other_versions(self) -> str:
        """Versions that differ from those that run, as text; empty if the result applies."""
        running = versions()
        given = {name: self.versions.get(name, "an unknown version") for name in ("kvd", "mlx-lm")}
        return ", ".join(
            f"{name} {one} instead of {running[name]}"
            for name, one in given.items()
            if one != running[name]
        )


def versions() -> dict[str, str]:
    """Return the versions that a result is stored with."""
    return {"kvd": kvd.__version__, "mlx": version("mlx"), "mlx-lm": version("mlx-lm")}


def content_key(headers: Headers) -> str:
    """Return the model's fingerprint in hex; raises what `fingerprint` raises."""
    return fingerprint(headers).hex()


def store(folder: Path, result: CalibrationResult) -> Path:
    """Write a result atomically, replacing an older one; return its file. Raises ``OSError``."""
    file = folder / f"{result.key}.json"
    replace_file(file, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return file


def replace_file(file: Path, text: bytes) -> None:
    """Write a file of the folder atomically; create the folder. Raises ``OSError``."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    atomic_file.write(file, text)


def find(headers: Headers, folder: Path | None = None) -> CalibrationResult | None:
    """Return the model's result from the folder, by default the environment's.

    A file that is damaged, whose key does not match its name, or that other versions have measured
    is ignored.
    """
    if folder is None:
        folder = Path(named) if (named := os.environ.get(FOLDER_VARIABLE)) else None
    if folder is None or not folder.is_dir():
        return None
    try:
        file = folder / f"{content_key(headers)}.json"
        result = msgspec.json.decode(file.read_bytes(), type=CalibrationResult)
    except FileNotFoundError:
        return None
    except (OSError, BrokenFileError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        _log.warning("ignoring the calibration of %s: %s", headers.path, error)
        return None
    if result.key != file.stem:
        _log.warning("ignoring the calibration %s: it belongs to another model", file)
        return None
    if others := result.other_versions:
        _log.warning(
            "ignoring the calibration of %s, measured with %s: run kvctl calibrate again",
            headers.path,
            others,
        )
        return None
    return result


def apply_floor(schemes: Sequence[Scheme], result: CalibrationResult | None) -> list[Scheme]:
    """Return the schemes, each raised to the result's quality floor, without duplicates.

    Keys and values are raised separately, so a model whose own scheme lies below the floor starts
    with the lowest scheme allowed.
    """
    if result is None:
        return list(schemes)
    lowest = Scheme.parse(result.lowest)
    return list(dict.fromkeys(scheme.at_least(lowest) for scheme in schemes))


def mixes_of(
    schemes: Sequence[Scheme], result: CalibrationResult | None, layers: int
) -> tuple[tuple[Scheme, ...] | None, ...]:
    """Return the result's schemes by layer for each precision level; None: one scheme in all.

    A layer never gets more bits than on the level above, whose mix may come from another list of
    levels. Mixes for another number of layers are ignored and logged: the caches of this version of
    the model's code differ.
    """
    named = {} if result is None else {one.scheme: one.mix for one in result.levels if one.mix}
    if any(len(mix) != layers for mix in named.values()):
        _log.warning("ignoring the calibration's bits by layer: the model has %s layers", layers)
        named = {}
    found: list[tuple[Scheme, ...]] = []
    for scheme in schemes:
        own = tuple(map(Scheme.parse, named.get(scheme.name, [scheme.name] * layers)))
        if found:
            own = tuple(one.at_most(top) for one, top in zip(own, found[-1], strict=True))
        found.append(own)
    return tuple(
        None if set(mix) <= {scheme} else mix for scheme, mix in zip(schemes, found, strict=True)
    )
