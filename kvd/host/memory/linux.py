"""Linux: readings of /proc and the cgroup, and NVIDIA's limits if MLX runs on CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from kvd.host.memory import in_thread, nvidia
from protocol.types import HostMemory

_WARNING, _CRITICAL = 10.0, 40.0
"""Percent of the last ten seconds in which some task waited for memory (PSI `some avg10`)."""


class LinuxMemory:
    """Readings below a root folder, which tests replace. Missing files read as empty."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._proc = root / "proc"
        self._cgroup = root / "sys/fs/cgroup"
        self._devices = nvidia.devices() if root == Path("/") else []

    def host(self) -> HostMemory:
        """Return the memory of the machine, or of the cgroup if that is less, and the pressure."""
        meminfo = _table(self._proc / "meminfo")
        total, available = meminfo.get("MemTotal", 0), meminfo.get("MemAvailable", 0)
        for limit, used in self._cgroup_levels():
            total, available = min(total, limit), min(available, max(0, limit - used))
        sizes = [device.total_bytes for device in self._devices]
        known = [size for size in sizes if size is not None]
        return HostMemory(
            total=total,
            available=available,
            accelerator_limit=min(known, default=None),
            accelerator_hidden=bool(sizes) and not known,
            devices=max(1, len(sizes)),
            pressure=self._pressure(),
        )

    def footprint(self, pid: int) -> int:
        """Return the proportional set size."""
        return _table(self._proc / str(pid) / "smaps_rollup").get("Pss", 0)

    async def footprints(self, pids: list[int]) -> dict[int, int]:
        return await in_thread.footprints(self.footprint, pids)

    @property
    def separate(self) -> bool:
        return any(device.total_bytes is not None for device in self._devices)

    @property
    def devices(self) -> list[str]:
        return [device.name for device in self._devices]

    def _cgroup_levels(self) -> list[tuple[int, int]]:
        """Return limit and use of this process's cgroup and its ancestors (v2, then v1)."""
        own = _read(self._proc / "self/cgroup")
        path = next((x[3:] for x in own.splitlines() if x.startswith("0::")), "/").strip("/")
        own_folder, v1 = self._cgroup / path, self._cgroup / "memory"
        folders = [f for f in (own_folder, *own_folder.parents) if f.is_relative_to(self._cgroup)]
        files = [(folder / "memory.max", folder / "memory.current") for folder in folders]
        files.append((v1 / "memory.limit_in_bytes", v1 / "memory.usage_in_bytes"))
        levels = [(_number(limit), _number(used) or 0) for limit, used in files]
        return [(limit, used) for limit, used in levels if limit is not None]

    def _pressure(self) -> Literal["normal", "warning", "critical"]:
        for word in _read(self._proc / "pressure/memory").split():
            if word.startswith("avg10="):  # the first is on the line `some`
                return _level(float(word.removeprefix("avg10=")))
        return "normal"


def _level(share: float) -> Literal["normal", "warning", "critical"]:
    if share >= _CRITICAL:
        return "critical"
    return "warning" if share >= _WARNING else "normal"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # missing, another user's, or the process has ended
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None  # "max" means no limit


def _table(path: Path) -> dict[str, int]:
    """Return the lines `Name:  123 kB` of a file as bytes by name."""
    lines = (line.split() for line in _read(path).splitlines())
    return {
        words[0].rstrip(":"): int(words[1]) * 1024
        for words in lines
        if len(words) == 3 and words[2] == "kB" and words[1].isdigit()
    }
