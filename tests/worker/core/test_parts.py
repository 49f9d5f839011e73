"""Parts of answers in the engine: marks, limits of reasoning, and their replay."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from kvd.worker.answer.forms import AnswerForms, Marker, ReasoningForm
from kvd.worker.grammar.matcher import Matcher
from kvd.worker.text.splitting import Splitting
from protocol.parts import PartStart
from protocol.tools import ChatOptions, Grammar
from protocol.types import ChatMessage, Sampling
from protocol.worker import RowTokens, Submit
from tests.worker.core.driver import Driver, Outcome
from tests.worker.core.test_replay import reports_of
from tests.worker.process.received import Received

pytestmark = pytest.mark.mlx

END = "##x"
STRICT = Sampling(temperature=1.0, seed=8, repetition_penalty=1.3, presence_penalty=0.5)


@pytest.fixture
def reasoning(demo: Driver) -> Iterator[Driver]:
    """The engine of a model whose prompt begins its reasoning, which it does not end itself."""
    text = demo.engine._text
    before, forms = text.split, AnswerForms(ReasoningForm(Marker("<think>"), Marker(END)))
    text.split = Splitting(text._tokenizer, forms)
    try:
        yield demo
    finally:
        text.split = before


def asked(rid: str, sampling: Sampling, **fields: object) -> Submit:
    return Submit(
        rid=rid,
        messages=[ChatMessage("user", "Tell me a story.")],
        sampling=sampling,
        chat=ChatOptions(max_reasoning_tokens=5, reasoning=True),
        ignore_eos=True,
        **{"max_tokens": 16, **fields},
    )


def received(driver: Driver, *requests: Submit) -> list[Received]:
    found = {one.rid: Received(one) for one in requests}
    for report in reports_of(driver, requests):
        found[report.rid].add(report)
    return list(found.values())


def test_reasoning_ends_after_its_limit(reasoning: Driver) -> None:
    end = reasoning.engine._text._tokenizer.encode(END, add_special_tokens=False)
    plain = asked("a", Sampling(seed=0))
    scored = asked("b", STRICT, n=2, logprobs=1)
    for one in received(reasoning, plain, scored):
        for tokens, text, parts in zip(one.tokens, one.texts, one.parts, strict=True):
            assert tokens[5 : 5 + len(end)] == end
            assert len(tokens) == 16
            assert END not in text
            assert [part.kind for part in parts] == ["reasoning", "text"]
        assert one.end[1].reasoning_tokens == one.submit.n * (5 + len(end))
        assert all(len(logprobs) in (0, 16) for logprobs in one.logprobs)


def test_an_answer_may_be_full_before_the_reasoning_is_ended(reasoning: Driver) -> None:
    [one] = received(reasoning, asked("a", Sampling(seed=0), max_tokens=6))
    assert len(one.tokens[0]) == 6
    assert one.end[0] == "length"
    assert one.parts == [[PartStart(0, "reasoning")]]


def test_forced_tokens_that_fill_an_answer_wait_for_its_grammar(
    reasoning: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread may advance the matcher, which then cannot tell whether the answer is complete."""
    size = 5 + len(reasoning.engine._text._tokenizer.encode(END, add_special_tokens=False))
    plain, lent = Matcher.complete.fget, list[bool]()

    def complete(matcher: Matcher) -> bool:
        lent.append(matcher.lent)
        return plain(matcher)

    def submit() -> None:
        reasoning.outcomes["a"] = Outcome()
        request = asked("a", STRICT, grammar=Grammar("regex", "[a-z ]*"), max_tokens=size)
        reasoning.engine.submit(request)
        reasoning.run(until=lambda: "a" in reasoning.engine._batch.requests)

    submit()
    reasoning.run()
    wanted = reasoning.outcomes.pop("a")
    monkeypatch.setattr(Matcher, "complete", property(complete))
    submit()
    while reasoning.engine.has_work:
        reasoning.engine._batch.finish_step()  # as before a prompt's pass
        reasoning.step()
    assert reasoning.outcomes["a"] == wanted
    assert lent
    assert not any(lent)


def test_forced_tokens_are_the_same_after_a_replay_at_any_token(reasoning: Driver) -> None:
    request = asked("a", STRICT, logprobs=1)
    reports = reports_of(reasoning, [request])
    right = Received(request)
    for report in reports:
        right.add(report)
    counts = [at for at, one in enumerate(reports) if isinstance(one, RowTokens)]
    for cut in [counts[0], *counts[4:10], counts[-1], len(reports) - 1]:
        again = Received(request)
        for report in reports[:cut]:
            again.add(report)
        for report in reports_of(reasoning, [again.resubmission()]):
            again.add(report)
        assert again.all() == right.all(), f"cut at {cut}"


def test_forced_tokens_do_not_disturb_other_rows(reasoning: Driver) -> None:
    other = Submit(rid="o", prompt="To open a file,", sampling=STRICT, max_tokens=20)
    [alone] = received(reasoning, other)
    beside, _ = received(reasoning, other, asked("a", Sampling(seed=0)))
    assert beside.tokens == alone.tokens


def test_answers_to_raw_prompts_have_no_parts(reasoning: Driver) -> None:
    request = msgspec.structs.replace(
        asked("a", Sampling(seed=0)), messages=None, chat=ChatOptions(), prompt="the <think>"
    )
    [one] = received(reasoning, request)
    assert one.parts == [[]]
    assert one.end[1].reasoning_tokens == 0


def test_the_dropped_token_counts_for_no_penalty(reasoning: Driver) -> None:
    harsh = Sampling(temperature=0.7, seed=5, repetition_penalty=3.0, frequency_penalty=2.0)
    request = asked("a", harsh, n=8, max_tokens=30)
    reports = reports_of(reasoning, [request])
    right, again = Received(request), Received(request)
    for report in reports:
        right.add(report)
        if isinstance(report, RowTokens) and report.index < 10:
            again.add(report)
    for report in reports_of(reasoning, [again.resubmission()]):
        again.add(report)
    assert again.tokens == right.tokens
