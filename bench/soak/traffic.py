"""The clients of the soak: streams over both interfaces, each compared with an undisturbed run.

A stream over the protocol's socket survives the daemon's death: its client attaches to the next
process. A stream over HTTP is lost then, as the documentation says, and its client starts again.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.chaos import Asked
from bench.soak.served import KILLED, ROAMING, STEADY, Served
from kvd.client import AsyncClient, AsyncCompletion
from protocol.errors import KvdError, NotRunning
from protocol.messages import Tokens

EXPECTED_ERRORS = {"overloaded", "insufficient_memory", "unknown_request", "draining"}
"""Codes with which a request may end here: a lowered budget may be too small, the daemon may die
before it has written a request to the journal, and `ROAMING` may be leaving."""
PAUSE_S = 5.0
"""Time for which a slow reader reads nothing."""


@dataclass
class Tally:
    """Counts of the whole run, and latencies since the last sample."""

    ended: Counter[str] = field(default_factory=Counter)
    """Streams by interface and reason."""
    errors: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    """Choices that stayed at the highest precision, and were compared with the undisturbed run."""
    wrong: list[str] = field(default_factory=list)
    attached: int = 0
    tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    """Seconds until the first tokens of streams of `STEADY`, since the last sample."""
    token_s: list[float] = field(default_factory=list)
    """Mean seconds per further token of streams of `STEADY`, since the last sample."""


class Traffic:
    """Players that send one request after the other until `over`."""

    def __init__(self, served: Served, asked: list[Asked], seed: int, rate: float) -> None:
        self.served = served
        self.asked = asked
        self.tally = Tally()
        self.over = False
        self._draw = random.Random(seed)
        self._rate = rate

    async def record_undisturbed(self) -> None:
        """Run every request once, and keep the results as what all later streams must return."""
        client = await self.served.connect()
        try:
            for number, one in enumerate(self.asked):
                completion = await client.generate(STEADY, one.prompt, **one.options)
                await completion.text()
                self.asked[number] = Asked(
                    one.prompt,
                    one.options,
                    tuple(tuple(choice.tokens) for choice in completion.choices),
                    tuple(choice.text for choice in completion.choices),
                )
        finally:
            await client.close()

    def players(self, count: int) -> list[asyncio.Task[None]]:
        """Start players; every third one uses HTTP."""
        return [
            asyncio.create_task(self._play(over_http=number % 3 == 2), name=f"player {number}")
            for number in range(count)
        ]

    async def _play(self, *, over_http: bool) -> None:
        while not self.over:
            model = self._draw.choice([STEADY, STEADY, KILLED, ROAMING])
            one = self._draw.choice(self.asked)
            try:
                await (self._http(model, one) if over_http else self._socket(model, one))
            except KvdError as error:
                self._count_error(error.code, error.message)
            await asyncio.sleep(self._draw.expovariate(self._rate))

    def _count_error(self, code: str, message: str) -> None:
        self.tally.errors[code] += 1
        if code not in EXPECTED_ERRORS:
            self.tally.wrong.append(f"{code}: {message[:200]}")

    # -- the protocol's socket --------------------------------------------------------------------

    async def _socket(self, model: str, one: Asked) -> None:
        """Run one stream to its end, or leave it in the middle; attach if the daemon dies."""
        manner = self._draw.choice(["whole"] * 7 + ["cancel", "leave", "slow"])
        client = await self.served.connect()
        completion: AsyncCompletion | None = None
        try:
            while True:
                try:
                    if completion is None:
                        completion = await client.generate(model, one.prompt, **one.options)
                    if await self._read(completion, model, manner):
                        return
                    break
                except NotRunning:
                    await client.close()
                    client = await self.served.connect()
                    completion = await self._attach(client, completion)
        finally:
            await client.close()
        self.tally.ended[f"socket {completion.reason}"] += 1
        if completion.usage is not None and completion.reason in {"length", "stop"}:
            choices = [(tuple(c.tokens), c.text) for c in completion.choices]
            self._compare(model, one, completion.usage.levels, choices)

    async def _attach(
        self, client: AsyncClient, completion: AsyncCompletion | None
    ) -> AsyncCompletion | None:
        if completion is None or not completion.request:
            return None  # not accepted yet, so the client sends it again
        self.tally.attached += 1
        try:
            return await client.attach(completion)
        except NotRunning:
            return completion

    async def _read(self, completion: AsyncCompletion, model: str, manner: str) -> bool:
        """Read events; return whether the client left before the end."""
        began, first, seen, tokens = time.monotonic(), None, 0, 0
        async for event in completion:
            if not isinstance(event, Tokens):
                continue
            seen += 1
            self.tally.tokens += len(event.tokens)
            if first is None:
                first = time.monotonic()
            else:
                tokens += len(event.tokens)
            if seen == 8 and manner == "cancel":
                await completion.cancel()
            elif seen == 8 and manner == "leave":
                self.tally.ended["socket left"] += 1
                return True
            elif seen == 8 and manner == "slow":
                await asyncio.sleep(PAUSE_S)
        if model == STEADY and manner == "whole" and first is not None and tokens:
            self.tally.first_s.append(first - began)
            self.tally.token_s.append((time.monotonic() - first) / tokens)
        return False

    # -- HTTP -------------------------------------------------------------------------------------

    async def _http(self, model: str, one: Asked) -> None:
        body: dict[str, Any] = {"model": model, "prompt": one.prompt, **one.options}
        stream = self._draw.random() < 0.6
        leaves = stream and self._draw.random() < 0.15
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{self.served.address}/v1/completions", json=body) as answer,
            ):
                if answer.status != 200:
                    error = (await answer.json())["error"]
                    self._count_error(str(error["code"]), error["message"])
                    return
                if not stream:
                    self._http_ended(model, one, [await answer.json()])
                    return
                chunks: list[dict[str, Any]] = []
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        chunks.append(json.loads(line[6:]))
                    if leaves and len(chunks) == 8:
                        self.tally.ended["http left"] += 1
                        return
                self._http_ended(model, one, chunks)
        except (aiohttp.ClientError, ConnectionError):
            self.tally.ended["http cut"] += 1  # by the daemon's death, which the caller checks

    def _http_ended(self, model: str, one: Asked, chunks: list[dict[str, Any]]) -> None:
        failed = [it["error"] for it in chunks if "error" in it]
        if failed:
            self._count_error(str(failed[0].get("code")), failed[0]["message"])
            return
        texts = [""] * len(one.texts)
        reason = "cut"
        extension: dict[str, Any] = {}
        for chunk in chunks:
            extension |= chunk.get("kvd") or {}
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
                reason = choice["finish_reason"] or reason
        self.tally.ended[f"http {reason}"] += 1
        if reason in {"length", "stop"}:
            levels = extension.get("levels") or [extension.get("level", -1)]
            self._compare(model, one, levels, [(None, text) for text in texts])

    def _compare(self, model: str, one: Asked, levels: list[int], choices: list[Any]) -> None:
        if levels != [0]:
            return
        for number, (tokens, text) in enumerate(choices):
            self.tally.compared += 1
            right = tokens is None or tokens == one.tokens[number]
            if not right or text != one.texts[number]:
                self.tally.wrong.append(f"{model}: different tokens for {one.options}")
