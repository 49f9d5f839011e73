"""HTTP bodies become requests to the daemon, or errors that name the field."""

from __future__ import annotations

import contextlib
import json
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.http.reading import calls, read
from kvd.http.requests import UNSUPPORTED, ChatRequest, CompletionRequest
from protocol.errors import InvalidRequest, KvdError
from protocol.messages import Generate
from protocol.types import ChatMessage, Sampling

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields) -> Generate:
    body = json.dumps({"model": "m", "messages": HELLO} | fields).encode()
    (one,) = calls(read(body, ChatRequest))
    return one


def text(**fields) -> list[Generate]:
    body = json.dumps({"model": "m", "prompt": "Hello"} | fields).encode()
    return calls(read(body, CompletionRequest))


def test_a_bare_request_has_openais_defaults():
    assert chat() == Generate(
        id="http",
        model="m",
        messages=[ChatMessage("user", "Hello")],
        sampling=Sampling(temperature=1.0),
    )
    assert text() == [
        Generate(id="http", model="m", prompt="Hello", sampling=Sampling(temperature=1.0))
    ]


def test_every_setting_reaches_the_daemon():
    said = {
        "max_completion_tokens": 5,
        "max_tokens": 99,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 3,
        "stop": ["x", "y"],
        "seed": 42,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.2,
        "logit_bias": {"7": -100},
        "logprobs": True,
        "top_logprobs": 4,
        "top_k": 8,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "stop_token_ids": [3],
        "ignore_eos": True,
        "priority": 9,
        "deadline_s": 30,
        "cache_salt": "me",
    }
    assert chat(**said) == Generate(
        id="http",
        model="m",
        messages=[ChatMessage("user", "Hello")],
        sampling=Sampling(
            temperature=0.5,
            top_p=0.9,
            top_k=8,
            min_p=0.05,
            seed=42,
            logit_bias={7: -100.0},
            repetition_penalty=1.1,
            presence_penalty=0.1,
            frequency_penalty=-0.2,
        ),
        max_tokens=5,
        n=3,
        stop=["x", "y"],
        stop_tokens=[3],
        ignore_eos=True,
        min_tokens=2,
        logprobs=4,
        priority=9,
        deadline_s=30.0,
        prefix_salt="me",
    )


def test_a_null_field_counts_as_absent():
    optional = [f.encode_name for f in msgspec.structs.fields(ChatRequest) if not f.required]
    assert chat(**dict.fromkeys(optional)) == chat()
    optional = [f.encode_name for f in msgspec.structs.fields(CompletionRequest) if not f.required]
    assert text(**dict.fromkeys(optional)) == text()


def test_max_tokens_counts_if_max_completion_tokens_is_absent():
    assert chat(max_tokens=4).max_tokens == 4


def test_messages_in_all_their_forms():
    said = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "audio": None},
        {"role": "user", "content": [{"type": "text", "text": t} for t in "bc"]},
    ]
    assert chat(messages=said).messages == [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "a"),
        ChatMessage("assistant", ""),
        ChatMessage("user", "b\nc"),
    ]


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("a", [{"prompt": "a"}]),
        (["a", "b"], [{"prompt": "a"}, {"prompt": "b"}]),
        ([1, 2], [{"tokens": [1, 2]}]),
        ([[1], [2, 3]], [{"tokens": [1]}, {"tokens": [2, 3]}]),
    ],
    ids=str,
)
def test_prompts_in_all_their_forms(prompt, asked):
    got = [
        {k: v for k in ("prompt", "tokens") if (v := getattr(one, k))}
        for one in text(prompt=prompt)
    ]
    assert asked == got


def test_an_echo_requests_prompt_logprobs_only_if_it_needs_them():
    assert text(echo=True)[0].prompt_logprobs is None
    assert text(echo=True, logprobs=2)[0].prompt_logprobs == 2
    assert text(echo=True, prompt=[1])[0].prompt_logprobs == 0
    assert text(logprobs=2)[0].prompt_logprobs is None


def test_an_echo_without_a_completion_is_possible():
    (one,) = text(echo=True, logprobs=1, max_tokens=0)
    assert (one.max_tokens, one.prompt_logprobs) == (1, 1)


