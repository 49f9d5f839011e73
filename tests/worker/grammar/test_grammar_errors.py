"""An error of llguidance ends one request. It fails no step, and no other request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvd.worker.grammar.mask_threads import MaskBatch
from kvd.worker.grammar.matcher import MaskFiller, Matcher
from protocol.errors import InvalidRequest, Overloaded
from tests.worker.core.driver import Driver
from tests.worker.grammar.test_requests import DIGITS, PERSON, WARM, WORDS

pytestmark = pytest.mark.mlx


class Panic(BaseException):
    """Panics of Rust derive from `BaseException`."""


class Failing:
    """An `LLMatcher` of which one method raises an error, from its ``at``-th call on."""

    def __init__(self, plain: Any, name: str, error: BaseException, at: int) -> None:
        self._plain = plain
        self._name = name
        self._error = error
        self._left = at

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._plain, name)
        return self._counted(method) if name == self._name else method

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._left -= 1
            if self._left <= 0:
                raise self._error
            return method(*arguments)

        return call


def matcher_of(driver: Driver, rid: str) -> Matcher:
    driver.run(until=lambda: rid in driver.engine._batch.requests)
    (completion,) = driver.engine._batch.requests[rid].completions
    assert completion.matcher is not None
    return completion.matcher


@pytest.mark.parametrize("name", ["consume_token", "unsafe_compute_mask_ptr"])
@pytest.mark.parametrize("error", [RuntimeError("bad state"), Panic("bad state"), MemoryError()])
def test_a_grammar_that_fails_ends_its_own_request(
    demo: Driver, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException
) -> None:
    wanted = {
        "free": demo.alone(WORDS, WARM, max_tokens=30, ignore_eos=True),
        "other": demo.alone(WORDS, WARM, grammar=DIGITS, max_tokens=60),
        "bad": demo.alone(WORDS, WARM, grammar=PERSON, max_tokens=60),
    }
    failed: list[object] = []
    monkeypatch.setattr(demo.engine._out_of_memory, "step_failed", failed.append)
    for rid, more in (("bad", PERSON), ("other", DIGITS)):
        demo.submit(rid, WORDS, WARM, grammar=more, max_tokens=60)
    demo.submit("free", WORDS, WARM, max_tokens=30, ignore_eos=True)
    matcher = matcher_of(demo, "bad")
    matcher.grammar = Failing(matcher.grammar, name, error, 4)
    demo.run()

    bad = demo.outcomes.pop("bad")
    assert bad.error is not None
    kind = Overloaded if isinstance(error, MemoryError) else InvalidRequest
    assert bad.error.code == kind.code
    assert kind is Overloaded or "bad state" in bad.error.message
    assert 0 < len(bad.tokens) < len(wanted["bad"].tokens)
    assert bad.tokens == wanted.pop("bad").tokens[: len(bad.tokens)]
    assert demo.outcomes == wanted
    assert not failed


def test_an_optional_grammar_that_fails_is_dropped(demo: Driver) -> None:
    demo.submit("bad", WORDS, WARM, grammar=DIGITS, max_tokens=30)
    matcher = matcher_of(demo, "bad")
    matcher.optional = True
    matcher.grammar = Failing(matcher.grammar, "consume_token", Panic("bad state"), 3)
    demo.run()

    assert demo.outcomes["bad"].reason == "length"
    assert len(demo.outcomes["bad"].tokens) == 30


def test_a_grammar_that_fails_with_the_last_token_changes_no_answer(demo: Driver) -> None:
    wanted = demo.alone(WORDS, WARM, grammar=PERSON, max_tokens=5)
    demo.submit("bad", WORDS, WARM, grammar=PERSON, max_tokens=5)
    matcher = matcher_of(demo, "bad")
    matcher.grammar = Failing(matcher.grammar, "consume_token", Panic("bad state"), 5)
    demo.run()

    assert demo.outcomes["bad"] == wanted


@pytest.mark.parametrize("name", ["rollback", "is_accepting", "consume_token"])
def test_a_matcher_raises_no_error_of_its_grammar(demo: Driver, name: str) -> None:
    demo.submit("bad", WORDS, WARM, grammar=DIGITS, max_tokens=8)
    matcher = matcher_of(demo, "bad")
    mask = MaskFiller(demo.engine._text.vocab_size).compute(matcher)
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
    matcher.grammar = Failing(matcher.grammar, name, Panic("bad state"), 1)
    matcher.push_ahead(int(allowed[0]))
    matcher.settle()

    assert not matcher.complete
    assert matcher.failed
    assert isinstance(matcher.failure(), InvalidRequest)
    demo.run()


@pytest.mark.parametrize("name", ["is_error", "is_accepting"])
def test_the_failure_of_a_matcher_may_be_an_error_of_its_grammar(demo: Driver, name: str) -> None:
    """A step asks for it if no token is allowed, and must not fail."""
    demo.submit("bad", WORDS, WARM, grammar=DIGITS, max_tokens=8)
    matcher = matcher_of(demo, "bad")
    matcher.grammar = Failing(matcher.grammar, name, Panic("bad state"), 1)

    assert "bad state" in str(matcher.failure())
    assert matcher.failed
    demo.run()


def test_a_failed_step_is_not_a_grammar_error(demo: Driver) -> None:
    """The tokens of a step could not be computed: all its rows are rebuilt."""
    demo.submit("good", WORDS, WARM, grammar=DIGITS, max_tokens=8)
    matcher = matcher_of(demo, "good")

    def tokens() -> list[int]:
        raise MemoryError("the device's memory is full")

    batch = MaskBatch([(matcher, 0)], tokens, MaskFiller(512))
    batch.run()
    with pytest.raises(MemoryError):
        batch.take_back()
    assert batch.taken_back
    assert not matcher.failed
    demo.run()
    assert demo.outcomes["good"].reason == "stop"
