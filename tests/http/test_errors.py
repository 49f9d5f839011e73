"""Errors have OpenAI's statuses and form, over a scripted daemon."""

from __future__ import annotations

import json

import httpx
import pytest
from structlog.testing import capture_logs

from kvd.host.home import Home
from protocol import errors
from tests.http.calls import BEGUN, CHAT, get, post, word
from tests.http.stage import fails, hangs, says, serving

ANSWERED = [
    (errors.InvalidRequest("bad", field="stop[0]"), 400, "invalid_request", None),
    (errors.ContextTooLong("long"), 400, "context_length_exceeded", None),
    (errors.UnknownModel("nope"), 404, "model_not_found", None),
    (errors.Overloaded("full", retry_after_s=2.5), 429, "rate_limit_exceeded", "3"),
    (errors.Overloaded("full"), 429, "rate_limit_exceeded", "1"),
    (errors.Draining("ends"), 503, "draining", "5"),
    (errors.WorkerDied("died"), 503, "worker_died", "1"),
    (errors.ModelFailed("failed"), 503, "model_failed", None),
    (errors.InsufficientMemory("big"), 503, "insufficient_memory", None),
    (errors.DeadlineExceeded("late"), 504, "deadline_exceeded", None),
    (errors.Quarantined("poison", story=["a"]), 500, "quarantined", None),
    (errors.NumericalError("nan"), 500, "numerical_error", None),
    (errors.InvalidModel("broken"), 500, "invalid_model", None),
    (errors.InternalError("bug"), 500, "internal", None),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_every_error_before_the_first_token_has_its_status(home: Home, stream):
    scripts = [fails(error) for error, *_ in ANSWERED]
    async with serving(home, *scripts) as it:
        for error, status, code, retry_after in ANSWERED:
            answer = await post(it.url, CHAT | {"stream": stream})
            said = answer.json()["error"]
            assert (answer.status_code, said["code"]) == (status, code)
            assert (said["message"], said["kvd"]["code"]) == (error.message, error.code)
            assert answer.headers.get("Retry-After") == retry_after
            assert answer.headers["x-should-retry"] in {"true", "false"}
            assert answer.headers["x-request-id"].startswith("req_")
        assert (await post(it.url)).json()["error"]["param"] is None
        await it.backend.settled()


async def test_the_field_of_an_error_becomes_param(home: Home):
    async with serving(home, fails(errors.InvalidRequest("bad", field="stop[0]"))) as it:
        assert (await post(it.url)).json()["error"]["param"] == "stop[0]"
        wrong = await post(it.url, CHAT | {"temperature": -1})
        assert wrong.json()["error"]["param"] == "temperature"
        missing = await post(it.url, {"model": "m"})
        assert missing.json()["error"]["param"] == "messages"
    assert len(it.backend.calls) == 1


@pytest.mark.parametrize(
    ("field", "said", "param", "reported"),
    [
        ("tokens", "token 9 at 0 is", "prompt", "token 9 at 0 is"),
        ("stop_tokens", "stop_tokens names token 9", "stop_token_ids", "stop_token_ids names"),
        ("sampling.logit_bias", "sampling.logit_bias names", "logit_bias", "logit_bias names"),
        ("chat.tools[2]", "chat.tools[2] has", "tools[2]", "tools[2] has"),
        ("grammar", "grammar is too large", "response_format", "response_format is too large"),
    ],
)
async def test_errors_of_workers_name_fields_of_http(home: Home, field, said, param, reported):
    async with serving(home, fails(errors.InvalidRequest(said, field=field))) as it:
        error = (await post(it.url)).json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(reported)


async def test_an_error_in_the_middle_of_a_stream_ends_it(home: Home):
    script = fails(errors.WorkerDied("died"), BEGUN, word())
    async with serving(home, script) as it:
        answer = await post(it.url, CHAT | {"stream": True})
        assert answer.status_code == 200
        lines = [line for line in answer.text.split("\n\n") if line.startswith("data: ")]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "worker_died"
        assert "[DONE]" not in answer.text
        await it.backend.settled()


async def test_unknown_paths_and_methods(home: Home):
    async with serving(home) as it:
        missing = await get(it.url, "/v1/rerank")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        wrong = await get(it.url, "/v1/chat/completions")
        assert (wrong.status_code, wrong.headers["Allow"]) == (405, "POST")
        assert wrong.json()["error"]["code"] == "method_not_allowed"
        assert "supports POST" in wrong.json()["error"]["message"]
        lost = await get(it.url, "/chat/completions")
        assert "did you mean /v1/chat/completions?" in lost.json()["error"]["message"]


async def test_a_bug_in_the_daemon_is_an_answer_and_a_line_in_the_log(home: Home):
    def breaks(_):
        raise RuntimeError("secret of the implementation")

    async with serving(home, breaks, says("ok")) as it:
        with capture_logs() as logs:
            answer = await post(it.url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
        assert "secret" not in answer.text
        assert [one["request"] for one in logs if one["log_level"] == "error"] == [
            answer.headers["x-request-id"]
        ]
        assert (await post(it.url)).status_code == 200


async def test_a_bug_in_the_middle_of_a_stream_ends_its_connection(home: Home, monkeypatch):
    def breaks(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr("kvd.http.streamed_answer.comment", breaks)
    monkeypatch.setattr("kvd.http.completion.KEEPALIVE_S", 0.05)
    async with serving(home, hangs(word())) as it:
        with capture_logs() as logs, pytest.raises(httpx.RemoteProtocolError):
            await post(it.url, CHAT | {"stream": True})
        assert [one["event"] for one in logs if one["log_level"] == "error"] == [
            "request handler failed"
        ]
        await it.backend.settled()
