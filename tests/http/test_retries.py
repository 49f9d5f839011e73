"""openai's own package at a full queue: it waits as long as it is told to, and comes again."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable

import openai

from tests.http.live import Live
from tests.process.helpers import source, wait_for

MODEL = "crowded"
MOST = 1024
"""What one model may hold."""
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


class Visits:
    """When one client came, and what it was told, in their order."""

    def __init__(self, told: Callable[[int], None]) -> None:
        self._told = told
        self.asked: list[float] = []
        self.answers: list[tuple[int, float, str | None]] = []
        self.counts: list[str] = []

    def ask(self, request) -> None:
        self.asked.append(time.monotonic())
        self.counts.append(request.headers["x-stainless-retry-count"])

    def answer(self, response) -> None:
        told = response.headers.get("Retry-After")
        self.answers.append((response.status_code, time.monotonic(), told))
        self._told(response.status_code)

    async def ask_later(self, request) -> None:
        self.ask(request)

    async def answer_later(self, response) -> None:
        self.answer(response)

    def are_two_with_a_pause_as_told(self) -> bool:
        (first, at, told), (second, _, _) = self.answers
        assert (first, second, self.counts) == (429, 200, ["0", "1"])
        assert told is not None
        return 1 <= int(told) <= self.asked[1] - at


async def test_openai_comes_again_by_itself_when_it_is_told_to(live: Live):
    """Nobody has to write a loop: the package obeys 429 and Retry-After."""
    live.load(source(tps=20), MODEL)
    line = {"v": 1, "op": "generate", "model": MODEL, "prompt": "x", "max_tokens": 400}
    many = b"".join(json.dumps(line | {"id": str(i)}).encode() + b"\n" for i in range(MOST))
    refused = threading.Semaphore(0)

    def told(status: int) -> None:
        if status == 429:
            refused.release()

    whole, streamed = Visits(told), Visits(told)

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
    assert whole.are_two_with_a_pause_as_told()
    assert streamed.are_two_with_a_pause_as_told()
    with live.client() as kvd:
        kvd.unload(MODEL)
