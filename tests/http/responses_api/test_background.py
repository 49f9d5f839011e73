"""Responses with ``background: true``: polled, followed, cancelled, without their client."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from msgspec import Raw

from kvd.http import keys
from kvd.http.responses_api.answer import ResponseAnswer
from kvd.http.responses_api.background import Run
from kvd.http.responses_api.store import Store
from protocol import messages
from protocol.errors import InvalidRequest, Overloaded
from protocol.types import Usage
from tests.http.calls import BEGUN, word
from tests.http.responses_api.asked import events, parts, post, read
from tests.http.stage import fails, hangs, says, serving

DONE = messages.Done(
    id="http", reason="stop", usage=Usage(prompt_tokens=3, completion_tokens=2, levels=[0])
)


@asynccontextmanager
async def started(home, *script, **fields):
    """Yield the stage, a client and the path of a background response that runs."""
    async with serving(home, hangs(*script)) as stage, httpx.AsyncClient() as client:
        made = (await post(stage.url, background=True, **fields)).json()
        yield stage, client, f"{stage.url}/v1/responses/{made['id']}"


async def test_a_response_is_polled_until_it_is_over(home):
    async with started(home) as (stage, client, path):
        (call,) = stage.backend.calls
        assert (await client.get(path)).json()["status"] == "queued"
        call.deliver(BEGUN)
        polled = (await client.get(path)).json()
        assert (polled["status"], polled["background"]) == ("in_progress", True)
        call.deliver(word("Hello"))
        call.deliver(DONE)
        polled = (await client.get(path)).json()
        assert polled["status"] == "completed"
        assert polled["output"][0]["content"][0]["text"] == "Hello"
        more = await post(stage.url, previous_response_id=polled["id"], background=True)
        assert more.status_code == 200
        assert [one.content for one in stage.backend.calls[-1].request.messages] == [
            "Hi",
            "Hello",
            "Hi",
        ]


async def test_a_stream_continues_after_any_event(home):
    async with serving(home, parts(("reasoning", "hm"), ("text", "Hello you"))) as stage:
        whole = events((await post(stage.url, background=True, stream=True)).text)
        assert [one["type"] for one in whole[:3]] == [
            "response.created",
            "response.queued",
            "response.in_progress",
        ]
        path = f"{stage.url}/v1/responses/{whole[0]['response']['id']}"
        async with httpx.AsyncClient() as client:
            for after in range(-1, len(whole)):
                query = {"stream": "true"} | ({"starting_after": after} if after >= 0 else {})
                again = await client.get(path, params=query)
                numbers = [
                    line.split('"sequence_number":')[1].split(",")[0]
                    for line in again.text.split("\n")
                    if line.startswith("data: ")
                ]
                assert list(map(int, numbers)) == list(range(after + 1, len(whole)))


async def test_a_response_outlives_the_client_of_its_stream(home):
    async with serving(home, hangs(BEGUN, word("Hello"))) as stage, httpx.AsyncClient() as client:
        body = {"model": "m", "input": "Hi", "background": True, "stream": True}
        async with client.stream("POST", f"{stage.url}/v1/responses", json=body) as answer:
            first = await anext(answer.aiter_text())
        (call,) = stage.backend.calls
        path = f"{stage.url}/v1/responses/{events(first)[0]['response']['id']}"
        follower = asyncio.create_task(
            client.get(path, params={"stream": "true", "starting_after": "2"})
        )
        await asyncio.sleep(0)
        assert not call.cancelled
        call.deliver(DONE)
        assert "response.completed" in (await follower).text
        assert (await client.get(path)).json()["status"] == "completed"


async def test_a_cancelled_response_keeps_what_it_has_and_its_streams_end(home):
    async with started(home, BEGUN, word("Hello")) as (stage, client, path):
        (call,) = stage.backend.calls
        follower = asyncio.create_task(client.get(path, params={"stream": "true"}))
        await asyncio.sleep(0)
        cancelled = (await client.post(f"{path}/cancel")).json()
        assert (cancelled["status"], call.cancelled) == ("cancelled", 1)
        assert cancelled["output"][0]["content"][0]["text"] == "Hello"
        assert cancelled["output"][0]["status"] == "incomplete"
        last = events((await follower).text)[-1]
        assert (last["type"], last["response"]) == ("response.incomplete", cancelled)
        call.deliver(word("late"))
        assert (await client.post(f"{path}/cancel")).json() == cancelled
        assert (await client.get(path)).json() == cancelled


async def test_a_follower_of_a_silent_response_gets_the_last_number_again(home, monkeypatch):
    monkeypatch.setattr("kvd.http.responses_api.background.KEEPALIVE_S", 0.01)
    async with started(home, BEGUN) as (_, client, path):
        query = {"stream": "true", "starting_after": "1"}
        async with client.stream("GET", path, params=query) as answer:
            lines = answer.aiter_lines()
            found = [json.loads((await anext(data(lines)))[6:]) for _ in range(3)]
    assert [one["sequence_number"] for one in found] == [2, 2, 2]
    assert {one["type"] for one in found} == {"response.in_progress"}


async def data(lines):
    """Yield the lines of a stream that have data."""
    async for line in lines:
        if line.startswith("data: "):
            yield line


async def test_an_error_is_the_end_of_a_response(home):
    async with serving(home, fails(Overloaded("full"))) as stage, httpx.AsyncClient() as client:
        made = (await post(stage.url, background=True)).json()
        path = f"{stage.url}/v1/responses/{made['id']}"
        failed = (await client.get(path)).json()
        assert failed["status"] == "failed"
        assert failed["error"]["code"] == "rate_limit_exceeded"


async def test_a_deleted_response_is_cancelled(home):
    async with started(home, BEGUN) as (stage, client, path):
        assert (await client.delete(path)).json()["deleted"]
        assert stage.backend.calls[0].cancelled == 1
        for answer in [await client.get(path), await client.post(f"{path}/cancel")]:
            assert answer.status_code == 404


async def test_another_key_neither_follows_nor_cancels(home):
    mine, yours = keys.make(), keys.make()
    settings = {"keys": {"me": keys.hashed(mine), "you": keys.hashed(yours)}}
    me, you = ({"Authorization": f"Bearer {key}"} for key in (mine, yours))
    async with serving(home, hangs(BEGUN), **settings) as stage, httpx.AsyncClient() as client:
        made = (await post(stage.url, me, background=True)).json()
        path = f"{stage.url}/v1/responses/{made['id']}"
        for answer in [
            await client.post(f"{path}/cancel", headers=you),
            await client.get(path, params={"stream": "true"}, headers=you),
            await client.get(f"{path}/input_items", headers=you),
        ]:
            assert answer.status_code == 404
        assert not stage.backend.calls[0].cancelled


async def test_only_background_responses_are_cancelled_or_followed(home):
    async with serving(home, says("Hello")) as stage, httpx.AsyncClient() as client:
        made = (await post(stage.url)).json()
        path = f"{stage.url}/v1/responses/{made['id']}"
        for answer in [
            await client.post(f"{path}/cancel"),
            await client.get(path, params={"stream": "true"}),
        ]:
            assert answer.status_code == 400
            assert "background" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"stream": "perhaps"}, "stream"),
        ({"stream": "true", "starting_after": "x"}, "starting_after"),
        ({"stream": "true", "starting_after": "9" * 5000}, "starting_after"),
    ],
)
async def test_a_wrong_query_is_refused_with_its_field(home, query, field):
    async with started(home, BEGUN) as (_, client, path):
        refused = await client.get(path, params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


async def test_a_background_response_must_be_stored(home):
    async with serving(home) as stage:
        refused = await post(stage.url, background=True, store=False)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "store")
        assert not stage.backend.calls


async def test_a_response_that_runs_cannot_be_continued(home):
    async with started(home, BEGUN) as (stage, _, path):
        refused = await post(stage.url, previous_response_id=path.rpartition("/")[2])
        assert refused.status_code == 400
        assert "is not over" in refused.json()["error"]["message"]


def kept(store: Store, max_events: int, **fields) -> Run:
    """Return a run in the store that has delivered so many words and goes on."""
    wanted = read(background=True, **fields)
    run = Run(ResponseAnswer(wanted, 0.0, lambda: 0), lambda: store.update(wanted.response.id))
    store.begin(wanted.response.id, None, None, wanted.input, run)
    for _ in range(max_events):
        run._handle(word("x" * 100))
    return run


async def test_responses_that_run_leave_half_of_the_store_to_the_others():
    store = Store(lambda: 0.0, max_bytes=80_000)
    assert store.put("resp_old", None, None, (Raw(b"{}"),), b"{}" * 15_000)
    runs = [kept(store, 100) for _ in range(4)]
    assert sum(run.nbytes for run in runs) <= store.running_bytes <= 40_000
    assert store.body("resp_old", None) is not None
    assert store.bytes == sum(one.measure() for one in store._stored.values())
    for run in runs:
        with pytest.raises(InvalidRequest, match="are not kept any more"):
            await anext(run.follow(-1))
        run._handle(DONE)
    assert (store.running_bytes, store._running) == (0, {})
    assert store.bytes <= 80_000


async def test_the_events_of_one_response_take_at_most_an_eighth_of_the_store():
    store = Store(lambda: 0.0, max_bytes=160_000)
    run = kept(store, 0)
    first = run.nbytes
    for _ in range(400):
        run._handle(word("x" * 100))
        assert run.nbytes <= first + 20_000
    run._handle(DONE)
    assert store.bytes < 100_000


async def test_a_background_response_that_fits_no_more_is_refused_until_another_is_over():
    store = Store(lambda: 0.0, max_bytes=60_000)
    large = [{"role": "user", "content": "x" * 7_000}]
    runs = [kept(store, 5, input=large)]
    with pytest.raises(Overloaded, match="background responses run and take") as refused:
        runs.extend(kept(store, 5, input=large) for _ in range(9))
    assert refused.value.detail["retry_after_s"] > 0
    assert len(store._running) == len(runs) >= 2
    runs[0]._handle(DONE)
    kept(store, 5, input=large)
    with pytest.raises(InvalidRequest, match="send it with stream: true") as too_large:
        kept(store, 0, input=[{"role": "user", "content": "x" * 40_000}])
    assert too_large.value.detail["field"] == "background"


async def test_responses_that_are_over_are_dropped_before_those_that_run():
    store = Store(lambda: 0.0, max_bytes=40_000)
    run = kept(store, 50)
    for number in range(9):
        store.put(f"resp_{number}", None, None, (Raw(b"{}"),), b"{}" * 5000)
    assert store.bytes <= 40_000
    assert len(store._stored) < 5
    assert not run.over
    assert run in [one.run for one in store._stored.values()]


async def test_a_response_that_was_dropped_says_why(home):
    async with started(home) as (_, client, path):
        gone = (await client.get(path + "0")).json()["error"]
        assert gone["code"] == "not_found"
        assert (
            "is not stored (any more): responses are kept for 6 hours, in at most 32 MiB"
            in (gone["message"])
        )


async def test_a_follower_that_reads_slowly_is_left_behind_and_not_kept_for():
    store = Store(lambda: 0.0, max_bytes=40_000)
    run = kept(store, 10)
    follower = run.follow(-1)
    await anext(follower)
    for _ in range(200):
        run._handle(word("x" * 100))
    with suppress(StopAsyncIteration):
        pytest.fail(str(await anext(follower)))
