"""A limit of tokens above the room in the context counts as the room."""

from __future__ import annotations

import contextlib

import httpx
import pytest
from msgspec.structs import replace

from kvd.host.home import Home
from protocol.errors import ContextTooLong, InsufficientMemory
from tests.http.stage import fails, says, serving, until

BODY = {"model": "m", "max_tokens": 32_000, "messages": [{"role": "user", "content": "Hi"}]}
NO_ROOM = ContextTooLong("max_tokens can be 90", prompt_tokens=10, context_length=100)
TOO_LONG = ContextTooLong("the prompt has 200 tokens", prompt_tokens=200, context_length=100)
NO_MEMORY = InsufficientMemory("the request needs 9 GiB", page_bytes=1)
NO_LOAD = InsufficientMemory("the model needs 9 GiB")


async def post(url: str, **fields) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.post(f"{url}/v1/messages", json=BODY | fields)


@pytest.mark.parametrize("error", [NO_ROOM, NO_MEMORY], ids=lambda error: error.code)
async def test_a_request_beyond_the_context_runs_until_it_is_full(home: Home, error):
    for stream in (False, True):
        async with serving(home, fails(error), says("Hello")) as it:
            answer = await post(it.url, stream=stream)
            assert answer.status_code == 200
            assert "Hello" in answer.text
            first, second = (call.request for call in it.backend.calls)
            assert (first.max_tokens, second.max_tokens) == (32_000, None)
            assert replace(first, max_tokens=None) == second


async def test_a_prompt_beyond_the_context_is_refused_once(home: Home):
    async with serving(home, fails(TOO_LONG)) as it:
        answer = await post(it.url)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("prompt is too long: 200 tokens > 100")
        assert len(it.backend.calls) == 1


async def test_a_second_refusal_is_the_answer(home: Home):
    async with serving(home, fails(NO_ROOM)) as it:
        assert (await post(it.url)).status_code == 400
        assert len(it.backend.calls) == 2


async def test_other_errors_are_passed_on(home: Home):
    for error in (ContextTooLong("without numbers"), NO_LOAD):
        async with serving(home, fails(error)) as it:
            assert (await post(it.url)).status_code in (400, 503)
            assert len(it.backend.calls) == 1


async def test_a_client_that_disconnects_cancels_the_second_request(home: Home):
    async with serving(home, fails(NO_ROOM), lambda _: []) as it:
        async with httpx.AsyncClient(timeout=0.3) as client:
            with contextlib.suppress(httpx.ReadTimeout):
                await client.post(f"{it.url}/v1/messages", json=BODY)
        await until(lambda: len(it.backend.calls) == 2 and it.backend.calls[1].cancelled)
