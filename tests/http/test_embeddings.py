"""``/v1/embeddings`` with the openai package, against real daemons and a scripted one."""

from __future__ import annotations

import base64
import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from kvd.http import embeddings
from protocol.embedding import vector_bytes, vector_of
from protocol.errors import NumericalError
from protocol.messages import Accepted, Done
from protocol.types import Usage
from tests.http.live import Live
from tests.http.stage import fails, hangs, serving, until
from tests.process.helpers import wait_for


@pytest.fixture
def ai(live: Live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_gets_the_vectors_of_the_socket(live: Live, ai: openai.OpenAI):
    answer = ai.embeddings.create(model="fast", input=["Hello", "there"])
    with live.client() as kvd:
        same = [kvd.embed("fast", text) for text in ("Hello", "there")]
    assert [one.embedding for one in answer.data] == same
    assert [one.index for one in answer.data] == [0, 1]
    assert math.isclose(math.hypot(*same[0]), 1.0, rel_tol=1e-6)
    assert (answer.model, answer.object) == ("fast", "list")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (10, 10)


@pytest.mark.parametrize("text", ["Hi", [72, 105], ["Hi"], [[72, 105]]])
def test_texts_and_tokens_in_all_forms(ai: openai.OpenAI, text):
    wanted = ai.embeddings.create(model="fast", input="Hi").data[0].embedding
    (one,) = ai.embeddings.create(model="fast", input=text).data
    assert one.embedding == wanted


def test_float_and_base64_are_the_same_vector(client: httpx.Client):
    def embedding(**fields):
        reply = client.post("/v1/embeddings", json={"model": "fast", "input": "Hi"} | fields)
        assert reply.status_code == 200, reply.text
        return reply.json()["data"][0]["embedding"]

    numbers = embedding()
    assert embedding(encoding_format="float") == numbers
    assert vector_of(base64.b64decode(embedding(encoding_format="base64"))) == pytest.approx(
        numbers, abs=1e-7
    )


def test_dimensions(ai: openai.OpenAI):
    (one,) = ai.embeddings.create(model="fast", input="Hi", dimensions=8).data
    assert len(one.embedding) == 8
    assert math.isclose(math.hypot(*one.embedding), 1.0, rel_tol=1e-6)
    with pytest.raises(openai.BadRequestError, match="dimensions is 33") as wrong:
        ai.embeddings.create(model="fast", input="Hi", dimensions=33)
    assert wrong.value.param == "dimensions"


@pytest.mark.parametrize(
    ("fields", "code", "param", "message"),
    [
        ({"input": ""}, "empty_prompt", "input", "input is empty"),
        ({"input": []}, "empty_prompt", "input", "input is empty"),
        ({"input": ["a", ""]}, "empty_prompt", "input", r"input\[1\] is empty"),
        ({"input": ["a", [1]]}, "invalid_request", "input", "not a mixture"),
        ({"input": ["a"] * 2049}, "invalid_request", "input", "2049 texts; send at most 2048"),
        ({"input": [[300]]}, "invalid_request", "input", "outside the vocabulary"),
        ({"encoding_format": "int8"}, "invalid_request", "encoding_format", "float"),
        ({"dimension": 8}, "invalid_request", "dimension", "did you mean dimensions"),
        ({"input": "x" * 200_000}, "context_length_exceeded", None, "context"),
    ],
)
def test_refused(client: httpx.Client, fields, code: str, param: str | None, message: str):
    reply = client.post("/v1/embeddings", json={"model": "fast", "input": "Hi"} | fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, code, param)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error["message"])


def test_many_texts_are_fewer_calls_at_once(ai: openai.OpenAI):
    """More than the daemon's queue takes at once from one model."""
    texts = [f"text {number}" for number in range(1500)]
    answer = ai.embeddings.create(model="flood", input=texts)
    assert [one.index for one in answer.data] == list(range(1500))
    (last,) = ai.embeddings.create(model="flood", input=texts[-1]).data
    assert answer.data[-1].embedding == last.embedding


def test_embeddings_survive_the_death_of_the_worker(live_alone: Live):
    texts = [f"text {number}" for number in range(200)]
    with httpx.Client(base_url=live_alone.url, timeout=30) as client, ThreadPoolExecutor() as pool:
        body = {"model": "slow", "input": texts}
        first = client.post("/v1/embeddings", json=body).json()
        again = pool.submit(client.post, "/v1/embeddings", json=body)
        wait_for("the worker has requests", lambda: live_alone.running("slow"))
        os.kill(live_alone.model("slow").worker_pid, signal.SIGKILL)
        assert again.result().json() == first
    assert live_alone.model("slow").restarts == 1


def vector(*numbers: float) -> list:
    usage = Usage(prompt_tokens=3, completion_tokens=0, levels=[0])
    accepted = Accepted(id="http", prompt_tokens=3, seed=0)
    return [accepted, Done(id="http", reason="stop", usage=usage, embedding=vector_bytes(numbers))]


async def post(url: str, **fields) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.post(f"{url}/v1/embeddings", json={"model": "m", "input": "a"} | fields)


async def test_one_bad_vector_fails_the_request_and_cancels_the_rest(home):
    bad = fails(NumericalError("not finite"))
    async with serving(home, lambda _: vector(1.0), bad, hangs()) as stage:
        reply = await post(stage.url, input=["a", "b", "c"])
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "numerical_error")
        await stage.backend.settled()


async def test_a_client_that_leaves_cancels_all_calls(home):
    async with serving(home, hangs()) as stage:
        with pytest.raises(httpx.ReadTimeout):
            async with httpx.AsyncClient(timeout=httpx.Timeout(5, read=0.2)) as client:
                await client.post(
                    f"{stage.url}/v1/embeddings", json={"model": "m", "input": ["a"] * 100}
                )
        await until(lambda: len(stage.backend.calls) == embeddings.AT_ONCE)
        await stage.backend.settled()


async def test_vectors_above_the_limit_are_refused(home, monkeypatch):
    monkeypatch.setattr(embeddings, "MOST_BYTES", 100)
    async with serving(home, lambda _: vector(0.6, 0.8)) as stage:
        assert (await post(stage.url)).status_code == 200
        reply = await post(stage.url, input=["a", "b", "c"])
        assert reply.status_code == 400
        assert "send fewer texts at once" in reply.json()["error"]["message"]
