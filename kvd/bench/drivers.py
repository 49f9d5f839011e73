"""Clients of the servers: kvd over its Unix socket, all others over OpenAI's HTTP API.

Requests are greedy and set no other option, so that no server pays for options that others lack.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from kvd.bench.measure import Stream
from kvd.client import AsyncClient
from protocol.kv import KVSpec
from protocol.messages import Done, Tokens
from protocol.types import ModelInfo

ALIAS = "bench"
"""Name of a model that a bench loads."""


class KvdDriver:
    """Client of a kvd daemon; all requests share one connection."""

    def __init__(self, client: AsyncClient, model: str, path: str, *, endless: bool) -> None:
        """Take an open connection; ``endless``: the model has no end-of-text token (`twin`)."""
        self._client = client
        self._model = model
        self.path = path
        self._ignore_eos = not endless

    @classmethod
    async def connect(cls, home: str, model: str, kv: KVSpec) -> KvdDriver:
        """Open the connection and load the model, which has no end-of-text token."""
        client = AsyncClient(home=home)
        await client.connect()
        try:
            loaded = await (await client.load(model, alias=ALIAS, kv=kv)).result()
        except BaseException:
            await client.close()
            raise
        return cls(client, ALIAS, _path(loaded.info), endless=True)

    @classmethod
    async def attach(cls, home: str | None, socket: str | None, model: str) -> KvdDriver:
        """Open the connection to a daemon that has the model."""
        client = AsyncClient(home=home, socket=socket)
        await client.connect()
        return cls(client, model, "", endless=False)

    async def ask(self, prompt: str, output: int, stream: Stream) -> None:
        """Send a request (`player.Driver`)."""
        completion = await self._client.generate(
            self._model, prompt, max_tokens=output, ignore_eos=self._ignore_eos
        )
        try:
            async for event in completion:
                match event:
                    case Tokens(tokens=tokens, text=text):
                        stream.arrived(time.monotonic(), len(tokens), text)
                    case Done(usage=usage):
                        stream.prompt_tokens = usage.prompt_tokens
                        stream.output_tokens = usage.completion_tokens
                        stream.cached_tokens = usage.cached_tokens
        except asyncio.CancelledError:
            await completion.cancel()  # or it would run beside the next trace
            raise

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()


def _path(info: ModelInfo | None) -> str:
    """Return how the model is served, because the report should show if it is a slow way."""
    if info is None:
        return ""
    shared = all(part.batched for part in info.kv)
    return f"{info.attention_path}, {'rows share a pass' if shared else 'one row a pass'}"


class OpenAIDriver:
    """Client of any server with ``/v1/completions``; each request has its own connection."""

    path = ""

    def __init__(self, url: str, model: str, *, endless: bool = True) -> None:
        """Take the server's address; ``endless``: its model has no end-of-text token (`twin`)."""
        self._url = f"{url.rstrip('/')}/v1/completions"
        self._model = model
        # An option of vLLM, llama.cpp and others; servers that this program starts do not need it.
        self._extra = {} if endless else {"ignore_eos": True}
        import aiohttp  # noqa: PLC0415 - `kvctl --help` imports this module

        # No limits here: the player limits concurrent requests, and `Comparison` a run's time.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def ask(self, prompt: str, output: int, stream: Stream) -> None:
        """Send a request (`player.Driver`)."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        async with self._session.post(self._url, json=body) as response:
            if response.status != 200:
                text = (await response.text())[:300]
                raise RuntimeError(f"{self._url} answered with status {response.status}: {text}")
            async for line in response.content:
                _take(line, stream)
        if not stream.arrivals:
            raise RuntimeError(f"{self._url} ended a completion without a token")
        stream.output_tokens = stream.output_tokens or stream.shown

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


def _take(line: bytes, stream: Stream) -> None:
    chunk = parse(line)
    if chunk is None:
        return
    if text := "".join(choice.get("text") or "" for choice in chunk.get("choices") or []):
        stream.arrived(time.monotonic(), text=text)
    if usage := chunk.get("usage"):
        stream.prompt_tokens = usage["prompt_tokens"]
        stream.output_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        stream.cached_tokens = details.get("cached_tokens")


def parse(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line of server-sent events; None for lines without one."""
    if not line.startswith(b"data:"):
        return None
    data = line[5:].strip()
    if not data or data == b"[DONE]":
        return None
    chunk: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    if "error" in chunk:
        raise RuntimeError(f"the server reported an error: {chunk['error']}")
    return chunk
