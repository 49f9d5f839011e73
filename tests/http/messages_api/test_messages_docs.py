"""`docs/http.md` describes every field of Anthropic's requests."""

from __future__ import annotations

import re

from msgspec.structs import fields

from kvd.http.messages_api.requests import MessagesRequest
from tests.http.test_docs import rows, section


def test_every_field_of_a_request_is_described():
    text = section("Anthropic's Messages API")
    assert rows(text) == {field.encode_name for field in fields(MessagesRequest)}


def test_every_block_that_is_read_is_described():
    text = section("Anthropic's Messages API")
    for kind in ("text", "tool_use", "tool_result", "thinking", "redacted_thinking"):
        assert re.search(rf"`{kind}`", text), kind
