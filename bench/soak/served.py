"""The daemon of the soak: a real process with a journal on disk, which may be replaced."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from pathlib import Path

from bench.chaos import connected
from kvd.client import AsyncClient
from protocol.errors import KvdError

CONFIG = """budget = "{budget}MiB"
journal = "disk"
max_rows = 16
models = [
  {{ source = "demo", alias = "steady", pinned = true }},
  {{ source = "demo", alias = "killed" }},
  {{ source = "demo", alias = "roaming" }},
]
[http]
port = 0
[watchdog]
loading_s = 120
"""
STEADY, KILLED, ROAMING = "steady", "killed", "roaming"
"""Three names of the embedded model. Nothing is done to the worker of the first. The worker of the
second is killed. The third is unloaded, and loaded again by its next request."""


class Served:
    """A daemon with a home that outlives its process."""

    def __init__(self, folder: Path, budget_mib: int) -> None:
        self.home = folder / "home"
        self.home.mkdir(mode=0o700)
        (self.home / "config.toml").write_text(CONFIG.format(budget=budget_mib))
        self.lives = 0
        """Number of processes started so far."""
        self.address = ""
        """Base URL of HTTP."""
        self._log = (folder / "output").open("ab")
        self._process: asyncio.subprocess.Process | None = None
        self._running = asyncio.Event()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start a process and wait until it answers and `STEADY` is loaded."""
        command = [sys.executable, "-m", "kvd", "serve", "--home", str(self.home)]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        self.lives += 1
        client = await connected(self.home)
        try:
            await (await client.generate(STEADY, "a", max_tokens=1)).text()  # waits for its load
            self.address = next(it for it in (await client.status()).http if "127.0.0.1" in it)
        finally:
            await client.close()
        self._running.set()

    async def kill(self) -> None:
        """End the process by SIGKILL, as a crash would, and start another one."""
        self._running.clear()
        assert self._process is not None
        self._process.kill()
        await self._process.wait()
        await self.start()

    async def stop(self) -> None:
        self._running.clear()
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), 60)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._log.close()

    async def connect(self) -> AsyncClient:
        """Return a new connection, after waiting for a running daemon."""
        while True:
            await self._running.wait()
            client = AsyncClient(home=self.home)
            with contextlib.suppress(KvdError):
                await client.connect()
                return client
            await asyncio.sleep(0.1)

    def reload(self, budget_mib: int) -> None:
        """Change the budget in the file, and make the daemon read the file again."""
        (self.home / "config.toml").write_text(CONFIG.format(budget=budget_mib))
        if self._running.is_set() and self._process is not None:
            self._process.send_signal(signal.SIGHUP)
