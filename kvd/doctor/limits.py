"""Checks of the system's limits: open files, locked memory, cgroup, memory and disk."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

from kvd.config.budget import compare_with_machine
from kvd.doctor.finding import Finding, fail, ok, skip, warn
from kvd.doctor.scene import Scene
from kvd.host import files, memory
from kvd.host.units import format_bytes

_FEW_FILES, _FILES = 256, 1024
"""Limits below which the check fails, or warns. A client needs one file, a worker three."""
_FREE_FOR_SWAP = 2**30
"""kvd swaps no rows out if less disk space would remain."""
_UNLIMITED = 1 << 60


def open_files(_scene: Scene) -> Finding:
    """Check how many clients can connect at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = hard == resource.RLIM_INFINITY or hard > _UNLIMITED
    most = files.WANTED if endless else min(files.WANTED, hard)
    observed = f"the daemon may open {most} at once; this shell's limit is {soft}"
    if most < _FILES:
        verdict = fail if most < _FEW_FILES else warn
        advice = "raise the hard limit (`ulimit -Hn`), or run the daemon as a service"
        return verdict("open files", observed, advice, soft=soft, most=most)
    return ok("open files", observed, soft=soft, most=most)


def locked_memory(_scene: Scene) -> Finding:
    """Report the limit; kvd locks no memory, and Metal's wired memory does not count here."""
    if not hasattr(resource, "RLIMIT_MEMLOCK"):
        return skip("locked memory", "this system has no such limit")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "no limit" if soft < 0 or soft > _UNLIMITED else format_bytes(soft)
    return ok("locked memory", f"{text}; kvd locks none", soft=soft)


def host_memory(scene: Scene) -> Finding:
    host = scene.host
    budget = scene.served.budget_bytes or memory.default_budget(host)
    numbers = {
        "total_bytes": host.total,
        "available_bytes": host.available,
        "budget_bytes": budget,
        "pressure": host.pressure,
    }
    observed = (
        f"{format_bytes(host.total)}, {format_bytes(host.available)} free, budget "
        f"{format_bytes(budget)}" + (f" on each of {host.devices} GPUs" if host.devices > 1 else "")
    )
    for problem in compare_with_machine(budget, host):
        verdict = warn if host.accelerator_hidden else fail
        return verdict("memory", problem.observed, problem.advice, **numbers)
    if host.pressure != "normal":
        advice = "end other programs that use memory, or lower budget"
        return warn("memory", f"{observed}; the system reports {host.pressure}", advice, **numbers)
    return ok("memory", observed, **numbers)


def cgroup(scene: Scene) -> Finding:
    """Check whether a container or service limits the memory."""
    if scene.platform != "linux":
        return skip("cgroup", "only Linux has them")
    physical = _meminfo(scene.root)
    limit = scene.host.total
    if limit < physical:
        observed = f"{format_bytes(limit)} of the machine's {format_bytes(physical)}"
        return ok("cgroup", f"{observed}; the default budget uses this limit", limit_bytes=limit)
    return ok("cgroup", "no memory limit below the machine's memory")


def _meminfo(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    found = next((line.split()[1] for line in lines if line.startswith("MemTotal:")), "0")
    return int(found) * 1024


def disk(scene: Scene) -> Finding:
    """Check the free disk space for swapped-out rows and logs."""
    place = _existing(scene.home.root)
    free = shutil.disk_usage(place).free
    limit = scene.settings.swap_bytes
    observed = f"{format_bytes(free)} free for {scene.home.root}"
    if limit == 0:
        return ok("disk", f"{observed}; rows are not swapped out (swap_limit = 0)", free_bytes=free)
    if free < 2 * _FREE_FOR_SWAP:
        observed += ": preempted rows are recomputed instead of swapped out"
        return warn("disk", observed, "free disk space, or move the home", free_bytes=free)
    observed += f"; swapped-out rows take up to {format_bytes(limit)} per model"
    return ok("disk", observed, free_bytes=free)


def hub_cache(scene: Scene) -> Finding:
    variables = scene.environment
    home = variables.get("HF_HOME") or os.path.join(  # noqa: PTH118 - as the Hub's library does
        variables.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    folder = Path(variables.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    place = _existing(folder)
    if not os.access(place, os.W_OK):
        return warn(
            "hub cache",
            f"{folder} cannot be written, so models cannot be downloaded from the Hub",
            "set HF_HUB_CACHE to a writable folder, or load models by their path",
        )
    count = len(list(folder.glob("models--*"))) if folder.exists() else 0
    free = shutil.disk_usage(place).free
    observed = f"{count} model{'' if count == 1 else 's'} in {folder}, {format_bytes(free)} free"
    return ok("hub cache", observed, models=count, free_bytes=free)


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())
