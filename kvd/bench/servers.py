"""The compared servers as processes: starts them, waits until they answer, and stops them.

Every server is a child process with its own session. So Ctrl-C reaches only this process, and
`stop` ends the servers' processes in order, by pid. Servers listen on 127.0.0.1, or on a Unix
socket in a temporary folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from kvd.bench import processes
from kvd.bench.drivers import KvdDriver, OpenAIDriver
from kvd.bench.player import Driver
from kvd.client import AsyncClient
from kvd.config.kv import parse_kv
from protocol.errors import KvdError, NotRunning

_READY_S = 300.0
"""Timeout for a start and a load. On an H200 that has run nothing, kvd took 151 s."""
_ANSWER_S = 10.0
"""Timeout for a server that runs already."""
_STOP_S = 15.0
_POLL_S = 0.05
_OURS = ("LD_PRELOAD", "OPENBLAS_THREAD_TIMEOUT", "KVD_BLAS_PRELOADED")
"""Environment variables that this process may have, and servers must not inherit."""


@dataclass(frozen=True)
class Side:
    """One server of the comparison."""

    name: str
    about: str
    command: tuple[str, ...] = ()
    """Command line; empty for a server that this program does not start."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that are added or replaced."""
    model: str = "default_model"
    """Model that kvd loads, or the model's name in HTTP requests.

    The default is mlx_lm.server's name for the model that it was started with.
    """
    home: str = ""
    """Home of a kvd daemon; empty for OpenAI-compatible servers."""
    kv: str = "k8v8"
    """The scheme that kvd loads the model with."""
    prefix_cache: int | None = None
    """Bytes of kvd's prefix cache; None: its default."""
    running: bool = False
    """Whether the daemon runs already and has the model. Nothing is loaded then."""
    socket: str | None = None
    """Socket of a running daemon, if it is not in its home."""
    url: str = ""
    endless: bool = True
    """Whether the model has no end-of-text token (`twin`)."""


class Server:
    """One side, running between `start` and `stop`."""

    def __init__(self, side: Side, log: Path) -> None:
        self.side = side
        self.driver: Driver
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process, wait until it answers, and connect."""
        if self.side.command:
            variables = {name: value for name, value in os.environ.items() if name not in _OURS}
            with self._log.open("wb") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self.side.command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=variables | self.side.environment,
                    start_new_session=True,
                )
        limit_s = _READY_S if self.side.command else _ANSWER_S
        try:
            async with asyncio.timeout(limit_s):
                while not await self._answers():
                    self._check_running()
                    await asyncio.sleep(_POLL_S)
                self.driver = await self._connect()
        except TimeoutError:
            raise RuntimeError(
                f"{self.side.name} is not ready after {limit_s:g} s{self._last_words()}"
            ) from None

    async def _answers(self) -> bool:
        if self.side.home or self.side.running:
            try:
                async with AsyncClient(home=self.side.home or None, socket=self.side.socket):
                    return True
            except NotRunning:
                return False
        import aiohttp  # noqa: PLC0415 - `kvctl --help` imports this module

        path = "/health" if self._process else "/v1/models"
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(self.side.url + path) as response,
            ):
                return response.status < 500  # llama-server answers 503 while it loads
        except aiohttp.ClientError:
            return False

    async def _connect(self) -> Driver:
        side = self.side
        if side.url:
            return OpenAIDriver(side.url, side.model, endless=side.endless)
        try:
            if side.running:
                return await KvdDriver.attach(side.home or None, side.socket, side.model)
            kv = replace(parse_kv(side.kv), prefix_cache=side.prefix_cache)
            return await KvdDriver.connect(side.home, side.model, kv)
        except KvdError as error:
            raise RuntimeError(f"{side.name} cannot load the model: {error.message}") from error

    def _check_running(self) -> None:
        """Raise RuntimeError if waiting is of no use."""
        if self._process is None:
            raise RuntimeError(f"{self.side.name}: nothing answers at {self.side.url}")
        if self._process.returncode is not None:
            raise RuntimeError(
                f"{self.side.name} exited with status {self._process.returncode}"
                f"{self._last_words()}"
            )

    def _last_words(self) -> str:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return f"; its output ends:\n{text[-1500:]}"

    def pids(self) -> list[int]:
        """Return the server's processes; none for a URL."""
        return processes.tree(self._process.pid) if self._process else []

    async def stop(self) -> None:
        """Close the connections and end every process: TERM, then KILL."""
        if hasattr(self, "driver"):
            await self.driver.close()
        if self._process is None:
            return
        pids = self.pids()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _STOP_S)
        # Only processes in the child's session: the child started all of those.
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(pid) == self._process.pid:
                    os.kill(pid, signal.SIGKILL)
        await self._process.wait()


