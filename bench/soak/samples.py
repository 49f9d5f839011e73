"""Samples of the daemon and its workers: what may grow over hours."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from bench.soak.served import STEADY, Served
from bench.soak.traffic import Tally
from kvd.bench.processes import PROC
from kvd.client import AsyncClient

MIB = 2**20


async def sample(client: AsyncClient, served: Served, tally: Tally, began: float) -> dict[str, Any]:
    """Return one sample; clears the latencies that ``tally`` has collected since the last one."""
    status = await client.status()
    workers = {it.name: it.worker_pid for it in status.models if it.worker_pid}
    first, per_token = tally.first_s, tally.token_s
    tally.first_s, tally.token_s = [], []
    return {
        "at": round(time.monotonic() - began, 1),
        "life": served.lives,
        "budget_mib": status.budget_bytes / MIB,
        "granted_mib": status.granted_bytes / MIB,
        "violations": status.violations,
        "daemon": _process(served.pid),
        "steady": _process(workers.get(STEADY, 0)),
        "workers": len(workers),
        "worker_pss_mib": sum(_pss(pid) for pid in workers.values()) / MIB,
        "journal_mib": _size(served.home / "journal") / MIB,
        "swap_mib": _size(served.home / "swap") / MIB,
        "log_mib": _size(served.home / "logs") / MIB,
        "first_p50_s": statistics.median(first) if first else None,
        "first_most_s": max(first, default=None),
        "token_p50_s": statistics.median(per_token) if per_token else None,
    }


def _process(pid: int) -> dict[str, float]:
    """Return resident MiB, threads and open descriptors of a process; empty if it is gone."""
    try:
        status = (PROC / str(pid) / "status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return {
            "pid": pid,
            "rss_mib": int(fields["VmRSS"].split()[0]) / 1024,
            "threads": int(fields["Threads"]),
            "descriptors": len(list((PROC / str(pid) / "fd").iterdir())),
        }
    except (OSError, KeyError):
        return {}


def _pss(pid: int) -> int:
    try:
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total
