"""openai's own package retries after the requested wait when the queue is full."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable

import openai
import pytest

from tests.http.live import Live
from tests.process.helpers import source, wait_for

MODEL = "crowded"
MOST = 1024
"""Requests that one model may hold."""
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


class Visits:
    """Times and statuses of the attempts of one client, in order."""

    def __init__(self, reported: Callable[[int], None]) -> None:
        self._reported = reported
        self.asked: list[float] = []
        self.answers: list[tuple[int, float, str | None]] = []
        self.counts: list[str] = []

    def ask(self, request) -> None:
        self.asked.append(time.monotonic())
        self.counts.append(request.headers["x-stainless-retry-count"])

    def answer(self, response) -> None:
        reported = response.headers.get("Retry-After")
        self.answers.append((response.status_code, time.monotonic(), reported))
        self._reported(response.status_code)

    async def ask_later(self, request) -> None:
        self.ask(request)

    async def answer_later(self, response) -> None:
        self.answer(response)

    def are_two_with_the_requested_pause(self) -> bool:
        (first, at, reported), (second, _, _) = self.answers
        assert (first, second, self.counts) == (429, 200, ["0", "1"])
        assert reported is not None
        return 1 <= int(reported) <= self.asked[1] - at


@pytest.mark.slow
async def test_openai_retries_by_itself(live: Live):
    """The package obeys 429 and Retry-After, so the caller needs no loop."""
    live.load(source(tps=20), MODEL)
    line = {"v": 1, "op": "generate", "model": MODEL, "prompt": "x", "max_tokens": 400}
    many = b"".join(json.dumps(line | {"id": str(i)}).encode() + b"\n" for i in range(MOST))
    refused = threading.Semaphore(0)

    def reported(status: int) -> None:
        if status == 429:
            refused.release()

    whole, streamed = Visits(reported), Visits(reported)

    def at_once() -> int:
        hooks = {"request": [whole.ask], "response": [whole.answer]}
        http = openai.DefaultHttpxClient(event_hooks=hooks)
        with openai.OpenAI(base_url=url, api_key="none", http_client=http) as ai:
            return ai.chat.completions.create(**ASKED).usage.completion_tokens

    async def as_a_stream() -> str | None:
        hooks = {"request": [streamed.ask_later], "response": [streamed.answer_later]}
        http = openai.DefaultAsyncHttpxClient(event_hooks=hooks)
        async with openai.AsyncOpenAI(base_url=url, api_key="none", http_client=http) as ai:
            stream = await ai.chat.completions.create(**ASKED, stream=True)
            return [chunk.choices[0].finish_reason async for chunk in stream][-1]

    def leave_when_both_were_refused() -> None:
        for _ in range(2):
            assert refused.acquire(timeout=30)
        crowd.close()

    url = f"{live.url}/v1"
    with live.connect() as crowd:
        crowd.sendall(many)
        wait_for("the queue is full", lambda: live.running(MODEL) == MOST)
        tokens, end, _ = await asyncio.gather(
            asyncio.to_thread(at_once),
            as_a_stream(),
            asyncio.to_thread(leave_when_both_were_refused),
        )
    assert (tokens, end) == (3, "length")
    assert whole.are_two_with_the_requested_pause()
    assert streamed.are_two_with_the_requested_pause()
    with live.client() as kvd:
        kvd.unload(MODEL)