def kvd_side(
    name: str,
    scheme: str,
    model: str,
    home: Path,
    *,
    fake: bool = False,
    prefix_cache: int | None = None,
) -> Side:
    """Return the side of a kvd daemon that serves a model folder with pages of a scheme."""
    command = [sys.executable, "-m", "kvd", "serve", "--home", str(home)]
    return Side(
        name=name,
        about=f"kvd serve, the model loaded with --kv {scheme}"
        + ("" if prefix_cache is None else f", prefix_cache {prefix_cache}"),
        command=tuple([*command, "--fake"] if fake else command),
        model=model,
        home=str(home),
        kv=scheme,
        prefix_cache=prefix_cache,
    )


def mlx_lm_side(name: str, model: str, *, blas: Path | None, options: tuple[str, ...] = ()) -> Side:
    """Return the side of an mlx_lm.server; ``blas``: library to preload, as in kvd's workers."""
    port = _free_port()
    environment = {"HF_HUB_OFFLINE": "1"}
    if blas is not None:
        # kvd sets the same variables for its workers (`kvd.host.environment`).
        environment |= {"LD_PRELOAD": str(blas), "OPENBLAS_THREAD_TIMEOUT": "12"}
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", model, "--port", str(port)]
    command += ["--log-level", "WARNING", *options]
    about = " ".join(["mlx_lm.server", *options]) + ("" if blas else ", no BLAS preloaded")
    return Side(
        name=name,
        about=about,
        command=tuple(command),
        environment=environment,
        url=f"http://127.0.0.1:{port}",
    )


def llama_side(
    name: str,
    program: str,
    gguf: Path,
    *,
    slots: int,
    context: int,
    options: tuple[str, ...] = (),
    endless: bool = False,
) -> Side:
    """Return the side of a llama-server.

    ``slots``: requests that it runs at once; ``context``: tokens of each; ``options``: more of its
    options; ``endless``: the model never ends a completion.
    """
    port = _free_port()
    command = [program, "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--parallel", str(slots), "--ctx-size", str(slots * context), *options]
    return Side(
        name=name,
        about=" ".join(["llama-server,", gguf.name, *command[7:]]),
        command=tuple(command),
        url=f"http://127.0.0.1:{port}",
        endless=endless,
    )


def url_side(name: str, url: str) -> Side:
    """Return the side of a server that runs already; ``url`` may end with ``#MODEL``."""
    address, _, model = url.partition("#")
    address = address.rstrip("/").removesuffix("/v1")
    return Side(name=name, about=url, url=address, model=model or "default_model", endless=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Fleet:
    """All servers of a comparison: ``async with Fleet(sides, folder) as servers``."""

    def __init__(
        self, sides: list[Side], folder: Path, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._servers = [Server(side, folder / f"{side.name}.log") for side in sides]
        self._say = say

    async def __aenter__(self) -> dict[str, Server]:
        try:
            for server in self._servers:
                self._say(f"starting {server.side.name}: {server.side.about}")
                await server.start()
                if server.driver.path:
                    self._say(f"  {server.driver.path}")
        except BaseException:
            await self._stop()
            raise
        return {server.side.name: server for server in self._servers}

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    def pids(self) -> list[int]:
        """Return all processes of all servers."""
        return [pid for server in self._servers for pid in server.pids()]

    async def _stop(self) -> None:
        stops = [server.stop() for server in self._servers]
        # Shielded, because a second Ctrl-C must not leave servers running.
        await asyncio.shield(asyncio.gather(*stops, return_exceptions=True))
