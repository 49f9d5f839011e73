"""Fields that kvd does not have: those of routers are ignored and counted, typos are refused."""

from __future__ import annotations

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.http import unknown_fields as fields_module
from kvd.http.messages_api.requests import MessagesRequest
from kvd.http.reading import decode
from kvd.http.requests import ChatRequest, CompletionRequest
from kvd.http.responses_api.requests import ResponsesRequest
from kvd.http.tokenizing import TokenizeRequest
from kvd.http.unknown_fields import MOST_NAMES, OTHER_NAMES, UnknownFields, unknown_fields
from protocol.errors import InvalidRequest
from tests.http.live import Live, asked

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "m", "prompt": "Hi"}

_NAMES = """
    litellm_session_id litellm_trace_id litellm_metadata litellm_call_id proxy_server_request
    extra_body extra_headers mock_response num_retries timeout api_base caching drop_params
    no_stop_trim regex ebnf stop_regex lora_path session_params rid return_hidden_states
    separate_reasoning stream_reasoning skip_special_tokens spaces_between_special_tokens
    best_of_n length_penalty truncate_prompt_tokens prompt_logprobs allowed_token_ids bad_words
    guided_decoding_backend request_id kv_transfer_params vllm_xargs documents chat_template
    add_generation_prompt continue_final_message return_tokens_as_token_ids mm_processor_kwargs
    cache_prompt id_slot n_probs mirostat typical_p top_a top_n_sigma tfs_z samplers repeat_last_n
    timings_per_token return_progress grammar json_schema dry_multiplier xtc_probability
    models transforms route provider plugins usage session_id trace fallbacks tags ttl draft_model
    thinking reasoning_split enable_search search_parameters safe_prompt random_seed
    num_ctx keep_recent context_length options format preset logit_processors custom_llm_provider
"""
FROM_ROUTERS = _NAMES.split()
"""Names that routers, SDKs and clients of other servers send."""


def read(body: dict[str, object], kind: type = ChatRequest) -> list[str]:
    """Decode a body and return the ignored names."""
    ignored: list[str] = []
    decode(json.dumps(body).encode(), kind, ignored.extend)
    return ignored


@pytest.mark.parametrize(("base", "kind"), [(CHAT, ChatRequest), (TEXT, CompletionRequest)])
def test_what_routers_add_is_ignored(base, kind):
    assert read(base | {name: {"a": 1} for name in FROM_ROUTERS}, kind) == FROM_ROUTERS


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("max_tokns", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("tempertaure", "temperature"),
        ("Temperature", "temperature"),
        ("topP", "top_p"),
        ("top-k", "top_k"),
        ("steam", "stream"),
        ("logitbias", "logit_bias"),
        ("tool_choices", "tool_choice"),
        ("reponse_format", "response_format"),
        ("stop_token_id", "stop_token_ids"),
        ("frequencey_penalty", "frequency_penalty"),
        *OTHER_NAMES.items(),
    ],
)
def test_a_typo_is_refused_with_a_hint(name, meant):
    with pytest.raises(
        InvalidRequest, match=f"{name} is an unknown key; did you mean {meant}"
    ) as it:
        read(CHAT | {name: 1, "of_the_future": 1})
    assert it.value.detail["field"] == name


def test_a_field_that_is_given_is_not_meant():
    both = {"model": "m", "models": ["m", "n"], "max_tokens": 5, "max_token": 5, "n_predict": 5}
    assert read(CHAT | both) == ["models", "max_token", "n_predict"]


def test_the_names_of_a_struct_are_found_once(monkeypatch):
    """msgspec takes 0.6 ms to find them, which every request would wait for."""
    unknown_fields(b"{}", ChatRequest)
    monkeypatch.setattr(fields_module, "fields", lambda _kind: pytest.fail("found again"))
    assert unknown_fields(b'{"x_router": 1}', ChatRequest) == ["x_router"]


@given(st.text("abc", max_size=7), st.text("abc", max_size=7), st.integers(0, 3))
def test_a_search_for_few_edits_finds_them_if_there_are_few(first, second, limit):
    found, all_of_them = (fields_module._edits(first, second, most) for most in (limit, 99))
    assert found == all_of_them if all_of_them <= limit else found > limit


def test_a_long_name_is_no_typo():
    name = "k" * 8_000_000
    assert read(CHAT | {name: 1}) == [name]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"model": "m", "input": "Hi", "temprature": 1}, ResponsesRequest),
        (CHAT | {"max_tokens": 1, "temprature": 1}, MessagesRequest),
    ],
)
def test_the_apis_of_agents_refuse_no_typos(body, kind):
    assert read(body, kind) == ["temprature"]


def test_a_typo_of_a_tokenize_request_is_refused():
    with pytest.raises(InvalidRequest, match="did you mean return_token_strs"):
        read({"model": "m", "prompt": "x", "return_token_str": True}, TokenizeRequest)


def test_options_of_streams_may_have_more():
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert read(CHAT | {"stream": True, "stream_options": options}) == []


def test_each_name_is_recorded_once_and_their_number_is_limited():
    counts: list[int] = []
    records: list[str] = []
    fields = UnknownFields(lambda _path, _what, count: counts.append(count), records.append)
    for _ in range(2):
        fields.at("/a")(["x", "y"])
    fields.at("/b")(["x", "\x1b" * 1000])
    assert (counts, len(records)) == ([2, 2, 2], 4)
    assert records[0] == "/a: kvd has no field x; it is ignored"
    assert "\x1b" not in records[3]
    assert len(records[3]) < 500
    fields.at("/c")([f"name{number}" for number in range(10 * MOST_NAMES)])
    assert len(records) == MOST_NAMES
    assert counts[-1] == 10 * MOST_NAMES


def ignored(client: httpx.Client, path: str) -> float:
    line = f'kvd_http_ignored_total{{path="{path}",what="field"}} '
    lines = client.get("/metrics").text.splitlines()
    return sum(float(one.removeprefix(line)) for one in lines if one.startswith(line))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", asked(max_tokens=1)),
        ("/v1/completions", {"model": "fast", "prompt": "Hi", "max_tokens": 1}),
        ("/v1/responses", {"model": "fast", "input": "Hi", "max_output_tokens": 1}),
        ("/v1/messages", asked(max_tokens=1)),
        ("/v1/embeddings", {"model": "fast", "input": "Hi"}),
        ("/v1/tokenize", {"model": "fast", "prompt": "Hi"}),
        ("/api/chat", asked(stream=False, options={"num_predict": 1})),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_api_counts_and_records_them(live: Live, client: httpx.Client, path, body):
    before = ignored(client, path)
    answer = client.post(path, json=body | {"no_stop_trim": False, "of_a_router": 1})
    assert answer.status_code == 200, answer.text
    assert ignored(client, path) == before + 2
    with live.client() as kvd:
        reasons = [one.reason for one in kvd.events() if one.kind == "ignored_field"]
    assert reasons.count(f"{path}: kvd has no field no_stop_trim; it is ignored") == 1


def test_a_field_that_is_given_as_null_is_meant_by_a_typo() -> None:
    with pytest.raises(InvalidRequest, match="did you mean max_tokens"):
        read(CHAT | {"max_tokens": None, "max_output_tokens": 9})
    assert read(CHAT | {"max_tokens": 9, "max_output_tokens": 9}) == ["max_output_tokens"]
