"""Client and server sessions together, and server sessions with invalid requests."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import messages
from protocol.errors import ErrorInfo, LocalProtocolError, RemoteProtocolError
from protocol.messages import MAX_FRAME_BYTES, Error, Event, Generate, Hello, Request, is_last
from protocol.session import OPS, ClientSession, ServerSession
from protocol.types import Usage


class Pair:
    """A client session and a server session; what one sends reaches the other byte by byte."""

    def __init__(self) -> None:
        self.client = ClientSession()
        self.server = ServerSession()

    def up(self, request: Request) -> list[Request | Error]:
        line = self.client.request(request)
        return [found for byte in line for found in self.server.receive(bytes([byte]))]

    def down(self, event: Event) -> list[Event]:
        line = self.server.send(event)
        return [found for byte in line for found in self.client.receive(bytes([byte]))]


def generate(key: str = "g", **fields) -> Generate:
    return Generate(id=key, model="demo", prompt="hello", **fields)


def answer(session: ServerSession, line: bytes) -> Error:
    (error,) = session.receive(line + b"\n")
    assert isinstance(error, Error)
    session.refuse(error)
    return error


# -- both ends ----------------------------------------------------------------------------------


def test_a_conversation():
    pair = Pair()
    request = generate()
    events = [
        messages.Accepted(id="g", prompt_tokens=1, seed=2),
        messages.Tokens(id="g", index=0, tokens=[1], text="a"),
        messages.Done(id="g", reason="stop", usage=Usage(1, 1)),
    ]

    assert [request] == pair.up(request)
    assert {"g": request} == pair.server.open
    assert [[event] for event in events] == [pair.down(event) for event in events]
    assert pair.server.open == {}
    assert [request] == pair.up(request)  # the id is free again


def test_requests_may_be_interleaved():
    pair = Pair()
    pair.up(generate("a"))
    pair.up(generate("b"))
    pair.down(messages.Done(id="b", reason="stop", usage=Usage(1, 1)))

    assert list(pair.server.open) == ["a"]
    with pytest.raises(LocalProtocolError):
        pair.server.send(messages.Tokens(id="b", index=0, tokens=[1], text="a"))


def test_both_ends_reject_local_protocol_errors():
    pair = Pair()
    pair.up(generate())

    with pytest.raises(LocalProtocolError):
        pair.client.request(generate())
    with pytest.raises(LocalProtocolError):
        pair.server.send(messages.ShutdownReply(id="other"))


def test_a_request_over_the_limit_is_refused_before_it_is_sent():
    client = ClientSession()
    with pytest.raises(RemoteProtocolError, match="limit"):
        client.request(Generate(id="1", model="m", prompt="x" * MAX_FRAME_BYTES))

    client.request(generate("1"))


@pytest.mark.parametrize("line", [b'{"id":"x","event":"shutdown"}\n', b"garbage\n", b"\xff\n"])
def test_a_client_rejects_unexpected_events(line: bytes):
    with pytest.raises(RemoteProtocolError):
        ClientSession().receive(line)


def test_a_client_gets_errors_of_its_connection():
    error = Error(id="", error=ErrorInfo("slow_reader", "read faster", True))

    assert [error] == ClientSession().receive(ServerSession().refuse(error))


def test_the_last_events():
    kinds = {kind.__name__ for kind in Event.__args__}
    more = {"Loading", "Accepted", "Tokens"}

    assert more < kinds
    assert is_last(messages.Drained(id="1"))
    assert not is_last(messages.Accepted(id="1", prompt_tokens=1, seed=1))


# -- faults of a frame: the connection ends -------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        b"garbage",
        b"\xff\xfe",
        b'{"id":"a","op":"hello","x":"\xc3"}',
        b"[]",
        b"3",
        b"{}",
        b'{"op":"hello"}',
        b'{"id":"","op":"hello"}',
        b'{"id":7,"op":"hello"}',
        b'{"id":"' + b"x" * 129 + b'","op":"hello"}',
        b'{"id":"a","op":"hello"',
        b'{"id":"a","op":null,"x":"\\ud800"}',  # an invalid value, followed by invalid JSON
        b'{"id":"a","op":null,"x":' + b"[" * 10_000,
        b'{"id":"a","op":"hello","x":' + b"[" * 10_000,
    ],
)
def test_a_malformed_line_ends_the_connection(line: bytes):
    session = ServerSession()
    error = answer(session, line)

    assert (error.id, error.error.code, session.closing) == ("", "malformed_frame", True)
    assert session.receive(b'{"id":"a","op":"hello"}\n') == []


def test_an_endless_line_ends_the_connection():
    session = ServerSession()
    found = session.receive(b'{"id":"a","op":"hello"}\n' + b"x" * (MAX_FRAME_BYTES + 1))

    assert Hello(id="a") == found[0]
    assert (found[1].id, found[1].error.code) == ("", "frame_too_large")
    assert session.closing


# -- faults of a message: the connection goes on --------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"op": "nope"}, "unknown_op", None),
        ({"op": "hello", "v": 2}, "unsupported_version", None),
        ({"op": "future", "v": 2}, "unsupported_version", None),
        ({}, "invalid_request", "op"),
        ({"op": "generate", "prompt": "x"}, "invalid_request", "model"),
        ({"op": "generate", "model": "", "prompt": "x"}, "invalid_request", "model"),
        ({"op": "generate", "model": "m"}, "invalid_request", "prompt"),
        (
            {"op": "generate", "model": "m", "prompt": "x", "tokens": [1]},
            "invalid_request",
            "prompt",
        ),
        ({"op": "generate", "model": "m", "prompt": ""}, "empty_prompt", "prompt"),
        ({"op": "generate", "model": "m", "tokens": []}, "empty_prompt", "tokens"),
        ({"op": "generate", "model": "m", "messages": []}, "empty_prompt", "messages"),
        ({"op": "load", "model": "m", "kv": {"k_bits": 7}}, "invalid_request", "kv.k_bits"),
        (
            {"op": "load", "model": "m", "kv": {"max_kv_size": 256, "keep": 129}},
            "invalid_request",
            "kv.keep",
        ),
        (
            {"op": "load", "model": "m", "kv": {"schemes": ["k9v9"]}},
            "invalid_request",
            "kv.schemes",
        ),
        (
            {"op": "load", "model": "m", "kv": {"floors": {"9999": "k8v8"}}},
            "invalid_request",
            "kv.floors",
        ),
        ({"op": "cancel"}, "invalid_request", "target"),
        ({"op": "unload", "model": "m", "force": "yes"}, "invalid_request", "force"),
    ],
)
def test_an_invalid_request_is_answered_and_the_connection_continues(fields, code, field):
    session = ServerSession()
    error = answer(session, json.dumps({"id": "a", **fields}).encode())

    assert ("a", code, False) == (error.id, error.error.code, session.closing)
    assert field == error.error.detail.get("field")
    assert error.error.message
    assert session.open == {}
    assert [Hello(id="a")] == session.receive(b'{"id":"a","op":"hello"}\n')


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 11),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("top_k", 2**31),
        ("min_p", 2),
        ("seed", -1),
        ("seed", 2**63),
        ("temperature", "hot"),
    ],
)
def test_sampling_out_of_range_names_the_field(name, value):
    line = {"id": "a", "op": "generate", "model": "m", "prompt": "x", "sampling": {name: value}}
    error = answer(ServerSession(), json.dumps(line).encode())

    assert error.error.code == "invalid_request"
    assert f"sampling.{name}" == error.error.detail["field"]


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 0}, {"max_tokens": 10**30}, {"stop": [""]}, {"stop": ["x"] * 17}],
)
def test_values_out_of_range_outside_sampling_name_the_field(fields):
    line = {"id": "a", "op": "generate", "model": "m", "prompt": "x", **fields}
    error = answer(ServerSession(), json.dumps(line).encode())

    assert error.error.detail["field"].startswith(next(iter(fields)))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sampling": {"temperature": 11}}, "sampling.temperature must be at most 10"),
        ({"sampling": {"temperature": None}}, "sampling.temperature must be a number, not null"),
        ({"stop": [""]}, "stop[0] must not be empty"),
        ({"stop": ["x"] * 17}, "stop must have at most 16 items"),
        (
            {"messages": [{"role": "me", "content": ""}]},
            "messages[0].role must be one of assistant, system, tool, user, not 'me'",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    ],
)
def test_wrong_values_are_explained_in_words(fields, says):
    line = {"id": "a", "op": "generate", "model": "m", "prompt": "x", **fields}
    error = answer(ServerSession(), json.dumps(line).encode())

    assert says == error.error.message


def test_an_id_of_a_wrong_kind_is_explained_in_words():
    error = answer(ServerSession(), b'{"id":7,"op":"hello"}')

    assert error.error.message == "not a request: id must be a text, not a number"


@pytest.mark.parametrize(
    "alias", ["\x1b[31mred\nx", "a\n", "a b", "\x00", "a\u202eb", "é", "--force", "", "x" * 257]
)
def test_an_alias_that_would_break_a_table_or_a_command_line_is_refused(alias):
    line = {"id": "a", "op": "load", "model": "m", "alias": alias}
    error = answer(ServerSession(), json.dumps(line).encode())

    assert (error.error.code, error.error.detail["field"]) == ("invalid_request", "alias")


@pytest.mark.parametrize("alias", ["demo", "Qwen/Qwen2.5-0.5B", "a_b:c@v1+x", "7", "x" * 256])
def test_an_alias_may_look_like_a_hub_id(alias):
    line = json.dumps({"id": "a", "op": "load", "model": "m", "alias": alias}).encode()

    assert [messages.Load(id="a", model="m", alias=alias)] == ServerSession().receive(line + b"\n")


def test_an_id_in_use_is_refused_and_stays_in_use():
    session = ServerSession()
    session.receive(b'{"id":"a","op":"status"}\n')
    error = answer(session, b'{"id":"a","op":"hello"}')

    assert (
        error.id,
        error.error.code,
        error.error.detail["field"],
    ) == ("a", "invalid_request", "id")
    assert list(session.open) == ["a"]
    session.send(messages.ShutdownReply(id="a"))


def test_unknown_fields_are_ignored():
    assert [Hello(id="a")] == ServerSession().receive(b'{"id":"a","op":"hello","new":{"x":[1]}}\n')


# -- anything -------------------------------------------------------------------------------------


def drive(parts: list[bytes]) -> tuple[list[object], bool]:
    session = ServerSession()
    found = [item for part in parts for item in session.receive(part)]
    return found, session.closing


ODD = [
    None,
    True,
    3,
    -1.5,
    10**30,
    "",
    "x",
    "\ud800",
    [],
    [[1]],
    {},
    {"temperature": 2},
    {"k_bits": 3},
    {"floors": {"-1": "k8v8", "x": ""}},
    {"schemes": ["k4v4", "k8v8"]},
]
values = st.sampled_from(ODD)
objects = st.fixed_dictionaries(
    {},
    optional={
        "id": st.sampled_from(["a", "b", ""]) | values,
        "op": st.sampled_from(OPS) | values,
        "v": st.sampled_from([1, 1, 1, 2]) | values,
        "model": st.just("m") | values,
        "prompt": st.text(max_size=5) | values,
        "sampling": values,
        "kv": values,
        "target": st.just("a"),
    },
)
lines = st.lists(
    objects.map(lambda obj: json.dumps(obj).encode()) | st.binary(max_size=20), max_size=6
).map(b"\n".join)


@settings(deadline=None)
@given(lines)
def test_any_input_is_answered_however_it_is_cut(data: bytes):
    whole = drive([data])

    assert whole == drive([bytes([byte]) for byte in data])
    found, closing = whole
    ids = [item.id for item in found if not isinstance(item, Error)]
    assert len(ids) == len(set(ids))
    ends = [item for item in found if isinstance(item, Error) and not item.id]
    assert closing == bool(ends)
    assert ends in ([], found[-1:])
