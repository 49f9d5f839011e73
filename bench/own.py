"""Starts a daemon with a temporary home for a measurement, and stops it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from kvd.client import AsyncClient
from protocol.errors import NotRunning

_READY_S = 60.0
_POLL_S = 0.05


@contextlib.asynccontextmanager
async def daemon(config: str, *options: str) -> AsyncIterator[AsyncClient]:
    """Run `kvd serve` with this ``config.toml`` and these options; yield a connected client.

    The home and the log in it are deleted at the end.
    """
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder:
        home = Path(folder)
        (home / "config.toml").write_text(config)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvd", "serve", "--home", folder, *options),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            client = await _connect(home)
            try:
                yield client
            finally:
                await client.close()
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _connect(home: Path) -> AsyncClient:
    end = time.monotonic() + _READY_S
    while True:
        client = AsyncClient(home=home)
        try:
            await client.connect()
        except NotRunning:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(_POLL_S)
        else:
            return client