def test_special_values_of_sampling():
    assert chat(top_p=0).sampling == Sampling(temperature=0.0)
    assert chat(top_k=-1).sampling.top_k == 0
    assert chat(seed=-1).sampling.seed == 2**63 - 1
    assert chat(stop="x").stop == ["x"]
    assert chat(stop=[]).stop == []
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=False).logprobs is None


WRONG_CHATS = [
    ({"max_token": 5}, "max_token", "did you mean max_tokens"),
    ({"temperature": 11}, "temperature", "at most 10"),
    ({"temperature": "hot"}, "temperature", "a number"),
    ({"top_p": 1.5}, "top_p", "at most 1"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": 17}, "n", "at most 16"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"stop": [""]}, "stop[0]", "must not be empty"),
    ({"stop": ""}, "stop", "must not be empty"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"logit_bias": {"a": 1}}, "logit_bias", ""),
    ({"logit_bias": {"1": 101}}, "logit_bias", "at most 100"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "at most 20"),
    ({"top_logprobs": 2}, "top_logprobs", "requires logprobs"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "at most max_tokens, 3"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "requires stream"),
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "must be one of"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        "accepts only text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "is missing",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls[0].function",
        "is missing",
    ),
    ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ({"function_call": {"name": "f"}}, "function_call", "use tools"),
]


@pytest.mark.parametrize(("fields", "field", "says"), WRONG_CHATS, ids=lambda v: str(v)[:40])
def test_the_error_for_an_invalid_chat_field_names_it(fields, field, says):
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.detail["field"].startswith(field)
    assert says in caught.value.message
    assert field.rpartition(".")[2].partition("[")[0] in caught.value.message


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": [1] * 1_000_001}, "prompt"),
        ({"prompt": [[1] * 500_001] * 2}, "prompt"),
        ({"prompt": ["a"] * 64, "n": 3}, "n"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_the_error_for_an_invalid_completion_field_names_it(fields, field):
    with pytest.raises(InvalidRequest) as caught:
        text(**fields)
    assert caught.value.detail["field"].startswith(field)


def test_unsupported_fields_are_accepted_with_values_that_have_no_effect():
    fields = {f.encode_name for f in msgspec.structs.fields(ChatRequest)}
    harmless = {k: v for k, (_, values) in UNSUPPORTED.items() for v in values if k in fields}
    assert harmless.keys() >= {"functions", "function_call", "modalities"}
    assert chat(**harmless) == chat()
    assert chat(user="me", metadata={"a": "b"}, store=True, service_tier="auto") == chat()


@pytest.mark.parametrize("field", ["metadata", "user", "prediction"])
def test_ignored_fields_are_not_decoded_into_objects(field):
    nest = b"[" + b"[]," * 30_000 + b"[]]"
    body = b'{"model":"m","messages":[{"role":"user","content":"a"}],"%b":%b}'
    tracemalloc.start()
    try:
        request = read(body % (field.encode(), nest), ChatRequest)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert calls(request) == [chat(messages=[{"role": "user", "content": "a"}])]
    assert most < 3 * len(nest)


@pytest.mark.parametrize("value", [b"1e999", b'"' + b"x" * 1000 + b'"'], ids=["huge", "long"])
def test_unsupported_fields_are_refused_without_decoding_them(value):
    body = b'{"model":"m","messages":[{"role":"user","content":"a"}],"functions":%b}'
    with pytest.raises(InvalidRequest, match="functions is not supported"):
        read(body % value, ChatRequest)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff", b'{"user":"\xff","model":"m"}', b"[" * 100_000, b'"x"'],
    ids=lambda b: repr(b[:20]),
)
def test_an_invalid_body_is_a_typed_error(body):
    with pytest.raises(InvalidRequest):
        read(body, ChatRequest)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
NEEDED = {ChatRequest: {"messages": HELLO}, CompletionRequest: {"prompt": "x"}}
REQUESTS = st.sampled_from(list(NEEDED)).flatmap(
    lambda kind: st.tuples(
        st.just(kind), st.dictionaries(st.sampled_from(kind.__struct_encode_fields__), JSON)
    )
)


@given(REQUESTS)
def test_any_fields_raise_only_typed_errors(found):
    kind, fields = found
    body = json.dumps({"model": "m"} | NEEDED[kind] | fields).encode()
    with contextlib.suppress(KvdError):
        calls(read(body, kind))
