"""The embedded model over HTTP returns the same text as over the socket."""

from __future__ import annotations

import httpx
import pytest

from tests.http.live import Live

PROMPT = "To open a file,"

pytestmark = pytest.mark.mlx


def complete(demo: Live, path: str = "completions", **fields) -> dict:
    body = {"model": "demo", "max_tokens": 12} | fields
    answer = httpx.post(f"{demo.url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_completions(demo: Live, temperature):
    answer = complete(demo, prompt=PROMPT, temperature=temperature, seed=7)
    with demo.client() as kvd:
        same = kvd.generate("demo", PROMPT, max_tokens=12, temperature=temperature, seed=7)
        assert answer["choices"][0]["text"] == same.text
        assert answer["usage"]["completion_tokens"] == same.usage.completion_tokens
    assert answer["kvd"]["level"] == 0
    assert answer["kvd"]["seed"] == 7


def test_chat_with_all_settings(demo: Live):
    settings = {
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {"5": -100},
    }
    answer = complete(
        demo,
        "chat/completions",
        messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": "Hello!"}],
        n=3,
        seed=1,
        logprobs=True,
        top_logprobs=2,
        repetition_penalty=1.1,
        **settings,
    )
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice in answer["choices"]:
        reported = choice["logprobs"]["content"]
        spoken = bytes(b for one in reported for b in one["bytes"]).decode("utf-8", "replace")
        assert spoken == choice["message"]["content"]
        assert all(len(one["top_logprobs"]) == 2 for one in reported)
    with demo.client() as kvd:
        same = kvd.generate(
            "demo",
            messages=[("system", "x"), ("user", "Hello!")],
            max_tokens=12,
            n=3,
            seed=1,
            temperature=1.0,
            repetition_penalty=1.1,
            **settings | {"logit_bias": {5: -100.0}},
        )
        _ = same.text
    assert [c["message"]["content"] for c in answer["choices"]] == [c.text for c in same.choices]


def test_the_echo_scores_a_prompt_for_evaluation_harnesses(demo: Live):
    whole = complete(
        demo, prompt=PROMPT + " call", max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    reported = whole["choices"][0]["logprobs"]
    assert whole["choices"][0]["text"].startswith(PROMPT + " call")
    assert reported["token_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in reported["token_logprobs"][1:])
    spans = zip(reported["tokens"], reported["text_offset"], strict=True)
    text = "".join(reported["tokens"])
    assert all(text[at : at + len(token)] == token for token, at in spans)


def test_a_stop_text_and_tokens_as_the_prompt(demo: Live):
    with demo.client() as kvd:
        greedy = kvd.generate("demo", PROMPT, max_tokens=12).text
    word = greedy.split()[2]
    stopped = complete(demo, prompt=PROMPT, temperature=0, stop=word)["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (greedy[: greedy.index(word)], "stop")
    tokens = complete(demo, prompt=[5, 6, 7], temperature=0, echo=True)["choices"][0]
    assert len(tokens["text"]) > 3
