"""Errors below ``/v1/messages`` have Anthropic's form, also those found before the handler."""

from __future__ import annotations

import httpx
import pytest

from kvd.host.home import Home
from kvd.http import errors, keys
from kvd.http.error_forms import encoded
from kvd.http.messages_api.errors import error_of, status_of
from protocol.errors import ContextTooLong, InvalidRequest, KvdError, Overloaded, UnknownModel
from tests.http.stage import serving


def made(error: KvdError) -> tuple[int, dict]:
    refusal = errors.of(error.info())
    return status_of(refusal), error_of(refusal, "req_1")


def test_types_and_statuses():
    status, body = made(InvalidRequest("max_tokens is missing", field="max_tokens"))
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert body["error"]["message"] == "max_tokens is missing"
    assert body["request_id"] == "req_1"
    status, body = made(UnknownModel("no model is named x"))
    assert (status, body["error"]["type"]) == (404, "not_found_error")
    status, body = made(Overloaded("the queue is full"))
    assert (status, body["error"]["type"]) == (529, "overloaded_error")
    assert body["error"]["kvd"] == {"code": "overloaded", "retryable": True}
    status, body = made(KvdError("a bug"))
    assert (status, body["error"]["type"]) == (500, "api_error")


def test_a_long_prompt_has_the_message_that_makes_clients_compact():
    long = ContextTooLong("it does not fit", prompt_tokens=210_000, context_length=200_000)
    _, body = made(long)
    assert body["error"]["message"].startswith(
        "prompt is too long: 210000 tokens > 200000 maximum; it does not fit"
    )
    _, body = made(ContextTooLong("max_tokens can be 5", prompt_tokens=10, context_length=15))
    assert body["error"]["message"] == "max_tokens can be 5"


@pytest.mark.parametrize(
    ("path", "anthropic"),
    [("/v1/messages", True), ("/v1/messages/x", True), ("/v1/messagesx", False), ("/v1", False)],
)
def test_the_form_depends_on_the_path(path, anthropic):
    _, body = encoded(errors.plain(404, "nothing is here"), path, "req_1")
    assert (b'"request_id":"req_1"' in body) == anthropic


async def test_errors_before_the_handler_have_the_form_too(home: Home):
    key = keys.make()
    async with serving(home, keys={"laptop": keys.hashed(key)}) as stage:
        url = f"{stage.url}/v1/messages/nope"
        async with httpx.AsyncClient() as client:
            unknown = await client.post(url, headers={"x-api-key": "sk-ant-x"})
            assert unknown.status_code == 401
            assert unknown.json()["error"]["type"] == "authentication_error"
            assert unknown.json()["request_id"] == unknown.headers["request-id"]
            foreign = await client.post(url, headers={"x-api-key": key, "Host": "evil.example"})
            assert foreign.status_code == 403
            assert foreign.json()["error"]["type"] == "permission_error"
            missing = await client.post(url, headers={"x-api-key": key})
            assert missing.status_code == 404
            assert missing.json()["error"]["type"] == "not_found_error"
