"""The selftest's report, as text and as JSON."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec

import kvd
from kvd.doctor.finding import Finding, Section, Verdict, worst
from kvd.doctor.scene import Scene
from protocol.errors import ConfigError, KvdError

_PACKAGES = ("mlx", "mlx-metal", "mlx-cuda-13", "mlx-lm", "msgspec", "nanobind", "numpy")


class Report(msgspec.Struct, frozen=True):
    """The whole report."""

    verdict: Verdict
    date: str
    machine: str
    processor: str
    memory_bytes: int
    python: str
    versions: dict[str, str]
    engine: dict[str, object]
    sections: list[Section]

    @classmethod
    def of(cls, scene: Scene, sections: list[Section]) -> Report:
        engine = scene.engine
        return cls(
            verdict=worst(sections),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=scene.machine,
            processor=platform.processor() or platform.machine(),
            memory_bytes=scene.host.total,
            python=sys.version.split()[0],
            versions={"kvd": kvd.__version__, **_versions()},
            engine={"error": engine.message} if isinstance(engine, KvdError) else engine,
            sections=sections,
        )

    @property
    def text(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [
            f"kvd selftest, {self.date}: {self.verdict}",
            f"{self.machine}, {self.processor}, {self.memory_bytes / 2**30:.1f} GiB",
            f"Python {self.python}; {versions}",
        ]
        for section in self.sections:
            lines += ["", section.title]
            for finding in section.findings:
                lines += _lines(finding)
        return "\n".join(lines) + "\n"


def _lines(finding: Finding) -> list[str]:
    lines = [f"  {finding.verdict:<4}  {finding.name}: {finding.observed}"]
    if finding.advice is not None:
        lines.append(f"        -> {finding.advice}")
    numbers = dict(finding.numbers)
    traceback = str(numbers.pop("traceback", "")).splitlines()
    if numbers:
        lines.append("        " + ", ".join(f"{key} {_short(v)}" for key, v in numbers.items()))
    return lines + [f"        {line}" for line in traceback]


def _short(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def write(report: Report, folder: Path) -> list[Path]:
    """Write both files and return their paths; the content hides the user's home folder."""
    stamp = report.date[:19].replace(":", "").replace("-", "")
    files = {
        folder / f"kvd-selftest-{stamp}.json": msgspec.json.format(msgspec.json.encode(report)),
        folder / f"kvd-selftest-{stamp}.txt": report.text.encode(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            path.write_bytes(content.replace(str(Path.home()).encode(), b"~"))
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}", key="") from error
    return list(files)
