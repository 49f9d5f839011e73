"""The selftest's report: one JSON file without paths of the home folder, user or host names."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

import kvd
from kvd.doctor.finding import Section, Verdict, worst
from kvd.doctor.machine import Machine, describe
from kvd.doctor.measurements import Speed
from kvd.doctor.privacy import Names
from kvd.doctor.scene import Scene
from protocol import atomic_file
from protocol.errors import ConfigError, KvdError

VERSION = 1
"""Increases when a field changes its meaning or is removed; readers ignore unknown fields."""
_PACKAGES = ("mlx", "mlx-metal", "mlx-cuda-13", "mlx-lm", "msgspec", "nanobind", "numpy")
_PRIVATE = frozenset({"Home", "Daemon"})
"""Sections that name models, folders and settings: the report has only their verdicts."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report."""

    format: Literal["kvd-selftest"] = "kvd-selftest"
    version: int = VERSION
    verdict: Verdict
    date: str
    """When the report was written, in UTC."""
    quick: bool
    python: str
    versions: dict[str, str]
    """Versions of kvd and of the packages that it computes with."""
    machine: Machine
    engine: dict[str, Any]
    """What MLX reports about itself and its device, or ``error``."""
    sections: list[Section]
    """All checks; those of home and daemon without texts and numbers."""
    speed: Speed | None
    """kvd compared with mlx-lm; None if not measured. ``Selftest: speed`` then has the reason."""

    @classmethod
    def of(
        cls, scene: Scene, sections: list[Section], speed: Speed | None, *, quick: bool
    ) -> Report:
        engine = scene.engine
        return cls(
            verdict=worst(sections),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            quick=quick,
            python=sys.version.split()[0],
            versions={"kvd": kvd.__version__, **_versions()},
            machine=describe(scene),
            engine={"error": engine.message} if isinstance(engine, KvdError) else engine,
            sections=[_public(section) for section in sections],
            speed=speed,
        )

    def encode(self, names: Names) -> bytes:
        """Return the report as indented JSON, in which ``names`` are replaced."""
        content = msgspec.json.encode(names.without(msgspec.to_builtins(self)))
        return msgspec.json.format(content) + b"\n"

    @property
    def file_name(self) -> str:
        stamp = self.date[:19].replace(":", "").replace("-", "")
        return f"kvd-selftest-{stamp}.json"


def _public(section: Section) -> Section:
    if section.title not in _PRIVATE:
        return section
    hidden = [replace(one, observed="", advice=None, numbers={}) for one in section.findings]
    # Names of findings may be those of models.
    known = {"Home": hidden, "Daemon": [replace(one, name=_kind(one.name)) for one in hidden]}
    return Section(section.title, known[section.title])


def _kind(name: str) -> str:
    return "model" if name.startswith("model ") else name


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def write(report: Report, names: Names, path: Path | None = None) -> Path:
    """Write the report to ``path``, or to a new file in the current folder; return its path."""
    file = path or Path.cwd() / report.file_name
    save(file, report.encode(names))
    return file


def save(path: Path, content: bytes) -> None:
    """Write a file that the user named, in a new folder if needed; raises `ConfigError`.

    A link's target is replaced, and a pipe or device is written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            path.write_bytes(content)
        else:
            atomic_file.write(path.resolve(), content)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        text = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot write {path}: {text}", key="") from error
