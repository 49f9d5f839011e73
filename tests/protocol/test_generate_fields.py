"""Fields of a generate request: their ranges, errors that name the field, and their encoding."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocol.errors import DeadlineExceeded, from_info
from protocol.fields import MAX_LOGIT_BIASES
from protocol.framing import (
    FrameDecoder,
    decode_command,
    decode_event,
    decode_report,
    encode_frame,
    encode_line,
)
from protocol.messages import (
    ChoiceFinished,
    Done,
    Error,
    Generate,
    PromptLogprobs,
    Tokens,
    is_last,
)
from protocol.session import ServerSession
from protocol.types import Alternative, Sampling, TokenLogprob, Usage
from protocol.worker import RowPrompt, RowTokens, Submit


def taken(**fields: Any) -> Generate | Error:
    """Decode a generate request with these fields, as the daemon does."""
    line = {"id": "a", "op": "generate", "model": "m", "prompt": "p"} | fields
    (found,) = ServerSession().receive(json.dumps(line).encode() + b"\n")
    assert isinstance(found, Generate | Error)
    return found


GOOD: list[dict[str, Any]] = [
    {},
    {"n": 1},
    {"n": 16},
    {"stop_tokens": [0, 2**31 - 1]},
    {"ignore_eos": True, "min_tokens": 5, "max_tokens": 5},
    {"min_tokens": 10},
    {"logprobs": 0},
    {"logprobs": 20, "prompt_logprobs": 20},
    {"priority": -100},
    {"priority": 100},
    {"deadline_s": 0.001},
    {"prefix_salt": "me"},
    {"sampling": {"logit_bias": {"0": 100, "7": -100.0}}},
    {"sampling": {"logit_bias": {str(token): 1 for token in range(MAX_LOGIT_BIASES)}}},
    {"sampling": {"repetition_penalty": 1.3}},
    {"sampling": {"presence_penalty": -2, "frequency_penalty": 2}},
]


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_values_in_range_are_accepted(fields: dict[str, Any]):
    found = taken(**fields)

    assert isinstance(found, Generate)
    for name, value in fields.items():
        if name != "sampling":
            assert getattr(found, name) == value


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"n": 0}, "n", "n must be at least 1"),
        ({"n": 17}, "n", "n must be at most 16"),
        ({"n": 1.5}, "n", "n must be a whole number"),
        ({"stop_tokens": [-1]}, "stop_tokens[0]", "must be at least 0"),
        ({"stop_tokens": [1] * 65}, "stop_tokens", "must have at most 64 items"),
        ({"stop_tokens": 3}, "stop_tokens", "must be a list"),
        ({"ignore_eos": 1}, "ignore_eos", "must be true or false"),
        ({"min_tokens": -1}, "min_tokens", "must be at least 0"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "must be at most max_tokens, 5"),
        ({"logprobs": 21}, "logprobs", "must be at most 20"),
        ({"logprobs": True}, "logprobs", "must be a whole number or null"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "must be at least 0"),
        ({"priority": 101}, "priority", "must be at most 100"),
        ({"deadline_s": 0}, "deadline_s", "must be more than 0"),
        ({"deadline_s": 1e9}, "deadline_s", "must be at most 604800"),
        ({"prefix_salt": "x" * 257}, "prefix_salt", "must have at most 256 characters"),
        ({"sampling": {"repetition_penalty": 0}}, "sampling.repetition_penalty", "more than 0"),
        ({"sampling": {"presence_penalty": 2.1}}, "sampling.presence_penalty", "at most 2"),
        ({"sampling": {"frequency_penalty": -3}}, "sampling.frequency_penalty", "at least -2"),
        ({"sampling": {"logit_bias": {"5": 101}}}, "sampling.logit_bias[...]", "at most 100"),
        ({"sampling": {"logit_bias": {"x": 1}}}, "sampling.logit_bias", "a key of sampling.logit"),
        (
            {"sampling": {"logit_bias": {str(token): 1 for token in range(1025)}}},
            "sampling.logit_bias",
            "must have at most 1024 items",
        ),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused_by_name(fields: dict[str, Any], field: str, says: str):
    found = taken(**fields)

    assert isinstance(found, Error)
    assert found.error.code == "invalid_request"
    assert found.error.detail["field"] == field
    assert says in found.error.message


def test_a_request_without_newer_fields_gets_their_defaults():
    assert taken() == Generate(id="a", model="m", prompt="p")
    assert encode_line(Tokens(id="a", index=0, tokens=[1], text="x")) == (
        b'{"event":"tokens","id":"a","index":0,"tokens":[1],"text":"x"}\n'
    )
    assert b"choice" not in encode_frame(RowTokens(rid="r", index=0, tokens=[1], text="x"))


LOGPROB = TokenLogprob(
    token=5,
    text=" the",
    logprob=-0.5,
    top=[Alternative(5, " the", -0.5), Alternative(9, "\ufffd", -1.0, [0xC3])],
)


def test_events_with_new_fields_round_trip():
    events = [
        Tokens(id="a", index=0, tokens=[5], text=" the", choice=3, logprobs=[LOGPROB]),
        PromptLogprobs(id="a", index=0, logprobs=[TokenLogprob(1, "<s>"), LOGPROB]),
        ChoiceFinished(id="a", choice=3, reason="length"),
        Done(id="a", reason="length", usage=Usage(1, 2)),
    ]
    assert [decode_event(encode_line(event)) for event in events] == events
    assert [is_last(event) for event in events] == [False, False, False, True]


def test_commands_and_reports_with_new_fields_round_trip():
    submit = Submit(
        rid="r",
        sampling=Sampling(seed=1, logit_bias={3: -1.0}, repetition_penalty=1.1),
        n=4,
        stop_tokens=[2],
        ignore_eos=True,
        min_tokens=3,
        logprobs=0,
        prompt_logprobs=5,
        priority=-7,
        deadline_s=2.5,
        prefix_salt="me",
    )
    (frame,) = FrameDecoder().receive(encode_frame(submit))
    assert decode_command(frame) == submit
    report = RowPrompt(rid="r", index=4, logprobs=[LOGPROB])
    (frame,) = FrameDecoder().receive(encode_frame(report))
    assert decode_report(frame) == report


def test_a_deadline_is_a_typed_error():
    error = from_info(DeadlineExceeded("too late").info())

    assert isinstance(error, DeadlineExceeded)
    assert (error.code, error.retryable) == ("deadline_exceeded", True)
