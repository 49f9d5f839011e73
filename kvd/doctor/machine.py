"""Describes the machine in the selftest's report: processor, memory and system, without names."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import msgspec

from kvd.doctor.scene import Scene

_FEATURES = frozenset(
    {
        "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16",
        "avx512_fp16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "asimdhp", "asimddp", "bf16",
        "i8mm", "sve", "sve2",
    }
)  # fmt: skip
"""Vector instructions whose presence explains a speed."""
_SYSCTL = {
    "machdep.cpu.brand_string": "processor",
    "hw.model": "model",
    "hw.perflevel0.physicalcpu": "performance_cores",
    "hw.perflevel1.physicalcpu": "efficiency_cores",
    "iogpu.wired_limit_mb": "wired_limit_mb",
}


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine."""

    system: str
    """Operating system, its version and the architecture."""
    processor: str
    cores: int
    usable_cores: int
    """Cores that this process may use."""
    memory_bytes: int
    available_bytes: int
    """Memory that was free when the report was written."""
    accelerator_bytes: int | None
    """Metal's recommended working set, or the CUDA device's memory; None without accelerator."""
    features: list[str]
    """Vector instructions of the processor, as Linux names them; empty on macOS."""
    details: dict[str, str]
    """Values of macOS's sysctl, such as the numbers of performance and efficiency cores."""


def describe(scene: Scene) -> Machine:
    details = _sysctl() if sys.platform == "darwin" else {}
    info = _cpu_info(scene.root)
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return Machine(
        system=scene.machine,
        processor=details.pop("processor", "")
        or info.get("model name", "")
        or platform.processor()
        or platform.machine(),
        cores=cores,
        usable_cores=usable,
        memory_bytes=scene.host.total,
        available_bytes=scene.host.available,
        accelerator_bytes=scene.host.accelerator_limit,
        features=sorted(
            _FEATURES.intersection((info.get("flags") or info.get("Features", "")).split())
        ),
        details=details,
    )


def _cpu_info(root: Path) -> dict[str, str]:
    """Return the facts of the first core; empty without /proc."""
    try:
        text = (root / "proc/cpuinfo").read_text("utf-8", errors="replace")
    except OSError:
        return {}
    lines = text.split("\n\n", 1)[0].splitlines()
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _sysctl() -> dict[str, str]:
    found = {}
    for key, name in _SYSCTL.items():
        done = subprocess.run(  # noqa: S603 - the system's own program
            ["/usr/sbin/sysctl", "-n", key], capture_output=True, text=True, check=False, timeout=10
        )
        if done.returncode == 0:
            found[name] = done.stdout.strip()
    return found
