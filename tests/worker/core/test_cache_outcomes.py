"""What the engine reports about its prefix cache for each prompt, with the embedded model."""

from __future__ import annotations

import pytest

from kvd.worker.core import submissions
from protocol.cache_outcome import CacheOutcome, CachePart, PromptPlace
from protocol.resume import ChoiceProgress
from protocol.tools import ChatOptions, Tool
from protocol.types import ChatMessage, Sampling
from protocol.worker import StartLevel, Submit
from tests.worker.core.driver import Driver, Outcome
from tests.worker.core.prompts import prompt_of

pytestmark = pytest.mark.mlx

WORDS = "the old fox ran over the hill and found a quiet village near the river "
TOOLS = [Tool(name=name, description=WORDS, parameters={"type": "object"}) for name in "abc"]
SESSION = [
    ChatMessage("system", "You are an agent. " + WORDS),
    ChatMessage("user", WORDS * 3),
    ChatMessage("assistant", WORDS * 8),
    ChatMessage("user", WORDS * 8),
    ChatMessage("assistant", WORDS * 8),
    ChatMessage("user", "go on"),
]


def found(driver: Driver, rid: str, **more) -> CacheOutcome:
    driver.outcomes[rid] = Outcome()
    driver.found.pop(rid, None)
    driver.engine.submit(Submit(rid=rid, sampling=Sampling(seed=0), max_tokens=2, **more))
    driver.run()
    outcome = driver.found[rid]
    assert outcome.reused_tokens == driver.outcomes[rid].cached
    return outcome


def parts(outcome: CacheOutcome) -> list[tuple[str, int]]:
    return [(part.reason, part.tokens) for part in outcome.parts]


def test_prompts_of_tokens(demo: Driver) -> None:
    prompt = prompt_of(600, 8301)  # no other test of this process uses it
    assert parts(found(demo, "a", tokens=prompt)) == [("empty", 600)]
    assert parts(found(demo, "b", tokens=prompt)) == [("memory", 512), ("end", 88)]
    other = [*prompt[:300], (prompt[300] + 1) % 4000, *prompt[301:]]
    differs = found(demo, "c", tokens=other)
    # The first prompt has a checkpoint only at its end; this one leaves one where it diverges.
    assert parts(differs) == [("between", 300), ("differs", 300)]
    text = demo.engine._text
    difference = differs.difference
    assert difference is not None
    assert (difference.token, difference.place) == (300, None)
    assert difference.here == text.excerpt(other[300:316])[:40]
    assert difference.cached == text.excerpt(prompt[300:316])[:40]
    assert difference.before == text.excerpt(prompt[284:300])[-40:]

    assert parts(found(demo, "d", tokens=prompt, prefix_salt="s")) == [("empty", 600)]
    assert parts(found(demo, "e", tokens=prompt, prompt_logprobs=0)) == [("scored", 600)]
    demo.engine.start_level(StartLevel(level=1))
    try:
        assert parts(found(demo, "f", tokens=prompt)) == [("lowered", 600)]
    finally:
        demo.engine.start_level(StartLevel(level=0))

    demo.reclaim("prefixes", 1 << 40)
    evicted = found(demo, "g", tokens=prompt)
    assert parts(evicted) == [("evicted", 512), ("end", 88)]
    assert evicted.eviction is not None
    assert evicted.eviction.cause == "reclaim"


def test_the_message_of_a_conversation(demo: Driver) -> None:
    """The first prompt is prefilled once; of the others, only what differs."""

    def place(rid: str, messages: list[ChatMessage], tools: list[Tool]) -> PromptPlace | None:
        outcome = found(demo, rid, messages=messages, chat=ChatOptions(tools=tools))
        assert outcome.difference is not None
        assert outcome.parts[-1] == CachePart(
            "differs", outcome.prompt_tokens - outcome.difference.token
        )
        return outcome.difference.place

    found(demo, "a", messages=SESSION, chat=ChatOptions(tools=TOOLS))
    for number in (1, 4):
        edit = ChatMessage(SESSION[number - 1].role, "Now " + SESSION[number - 1].content)
        changed = [*SESSION[: number - 1], edit, *SESSION[number:]]
        wanted = PromptPlace("message", number, len(SESSION), edit.role)
        assert place(f"m{number}", changed, TOOLS) == wanted
    tools = [TOOLS[0], Tool(name="b", description="other", parameters={}), TOOLS[2]]
    assert place("t", SESSION, tools) == PromptPlace("tools", 2, 3)


def test_a_request_that_another_worker_had_is_not_reported(demo: Driver) -> None:
    demo.submit("a", prompt_of(300, 4), max_tokens=3, resume=[ChoiceProgress([5], 0)])
    demo.outcomes["a"].tokens.append(5)
    demo.run()
    assert demo.outcomes["a"].reason == "length"
    assert "a" not in demo.found


def test_excerpts_show_special_tokens_and_characters(demo: Driver) -> None:
    text = demo.engine._text
    prompt = Submit(rid="r", prompt="a<|im_end|> b\u00e9", sampling=Sampling(seed=0))
    tokens = text.encode(prompt)
    assert text.excerpt(tokens) == "a<|im_end|> b\u00e9"
    assert text.excerpt(tokens[:-1]).startswith("a<|im_end|> b")


@pytest.mark.parametrize("content", ["x" * 90, ""])
def test_conversations_of_a_long_queue_are_not_kept(
    demo: Driver, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr(submissions, "MAX_KEPT_CHARACTERS", 800)
    for rid in "ab":
        demo.outcomes[rid] = Outcome()
        messages = [ChatMessage("user", "x"), *[ChatMessage("assistant", content)] * 2]
        demo.engine.submit(
            Submit(rid=rid, messages=messages, max_tokens=1, sampling=Sampling(seed=0))
        )
    kept = [one.conversation is not None for one in demo.engine._batch.requests.values()]
    assert kept == [True, False]
    demo.run()
