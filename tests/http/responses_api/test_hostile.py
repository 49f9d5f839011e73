"""Any body is either refused with a reason, or becomes a request that the protocol can hold."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import msgspec
from hypothesis import HealthCheck, given, settings

from kvd.http.responses_api import reading
from kvd.http.responses_api.requests import Item, ResponsesRequest
from kvd.http.responses_api.store import Store
from protocol.errors import InvalidRequest
from protocol.messages import Generate
from tests.fuzz.mutations import edited_json

TURN = json.dumps(json.loads((Path(__file__).parent / "codex_turn.json").read_text())).encode()
NAMES = [*ResponsesRequest.__struct_fields__, *Item.__struct_fields__, "type", "format", "mode"]


@given(edited_json([TURN], NAMES))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_an_edited_turn_of_codex_is_refused_or_valid(body: bytes):
    with contextlib.suppress(InvalidRequest):
        wanted = reading.read(body, Store(lambda: 0.0), None, 1)
        encoded = msgspec.msgpack.encode(wanted.call)
        assert msgspec.msgpack.decode(encoded, type=Generate) == wanted.call
        json.loads(msgspec.json.encode(wanted.response))
