"""Answers from the daemon's events, in one piece and as a stream, without a server."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from msgspec.structs import replace

from kvd.http.answer import Head, Wanted
from kvd.http.formats import ChatFormat, TextFormat
from kvd.http.streamed_answer import StreamedAnswer
from kvd.http.whole_answer import WholeAnswer
from protocol import messages as m
from protocol.errors import InvalidRequest
from protocol.types import Alternative, TokenLogprob, Usage

CHAT = Head("1", 1700000000, "m", ChatFormat())
TEXT = Head("1", 1700000000, "m", TextFormat())
HALF = TokenLogprob(5, "\ufffd", -0.5, bytes=[0xC3], top=[Alternative(6, "b", -1.0)])
OTHER_HALF = TokenLogprob(6, "\ufffd", -0.25, bytes=[0xA9])


def asked(*prompts: str, n: int = 1, logprobs: int | None = None, **more) -> Wanted:
    calls = [
        m.Generate(id="http", model="m", prompt=prompt, n=n, logprobs=logprobs)
        for prompt in prompts or ("Hi",)
    ]
    return Wanted(calls, n, **more)


def accepted(seed: int = 7) -> m.Accepted:
    return m.Accepted(id="http", prompt_tokens=3, seed=seed)


def said(text: str, choice: int = 0, logprobs=None) -> m.Tokens:
    return m.Tokens(id="http", index=0, tokens=[1], text=text, choice=choice, logprobs=logprobs)


def finished(choice: int, reason: m.FinishReason) -> m.ChoiceFinished:
    return m.ChoiceFinished(id="http", choice=choice, reason=reason)


def done(reason: m.FinishReason = "stop", **usage) -> m.Done:
    took = Usage(**{"prompt_tokens": 3, "completion_tokens": 2} | usage)
    return m.Done(id="http", reason=reason, usage=took)


def whole(head: Head, of: Wanted, *events) -> dict:
    answer = WholeAnswer(head, of, 0.0)
    for number, at, event in timed(events):
        assert not answer.stats.over
        answer.handle(number, event, at)
    assert answer.stats.over
    return json.loads(answer.body())


def chunks(head: Head, of: Wanted, *events) -> list[dict]:
    answer = StreamedAnswer(head, of, 0.0)
    out = b"".join(answer.handle(number, event, at) for number, at, event in timed(events))
    blocks = out.decode().split("\n\n")
    assert blocks.pop() == ""
    lines = [block for block in blocks if not block.startswith(":")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def timed(events):
    """Yield the call, time and event, one per second. An event without a call belongs to call 0."""
    for at, event in enumerate(events):
        number, it = event if isinstance(event, tuple) else (0, event)
        yield number, float(at), it


def test_a_whole_chat():
    answer = whole(CHAT, asked(), accepted(), said("Hel"), said("lo"), done("length"))
    assert answer == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "m",
        "system_fingerprint": "kvd-0.1.0",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "kvd": {"seed": 7, "queued_ms": 0},
    }


def test_a_streamed_chat():
    got = chunks(CHAT, asked(), accepted(), said("Hel"), said(""), said("lo"), done())
    assert {chunk["object"] for chunk in got} == {"chat.completion.chunk"}
    assert [chunk["choices"][0]["delta"] for chunk in got] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in got] == [None, None, None, "stop"]
    assert "usage" not in got[0]
    assert [("kvd" in chunk) for chunk in got] == [False, False, False, True]


def test_usage_comes_last_if_asked_for():
    got = chunks(CHAT, asked(include_usage=True), accepted(), said("a"), done(cached_tokens=2))
    assert [chunk["usage"] for chunk in got[:-1]] == [None, None, None]
    assert got[-1]["choices"] == []
    assert got[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert got[-1]["kvd"] == got[-2]["kvd"]


def test_the_field_kvd_has_levels_times_and_pauses():
    paused, resumed = m.Paused(id="http", reason="memory"), m.Resumed(id="http")
    events = [m.Queued(id="http", position=2), accepted(), said("a"), paused, resumed, said("b")]
    answer = whole(CHAT, asked(), *events, paused, done(levels=[0, 2]))
    assert answer["kvd"] == {
        "seed": 7,
        "level": 2,
        "levels": [0, 2],
        "queued_ms": 1000,
        "paused_ms": 2000,
        "resumed": 1,
    }


def test_the_field_kvd_says_what_was_not_enforced():
    ended = replace(done(), notes=["the grammar of the tool t is not enforced"])
    answer = whole(CHAT, asked(), accepted(), said("a"), ended)
    assert answer["kvd"]["notes"] == ["the grammar of the tool t is not enforced"]
    assert "notes" not in whole(CHAT, asked(), accepted(), said("a"), done())["kvd"]


def test_several_choices_have_separate_texts_and_ends():
    events = [accepted(), said("a"), said("x", 1), finished(1, "length"), said("b")]
    events += [finished(0, "stop"), done("length", completion_tokens=5)]
    answer = whole(CHAT, asked(n=2), *events)
    got = [(c["message"]["content"], c["finish_reason"]) for c in answer["choices"]]
    assert got == [("ab", "stop"), ("x", "length")]

    streamed = chunks(CHAT, asked(n=2), *events)
    texts, ends = ["", ""], {}
    for chunk in streamed:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
            if choice["finish_reason"]:
                ends[choice["index"]] = choice["finish_reason"]
    assert (texts, ends) == (["ab", "x"], {0: "stop", 1: "length"})
    assert [i for i, chunk in enumerate(streamed) if "kvd" in chunk] == [len(streamed) - 1]


def test_several_prompts_are_counted_together():
    first = [accepted(), said("a"), done(levels=[0])]
    second = [(1, accepted()), (1, said("b")), (1, done("length", levels=[1]))]
    answer = whole(TEXT, asked("x", "y"), second[0], *first, *second[1:])
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "a"), (1, "b")]
    assert answer["usage"]["total_tokens"] == 10
    assert "seed" not in answer["kvd"]
    assert answer["kvd"]["level"] == 1

    streamed = chunks(TEXT, asked("x", "y"), second[0], *first, *second[1:])
    assert [c["choices"][0]["text"] for c in streamed] == ["a", "", "b", ""]
    assert [("kvd" in chunk) for chunk in streamed] == [False, False, False, True]


def test_a_choice_without_text_still_has_a_first_chunk():
    got = chunks(CHAT, asked(), accepted(), done())
    assert [chunk["choices"][0]["delta"] for chunk in got] == [
        {"role": "assistant", "content": ""},
        {},
    ]
    assert whole(CHAT, asked(), accepted(), done())["choices"][0]["message"]["content"] == ""


def test_logprobs_of_a_chat_have_the_bytes_of_half_characters():
    events = [accepted(), said("", logprobs=[HALF]), said("\xe9", logprobs=[OTHER_HALF]), done()]
    reported = whole(CHAT, asked(logprobs=1), *events)["choices"][0]["logprobs"]["content"]
    assert reported[0] == {
        "token": "\ufffd",
        "logprob": -0.5,
        "bytes": [0xC3],
        "top_logprobs": [{"token": "b", "logprob": -1.0, "bytes": [98]}],
    }
    assert bytes(b for one in reported for b in one["bytes"]).decode() == "\xe9"

    streamed = chunks(CHAT, asked(logprobs=1), *events)
    pieces = [c["choices"][0]["logprobs"] for c in streamed if c["choices"][0]["logprobs"]]
    assert [one for piece in pieces for one in piece["content"]] == reported


@pytest.mark.parametrize("logprobs", [None, 1])
def test_an_echo_is_the_prompt_before_the_completion(logprobs):
    prompt = [TokenLogprob(1, "He"), TokenLogprob(2, "y", -0.1, top=[Alternative(3, "i", -0.2)])]
    one = TokenLogprob(4, " you", -0.3)
    events = [accepted(), m.PromptLogprobs(id="http", index=0, logprobs=prompt)]
    events += [said(" you", logprobs=None if logprobs is None else [one]), done()]
    of = asked("Hey", logprobs=logprobs, echo=True)
    (choice,) = whole(TEXT, of, *events)["choices"]
    assert choice["text"] == "Hey you"
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        assert choice["logprobs"] == {
            "tokens": ["He", "y", " you"],
            "token_logprobs": [None, -0.1, -0.3],
            "top_logprobs": [None, {"i": -0.2}, {}],
            "text_offset": [0, 2, 3],
        }

    streamed = [c["choices"][0] for c in chunks(TEXT, of, *events)]
    assert "".join(c["text"] for c in streamed) == "Hey you"
    if logprobs is not None:
        offsets = [o for c in streamed if c["logprobs"] for o in c["logprobs"]["text_offset"]]
        assert offsets == [0, 2, 3]


def test_an_echo_of_tokens_is_their_text():
    call = m.Generate(id="http", model="m", tokens=[5, 6], prompt_logprobs=0)
    of = Wanted([call], 1, echo=True)
    reported = m.PromptLogprobs(id="http", index=0, logprobs=[HALF, OTHER_HALF])
    (choice,) = whole(TEXT, of, accepted(), reported, said("!"), done())["choices"]
    assert (choice["text"], choice["logprobs"]) == ("\xe9!", None)


def test_several_pieces_of_an_echo_are_joined_in_order():
    reported = [
        TokenLogprob(number, text, -0.5) for number, text in enumerate(["a", "bc", "d", "ef"])
    ]
    prompt = [m.PromptLogprobs(id="http", index=i, logprobs=[reported[i]]) for i in (0, 1)]
    spoken = [said(reported[i].text, choice, [reported[i]]) for i in (2, 3) for choice in (0, 1)]
    of = asked("abc", n=2, logprobs=0, echo=True)
    for choice in whole(TEXT, of, accepted(), *prompt, *spoken, done())["choices"]:
        assert choice["text"] == "abcdef"
        assert choice["logprobs"] == {
            "tokens": ["a", "bc", "d", "ef"],
            "token_logprobs": [-0.5] * 4,
            "top_logprobs": [{}] * 4,
            "text_offset": [0, 1, 3, 4],
        }


def test_a_request_for_the_prompt_alone_returns_no_completion():
    prompt = [TokenLogprob(1, "He"), TokenLogprob(2, "y", -0.1)]
    events = [accepted(), m.PromptLogprobs(id="http", index=0, logprobs=prompt)]
    events += [said("!", logprobs=[TokenLogprob(3, "!", -0.2)]), done(completion_tokens=1)]
    of = asked("Hey", logprobs=0, echo=True, prompt_only=True, include_usage=True)
    answer = whole(TEXT, of, *events)
    streamed = chunks(TEXT, of, *events)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hey", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.1]
    assert "".join(c["text"] for chunk in streamed for c in chunk["choices"]) == "Hey"
    assert streamed[0]["choices"][0]["logprobs"] == choice["logprobs"]
    for usage in (answer["usage"], streamed[-1]["usage"]):
        assert (usage["completion_tokens"], usage["total_tokens"]) == (0, 3)


def test_an_answer_of_no_tokens_has_empty_logprobs():
    (choice,) = whole(CHAT, asked(logprobs=1), accepted(), done())["choices"]
    assert choice["logprobs"] == {"content": [], "refusal": None}


@pytest.mark.parametrize("head", [CHAT, TEXT], ids=["chat", "text"])
def test_logprobs_are_kept_only_as_bytes(head):
    answer = WholeAnswer(head, asked(logprobs=20), 0.0)
    tracemalloc.start()
    try:
        for number in range(1000):
            top = [Alternative(i, f"t{number}{i}", -float(i)) for i in range(20)]
            answer.handle(0, said("a", logprobs=[TokenLogprob(1, "a", -0.1, top=top)]), 0.0)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    answer.handle(0, done(), 0.0)
    assert held < 1.5 * len(answer.body())


@pytest.mark.parametrize(
    ("of", "events"),
    [
        (asked(logprobs=1), [said("a", logprobs=[HALF])] * 40),
        (asked(), [said("a" * 100)] * 20),
        (asked("a" * 400, n=3, echo=True), []),
        (
            asked("a", n=8, logprobs=1, echo=True),
            [m.PromptLogprobs(id="http", index=0, logprobs=[HALF] * 10)],
        ),
    ],
    ids=["logprobs", "text", "echo", "echoed logprobs"],
)
def test_an_answer_in_one_piece_is_bounded(monkeypatch, of, events):
    monkeypatch.setattr("kvd.http.whole_answer.MOST_BYTES", 1000)
    with pytest.raises(InvalidRequest, match="request a stream") as caught:
        whole(TEXT, of, accepted(), *events, done())
    assert caught.value.detail["field"] == "stream"


def test_comments_in_a_stream_show_why_it_waits():
    answer = StreamedAnswer(CHAT, asked(), 0.0)
    assert answer.handle(0, m.Queued(id="http", position=3), 0) == b": queued, position 3\n\n"
    assert answer.handle(0, m.Paused(id="http", reason="restart"), 0) == b": paused, restart\n\n"
    assert answer.handle(0, m.Resumed(id="http"), 0) == b": resumed\n\n"
