"""Bad input on the socket gets a typed error, and ends at most its own connection."""

from __future__ import annotations

import json
import threading

import pytest

from protocol.errors import (
    ContextTooLong,
    EmptyPrompt,
    InvalidRequest,
    UnknownModel,
)
from protocol.messages import MAX_FRAME_BYTES
from tests.process.helpers import Daemon, lines_of


@pytest.fixture(autouse=True)
def unharmed(shared: Daemon):
    """After each test, the same daemon and worker still answer."""
    before = (shared.pid, shared.worker_pid("fast"))
    yield
    assert (shared.pid, shared.worker_pid("fast")) == before
    with shared.client() as kvd:
        assert len(kvd.generate("fast", "Hi", max_tokens=3).text) > 0


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"garbage\n", "malformed_frame"),
        (b"\x00\x01\x02\x03\n", "malformed_frame"),
        (b'{"v":1,"id":"1","op":"status"\n', "malformed_frame"),
        (b"[1,2,3]\n", "malformed_frame"),
        (b'{"v":1,"op":"status"}\n', "malformed_frame"),
        (b'{"v":1,"id":"1","op":"hello","client":"\xff\xfe"}\n', "malformed_frame"),
        (b"[" * 100_000 + b"\n", "malformed_frame"),
        (b"x" * (MAX_FRAME_BYTES + 1), "frame_too_large"),
    ],
    ids=["text", "binary", "cut", "array", "no-id", "utf-8", "nested", "8-mib"],
)
def test_a_broken_frame_ends_the_connection(shared: Daemon, sent, code):
    with shared.connect() as raw:
        sender = threading.Thread(target=raw.sendall, args=(sent,))
        sender.start()
        (answer,) = lines_of(raw)
        sender.join()
    assert answer["event"] == "error"
    assert answer["id"] == ""
    assert answer["error"]["code"] == code
    assert answer["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"op": "frobnicate"}, "unknown_op"),
        ({}, "invalid_request"),
        ({"op": "status", "v": 2}, "unsupported_version"),
        ({"op": "generate", "model": "fast"}, "invalid_request"),
        ({"op": "generate", "model": 5, "prompt": "x"}, "invalid_request"),
        ({"op": "generate", "model": "fast", "prompt": ""}, "empty_prompt"),
        ({"op": "generate", "model": "fast", "prompt": "x", "max_tokens": 0}, "invalid_request"),
        ({"op": "generate", "model": "nope", "prompt": "x"}, "unknown_model"),
        ({"op": "unload", "model": "nope"}, "unknown_model"),
    ],
)
def test_an_invalid_request_fails_alone(shared: Daemon, fields, code):
    with shared.connect() as raw:
        answers = lines_of(raw)
        raw.sendall(json.dumps({"v": 1, "id": "a", **fields}).encode() + b"\n")
        answer = next(answers)
        assert (answer["id"], answer["event"], answer["error"]["code"]) == ("a", "error", code)
        raw.sendall(b'{"v":1,"id":"b","op":"hello","of the future":[1]}\r\n\n')
        assert next(answers)["event"] == "hello"


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2.0},
        {"seed": -1},
        {"max_tokens": 0},
        {"stop": [""]},
        {"stop": ["x"] * 17},
    ],
    ids=str,
)
def test_sampling_values_out_of_range_name_the_field(shared: Daemon, options):
    with shared.client() as kvd, pytest.raises(InvalidRequest) as caught:
        _ = kvd.generate("fast", "Hi", **options).text
    assert next(iter(options)) in caught.value.detail["field"]


def test_invalid_prompts_are_refused(shared: Daemon):
    with shared.client() as kvd:
        with pytest.raises(EmptyPrompt):
            _ = kvd.generate("fast", "").text
        with pytest.raises(UnknownModel, match="nope"):
            _ = kvd.generate("nope", "Hi").text
        with pytest.raises(ContextTooLong):
            _ = kvd.generate("fast", "word " * 1_000_000, max_tokens=1).text
        assert kvd.generate("fast", "Hi", max_tokens=3).text


def test_a_frame_may_arrive_byte_by_byte(shared: Daemon):
    with shared.connect() as raw:
        for byte in b'{"v":1,"id":"slow","op":"hello"}\n':
            raw.sendall(bytes([byte]))
        assert next(lines_of(raw))["id"] == "slow"


def test_an_id_in_use_is_refused_and_the_first_request_continues(shared: Daemon):
    request = {"v": 1, "id": "x", "op": "generate", "model": "fast", "prompt": "Hi"}
    line = json.dumps(request | {"max_tokens": 300}).encode() + b"\n"
    with shared.connect() as raw:
        raw.sendall(line + line)
        answers = []
        for answer in lines_of(raw):
            answers.append(answer)
            if answer["event"] == "done":
                break
    errors = [answer["error"]["code"] for answer in answers if answer["event"] == "error"]
    assert errors == ["invalid_request"]
    assert answers[-1]["usage"]["completion_tokens"] == 300


def test_concurrent_clients_get_their_own_completions(shared: Daemon):
    with shared.client() as one, shared.client() as two:
        options = {"max_tokens": 50, "temperature": 1.0, "seed": 5}
        first = one.generate("fast", "same prompt", **options)
        second = two.generate("fast", "same prompt", **options)
        other = two.generate("fast", "another prompt", **options)
        assert first.text == second.text
        assert first.tokens == second.tokens
        assert other.text != first.text


def test_cancel_ends_only_its_request(shared: Daemon):
    with shared.client() as kvd:
        kept = kvd.generate("fast", "a", max_tokens=200, seed=1)
        cancelled = kvd.generate("fast", "b", max_tokens=2000, seed=1)
        events = iter(cancelled)
        while not cancelled.tokens:
            next(events)
        assert kvd.cancel(cancelled.id) is True
        assert cancelled.text is not None
        assert cancelled.reason == "cancelled"
        alone = kvd.generate("fast", "a", max_tokens=200, seed=1)
        assert kept.text == alone.text
        assert kvd.cancel("no such request") is False
