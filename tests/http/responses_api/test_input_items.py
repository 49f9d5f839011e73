"""Pages of a response's input items."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from kvd.http.responses_api.input_items import Page, listed
from tests.http.responses_api.asked import parts, post
from tests.http.stage import serving


def pages(count: int, limit: int, order: str) -> list[dict[str, Any]]:
    items = []
    for number in range(count):
        own = {} if number % 3 else {"id": f"own_{number}"}
        items.append(Raw(json.dumps({"role": "user", "content": str(number)} | own).encode()))
    after, found = None, []
    while True:
        page = json.loads(listed(items, "resp_a", Page(limit, order, after)))
        found += page["data"]
        if not page["has_more"]:
            return found
        assert len(page["data"]) == limit
        after = page["last_id"]


@given(st.integers(0, 60), st.integers(1, 100), st.sampled_from(["asc", "desc"]))
def test_pages_together_have_each_item_once_and_in_order(count, limit, order):
    found = [item["content"][0]["text"] for item in pages(count, limit, order)]
    wanted = [str(number) for number in range(count)]
    assert found == (wanted if order == "asc" else wanted[::-1])


async def test_items_are_those_of_the_conversation_in_their_order(home):
    called = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "fine"}
    async with serving(home, parts(("text", "Hello"))) as stage, httpx.AsyncClient() as client:
        first = (await post(stage.url, input="Hi")).json()
        asked = {"previous_response_id": first["id"], "input": [called, result]}
        last = (await post(stage.url, **asked)).json()
        path = f"{stage.url}/v1/responses/{last['id']}/input_items"
        page = (await client.get(path, params={"order": "asc"})).json()
    hi, hello, *rest = page["data"]
    assert (hi["type"], hi["role"]) == ("message", "user")
    assert hi["content"] == [{"type": "input_text", "text": "Hi"}]
    assert hello == first["output"][0]
    assert rest[0] == called
    assert rest[1] == result | {"id": rest[1]["id"]}
    assert (page["first_id"], page["last_id"]) == (hi["id"], rest[1]["id"])
    assert (page["object"], page["has_more"]) == ("list", False)


@pytest.mark.parametrize("value", ["1e999", "7", "null", '"' + "x" * 9000 + '"'])
@pytest.mark.parametrize("field", ["id", "content"])
async def test_items_that_kvd_ignores_are_listed_whatever_they_contain(home, field, value):
    odd = Raw(value.encode())
    items = [{"role": "user", "content": "Hi"}, {"type": "odd", field: odd}]
    body = msgspec.json.encode({"model": "m", "input": items})
    async with serving(home) as stage, httpx.AsyncClient() as client:
        made = await client.post(f"{stage.url}/v1/responses", content=body)
        assert made.status_code == 200, made.text
        path = f"{stage.url}/v1/responses/{made.json()['id']}/input_items"
        listed = await client.get(path)
    assert listed.status_code == 200
    assert f'"{field}"' in listed.text
    assert len(listed.json()["data"]) == 2


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "item_x"}, "after"),
    ],
)
async def test_a_wrong_page_is_refused_with_its_field(home, query, field):
    async with serving(home) as stage, httpx.AsyncClient() as client:
        made = (await post(stage.url)).json()
        path = f"{stage.url}/v1/responses/{made['id']}/input_items"
        refused = await client.get(path, params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        missing = await client.get(f"{stage.url}/v1/responses/none/input_items")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
