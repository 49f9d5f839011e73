"""Requests to a server over a scripted daemon, and parts of the daemon's scripts."""

from __future__ import annotations

import httpx

from protocol.messages import Accepted, Tokens

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
BEGUN = Accepted(id="http", prompt_tokens=1, seed=1)


def word(text: str = "a") -> Tokens:
    return Tokens(id="http", index=0, tokens=[1], text=text)


def reported(body: bytes = b"", kind: str = "x/y"):
    async def metrics(_: str) -> tuple[bytes, str]:
        return body, kind

    return metrics


async def post(url: str, body=CHAT, **options) -> httpx.Response:
    async with httpx.AsyncClient(verify=False) as client:
        return await client.post(f"{url}/v1/chat/completions", json=body, **options)


def local(path: str) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(uds=path)
    return httpx.AsyncClient(transport=transport, base_url="http://kvd")


async def get(url: str, path: str, **options) -> httpx.Response:
    async with httpx.AsyncClient(verify=False) as client:
        return await client.get(url + path, **options)
