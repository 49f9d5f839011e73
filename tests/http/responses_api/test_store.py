"""Stored responses: bounded in bytes and age, and separate by API key."""

from __future__ import annotations

import json
from dataclasses import dataclass

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from kvd.http import keys
from kvd.http.responses_api.store import MAX_AGE_S, Store
from protocol.errors import InvalidRequest
from protocol.types import ChatMessage
from tests.http.responses_api.asked import parts, post, read
from tests.http.stage import serving


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def keep(store: Store, number: int, previous: int | None = None, owner=None, size: int = 0) -> str:
    name = f"resp_{number}"
    output = [{"id": f"msg_{number}_0", "role": "assistant", "content": f"answer {number}"}]
    body = json.dumps({"id": name, "output": output, "pad": "x" * size}).encode()
    own = Raw(json.dumps({"role": "user", "content": f"question {number}"}).encode())
    store.put(name, owner, None if previous is None else f"resp_{previous}", (own,), body)
    return name


def test_a_conversation_continues_from_its_last_response():
    store = Store(Clock())
    keep(store, 1)
    keep(store, 2, previous=1)
    wanted = read(store, input="next", previous_response_id="resp_2", instructions="New.")
    assert wanted.call.messages == [
        ChatMessage("system", "New."),
        ChatMessage("user", "question 1"),
        ChatMessage("assistant", "answer 1"),
        ChatMessage("user", "question 2"),
        ChatMessage("assistant", "answer 2"),
        ChatMessage("user", "next"),
    ]


def test_the_events_of_a_background_response_do_not_measure_its_input_again():
    class Items(list):
        read = 0

        def __iter__(self):
            self.read += 1
            return super().__iter__()

    @dataclass
    class Growing:
        over: bool = False
        nbytes: int = 0
        body: bytes = b"{}"

        def drop_events(self, excess: int) -> None:
            assert excess <= 0

    store, items, run = Store(Clock()), Items([Raw(b'"' + b"x" * 5000 + b'"')]), Growing()
    store.begin("resp_1", None, None, items, run)
    before = store.bytes
    assert before > 5000
    for _ in range(9):
        run.nbytes += 100
        store.update("resp_1")
    assert (store.bytes - before, items.read) == (900, 1)


def test_an_item_is_found_by_its_id():
    store = Store(Clock())
    keep(store, 1, owner="me")
    items = [{"type": "item_reference", "id": "msg_1_0"}, {"role": "user", "content": "Why?"}]
    assert read(store, "me", input=items).call.messages[0] == ChatMessage("assistant", "answer 1")
    with pytest.raises(InvalidRequest, match="msg_1_0"):
        read(store, "you", input=items)


def test_an_item_is_referred_to_once_or_a_small_body_could_take_any_memory():
    store = Store(Clock())
    keep(store, 1)
    items = [{"type": "item_reference", "id": "msg_1_0"}] * 2
    with pytest.raises(InvalidRequest, match="refer to it once"):
        read(store, input=items)


def test_an_item_number_of_thousands_of_digits_is_not_stored():
    store = Store(Clock())
    keep(store, 1)
    with pytest.raises(InvalidRequest, match="not stored"):
        read(store, input=[{"type": "item_reference", "id": "msg_1_" + "1" * 5000}])


def test_an_old_response_is_dropped_with_a_clear_error():
    clock = Clock()
    store = Store(clock)
    keep(store, 1)
    clock.now = MAX_AGE_S - 1
    store.history("resp_1", None)
    clock.now += MAX_AGE_S - 1
    assert len(store.history("resp_1", None)) == 1, "each use starts the age again"
    clock.now += MAX_AGE_S + 1
    with pytest.raises(InvalidRequest, match=r"'resp_1' is not stored .* send the whole"):
        store.history("resp_1", None)
    assert store.bytes == 0


def test_the_error_names_the_dropped_response_before_a_kept_one():
    store = Store(Clock())
    keep(store, 1)
    keep(store, 2, previous=1)
    assert store.delete("resp_1", None)
    with pytest.raises(InvalidRequest, match="'resp_1' is not stored"):
        store.history("resp_2", None)


def test_another_key_neither_reads_nor_deletes_nor_continues_a_response():
    store = Store(Clock())
    keep(store, 1, owner="me")
    assert store.body("resp_1", "you") is None
    assert store.body("resp_1", None) is None
    assert not store.delete("resp_1", "you")
    with pytest.raises(InvalidRequest):
        store.history("resp_1", "you")
    assert store.body("resp_1", "me")


@given(st.lists(st.tuples(st.none() | st.integers(1, 20), st.integers(0, 9000)), max_size=40))
def test_the_bytes_are_bounded_and_exact(steps):
    store = Store(Clock(), max_bytes=20_000)
    for number, (back, size) in enumerate(steps):
        keep(store, number, None if back is None or back > number else number - back, size=size)
        assert store.bytes <= 20_000
        assert store.bytes == sum(one.size for one in store._stored.values())


def test_the_least_recently_used_response_is_dropped_first():
    store = Store(Clock(), max_bytes=10_000)
    for number in range(3):
        keep(store, number, size=1500)
    store.history("resp_0", None)
    keep(store, 3, size=1500)
    assert [store.body(f"resp_{number}", None) is not None for number in range(4)] == [
        True,
        False,
        True,
        True,
    ]


async def test_responses_over_http_are_kept_read_and_deleted(home):
    mine, yours = keys.make(), keys.make()
    settings = {"keys": {"me": keys.hashed(mine), "you": keys.hashed(yours)}}
    me, you = ({"Authorization": f"Bearer {key}"} for key in (mine, yours))
    async with (
        serving(home, parts(("text", "Hello")), **settings) as stage,
        httpx.AsyncClient() as client,
    ):
        made = (await post(stage.url, me)).json()
        path = f"{stage.url}/v1/responses/{made['id']}"
        assert (await client.get(path, headers=me)).json() == made
        assert (await client.get(path, headers=you)).status_code == 404
        missing = await post(stage.url, you, previous_response_id=made["id"])
        assert missing.status_code == 400
        assert missing.json()["error"]["param"] == "previous_response_id"
        more = await post(stage.url, me, previous_response_id=made["id"], input="More")
        assert more.json()["previous_response_id"] == made["id"]
        assert [one.content for one in stage.backend.calls[-1].request.messages] == [
            "Hi",
            "Hello",
            "More",
        ]
        unkept = (await post(stage.url, me, store=False)).json()
        gone = await client.get(f"{stage.url}/v1/responses/{unkept['id']}", headers=me)
        assert gone.status_code == 404
        deleted = (await client.delete(path, headers=me)).json()
        assert deleted == {"id": made["id"], "object": "response", "deleted": True}
        assert (await client.get(path, headers=me)).status_code == 404
