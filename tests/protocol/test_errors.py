"""Errors quote what a peer sent in short, encodable texts without control characters."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import MAX_TEXT, ErrorInfo, InvalidRequest, from_info, shorten
from protocol.messages import Request, Tokenize
from protocol.session import ServerSession
from protocol.validation import describe_error

LONG = "k" * 8_000_000


@given(st.text(max_size=60), st.integers(1, 50))
def test_a_shortened_text_keeps_its_beginning_and_its_end(text, limit):
    short = shorten(text, limit)
    assert len(short) == min(len(text), limit)
    if short != text:
        start, end = short.split("…", 1) if "…" not in text else (short[: limit // 2], "")
        assert text.startswith(start)
        assert text.endswith(end)


@given(st.text(st.characters(), max_size=5000), st.text(st.characters(), max_size=5000))
def test_messages_and_details_are_bounded_and_do_not_change_on_the_way_to_the_peer(message, value):
    error = InvalidRequest(message, field=value, story=[value], sizes={"n": 1, "of": value})
    info = msgspec.json.decode(msgspec.json.encode(error.info()), type=ErrorInfo)
    texts = [info.message, info.detail["field"], *info.detail["story"], info.detail["sizes"]["of"]]
    assert max(map(len, texts)) <= MAX_TEXT
    assert not any(char < " " and char not in "\t\n" for text in texts for char in text)
    assert from_info(info).info() == info


@pytest.mark.parametrize(
    "fields",
    [
        f'"id": "1", "op": "{LONG}"',
        f'"id": "1", "op": "tokenize", "{LONG}": 1',
        f'"id": "1", "op": "tokenize", "model": "{LONG}"',
        f'"id": "1", "op": "generate", "model": "m", "messages": [{{"role": "{LONG}"}}]',
        f'"id": "{LONG}", "op": "status"',
        f'"id": "1", "op": "tokenize", "model": "m", "prompt": 1, "{LONG}": 1',
        f'"id": "1", "op": "config", "settings": {LONG}',
    ],
)
def test_an_error_over_the_socket_is_short_whatever_the_request_has(fields):
    session = ServerSession()
    for found in session.receive(f"{{{fields}}}\n".encode()):
        if not isinstance(found, Tokenize):  # unknown keys are skipped
            assert len(session.refuse(found)) < 3 * MAX_TEXT


def test_an_unknown_key_of_megabytes_is_named_by_its_beginning():
    field, text = describe_error(f"Object contains unknown field `{LONG}` - at `$.kv`", Request)
    assert field.startswith("kv.kkkk")
    assert len(text) < 1000
