"""What happens to the daemon during the soak: kills, unloads and changes of the budget."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter

from bench.soak.served import KILLED, ROAMING, Served
from protocol.errors import KvdError

BUDGETS_MIB = (720, 520, 430)
"""From enough for all three models to two of them with few rows."""


class Faults:
    """Causes a fault every few seconds until cancelled; counts them."""

    def __init__(self, served: Served, seed: int, every_s: float) -> None:
        self.counts: Counter[str] = Counter()
        self._served = served
        self._draw = random.Random(seed)
        self._every_s = every_s

    async def run(self, daemon_kills_at: list[float]) -> None:
        """``daemon_kills_at``: times of `time.monotonic` at which the daemon itself is killed."""
        kills = list(daemon_kills_at)
        while True:
            await asyncio.sleep(self._draw.expovariate(1 / self._every_s))
            if kills and time.monotonic() >= kills[0]:
                kills.pop(0)
                await self._served.kill()
                self.counts["daemon killed"] += 1
                continue
            with contextlib.suppress(KvdError):
                await self._draw.choice([self._kill_worker, self._unload, self._set_budget])()

    async def _kill_worker(self) -> None:
        client = await self._served.connect()
        try:
            models = (await client.status()).models
        finally:
            await client.close()
        pids = [it.worker_pid for it in models if it.name == KILLED and it.worker_pid]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.counts["worker killed"] += 1

    async def _unload(self) -> None:
        client = await self._served.connect()
        try:
            await client.unload(ROAMING, force=self._draw.random() < 0.3)
            self.counts["unloaded"] += 1
        finally:
            await client.close()

    async def _set_budget(self) -> None:
        budget = self._draw.choice(BUDGETS_MIB)
        if self._draw.random() < 0.5:
            self._served.reload(budget)
        else:
            client = await self._served.connect()
            try:
                await client.configure(budget_bytes=budget * 2**20)
            finally:
                await client.close()
        self.counts["budget changed"] += 1
