"""A daemon for the measurements, which can be stopped, killed and started again on its home."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.chaos import connected
from kvd.client import AsyncClient
from protocol.messages import Tokens
from protocol.types import ChatMessage, ModelInfo, TokenLogprob, Usage

ALIAS = "chat"
STORE = """[prefix_store]
limit = "32GB"
daily_writes = "1TB"
keep_free = "1GB"
"""
"""A store whose limits are not reached."""
NEW_TOKENS = 16
_POLL_S = 0.05
_WRITTEN_S = 120.0
_STOPPED_S = 60.0


@dataclass
class Reply:
    """One request, as its client sees it."""

    ttft_s: float = 0.0
    """Seconds from the request to its first token."""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    usage: Usage | None = None

    @property
    def cached_share(self) -> float:
        """Share of the prompt's tokens that were cached."""
        assert self.usage is not None
        return self.usage.cached_tokens / self.usage.prompt_tokens

    def equals(self, other: Reply) -> bool:
        """Whether tokens and logprobs are the same, to the bit."""
        return (self.tokens, self.logprobs) == (other.tokens, other.logprobs)


class Daemon:
    """`kvd serve` with a home that outlives its process, and one model."""

    def __init__(self, home: Path, model: str, *, store: bool) -> None:
        home.mkdir(mode=0o700)
        (home / "config.toml").write_text(STORE if store else "")
        self.home = home
        self.client = AsyncClient(home=home)
        self.info: ModelInfo
        self._model = model
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> float:
        """Start a process; return the seconds until it answers."""
        start = time.perf_counter()
        command = [sys.executable, "-m", "kvd", "serve", "--home", str(self.home)]
        with self.home.with_suffix(".log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.client = await connected(self.home)
        return time.perf_counter() - start

    async def load(self) -> float:
        """Load the model; return the seconds that it takes."""
        start = time.perf_counter()
        status = await (await self.client.load(self._model, alias=ALIAS)).result()
        assert status.info is not None
        self.info = status.info
        return time.perf_counter() - start

    async def unload(self) -> None:
        """End the model's worker, as when the governor evicts the model."""
        await self.client.unload(ALIAS)

    async def stop(self) -> None:
        """End the process by SIGTERM and wait for its exit; do nothing if there is none."""
        await self._end(kill=False)

    async def kill(self) -> None:
        """End the process by SIGKILL, as a crash would."""
        await self._end(kill=True)

    async def _end(self, *, kill: bool) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        await self.client.close()
        if process.returncode is None and not kill:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _STOPPED_S)
        if process.returncode is None:
            process.kill()
        await process.wait()

    async def ask(self, messages: list[ChatMessage]) -> Reply:
        """Send a chat; return the greedy answer of `NEW_TOKENS` tokens."""
        reply = Reply()
        start = time.perf_counter()
        completion = await self.client.generate(
            ALIAS,
            messages=messages,
            max_tokens=NEW_TOKENS,
            temperature=0.0,
            seed=0,
            logprobs=2,
            ignore_eos=True,
        )
        async for event in completion:
            if isinstance(event, Tokens):
                reply.ttft_s = reply.ttft_s or time.perf_counter() - start
                reply.tokens += event.tokens
                reply.logprobs += event.logprobs or []
        reply.text = completion.text_so_far
        reply.usage = completion.usage
        return reply

    async def stored(self) -> tuple[int, int]:
        """Return the tokens and the bytes of all segments."""
        spaces = (await self.client.cache()).spaces
        return sum(space.tokens for space in spaces), sum(space.nbytes for space in spaces)

    async def written(self, tokens: int) -> None:
        """Wait until segments of so many tokens in all are stored."""
        end = time.monotonic() + _WRITTEN_S
        while (found := (await self.stored())[0]) < tokens:
            if time.monotonic() > end:
                raise RuntimeError(f"segments of {found} tokens are stored instead of {tokens}")
            await asyncio.sleep(_POLL_S)


@contextlib.asynccontextmanager
async def running(home: Path, model: str, *, store: bool) -> AsyncIterator[Daemon]:
    """Run a daemon; stop it at the end, whatever happens."""
    daemon = Daemon(home, model, store=store)
    try:
        await daemon.start()
        yield daemon
    finally:
        await daemon.stop()
