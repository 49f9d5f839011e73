"""Long texts are tokenized in a thread while other requests run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.errors import ContextTooLong, DeadlineExceeded, InternalError, InvalidRequest
from protocol.tools import ChatOptions, Tool
from protocol.types import ChatMessage, Sampling
from protocol.worker import Report, RowAccepted, RowAdmitted, RowFailed, RowFinished, Submit
from tests.worker.core.driver import Driver, Outcome
from tests.worker.core.prompts import prompt_of

pytestmark = pytest.mark.mlx

LONG = "A long text about trees and rivers. " * 200
"""Some 1600 tokens of the embedded model."""


@pytest.fixture
def reports(demo: Driver, monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    """All reports of the engine, in order."""
    seen: list[Report] = []
    take = demo.take

    def keep(some: list[Report]) -> None:
        seen.extend(some)
        take(some)

    monkeypatch.setattr(demo, "take", keep)
    return seen


@pytest.fixture
def busy(demo: Driver) -> Iterator[Driver]:
    """An engine with a request that runs."""
    demo.submit("runs", prompt_of(90, 90), max_tokens=40, ignore_eos=True)
    demo.run(until=lambda: len(demo.outcomes["runs"].tokens) > 2)
    yield demo
    demo.run()
    assert len(demo.outcomes["runs"].tokens) == 40
    demo.outcomes.clear()
    demo.engine._prefix_cache.tree.clear()


@pytest.fixture
def gate(busy: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Tokenizing waits for this event, and asserts that a thread does it."""
    opened, main = threading.Event(), threading.get_ident()
    text = busy.engine._text
    encode = text.encode

    def wait(request: Submit, rendered: str) -> list[int]:
        assert threading.get_ident() != main
        opened.wait(10)
        return encode(request, rendered)

    monkeypatch.setattr(text, "encode", wait)
    yield opened
    opened.set()


def test_other_requests_go_on_while_a_long_text_is_tokenized(
    busy: Driver, gate: threading.Event, reports: list[Report]
) -> None:
    assert busy.submit("long", LONG, max_tokens=3) is None
    before = len(busy.outcomes["runs"].tokens)
    for _ in range(5):
        busy.step()
    assert len(busy.outcomes["runs"].tokens) == before + 5
    gate.set()
    busy.run()

    kinds = [type(one) for one in reports if getattr(one, "rid", "") == "long"]
    assert kinds[:2] == [RowAccepted, RowAdmitted]
    (accepted,) = (one for one in reports if isinstance(one, RowAccepted))
    usage = busy.outcomes["long"].usage
    assert usage is not None
    assert accepted.prompt_tokens == usage.prompt_tokens
    assert usage.completion_tokens == 3


def test_its_answer_is_that_of_an_idle_engine(demo: Driver, busy: Driver) -> None:
    busy.submit("long", LONG, max_tokens=8)
    busy.run()
    found = busy.outcomes.pop("long")
    demo.engine._prefix_cache.tree.clear()
    assert found == demo.alone(LONG, max_tokens=8)


def test_a_template_runs_in_the_main_thread(
    busy: Driver, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only there its CPU time can be limited."""
    template = busy.engine._text.template
    render = template.render
    threads: list[int] = []

    def noted(*given: Any) -> str:
        threads.append(threading.get_ident())
        return render(*given)

    monkeypatch.setattr(template, "render", noted)
    messages = [ChatMessage(role="user", content=LONG)]
    busy.outcomes["chat"] = Outcome()
    request = Submit(rid="chat", messages=messages, sampling=Sampling(), max_tokens=2)
    assert busy.engine.submit(request) is None
    assert threads == [threading.get_ident()]
    gate.set()
    busy.run()
    assert len(threads) == 1
    assert len(busy.outcomes["chat"].tokens) == 2


def test_tools_count_as_text(busy: Driver, gate: threading.Event) -> None:
    messages = [ChatMessage(role="user", content="Look.")]
    chat = ChatOptions(tools=[Tool(name="look", description=LONG)])
    busy.outcomes["chat"] = Outcome()
    request = Submit(rid="chat", messages=messages, chat=chat, sampling=Sampling(), max_tokens=2)
    assert busy.engine.submit(request) is None
    gate.set()
    busy.run()
    assert busy.outcomes["chat"].over


@pytest.mark.parametrize(
    ("text", "more", "error"),
    [
        (LONG, {"max_tokens": 1 << 20}, ContextTooLong.code),
        (LONG + "\ud800", {}, InvalidRequest.code),
        (LONG, {"n": 100}, InvalidRequest.code),
    ],
    ids=["too long", "no text", "too many choices"],
)
def test_a_refusal_is_reported(
    busy: Driver, reports: list[Report], text: str, more: dict[str, int], error: str
) -> None:
    busy.submit("long", text, **more)
    busy.run()
    (failed,) = (one for one in reports if getattr(one, "rid", "") == "long")
    assert isinstance(failed, RowFailed)
    assert failed.error.code == error


@pytest.mark.parametrize("error", [ZeroDivisionError, MemoryError])
def test_a_failure_of_the_tokenizer_ends_one_request(
    busy: Driver, reports: list[Report], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """A step that is repeated would read the same error of the thread again."""

    def fail(*_: object) -> list[int]:
        raise error

    monkeypatch.setattr(busy.engine._text, "encode", fail)
    busy.submit("long", LONG)
    busy.run()
    (failed,) = (one for one in reports if isinstance(one, RowFailed))
    assert failed.error.code == InternalError.code
    assert "log" in failed.error.message


@pytest.mark.parametrize("stage", ["stream", "_choice"])
def test_an_error_after_that_ends_one_request(
    busy: Driver, reports: list[Report], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("a tokenizer's error")

    owner = busy.engine._text if stage == "stream" else busy.engine._submissions
    monkeypatch.setattr(owner, stage, fail)
    busy.submit("long", LONG)
    busy.run()
    (failed,) = (one for one in reports if isinstance(one, RowFailed))
    assert failed.error.code == InternalError.code


def test_short_memory_repeats_what_failed(
    busy: Driver, reports: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    submissions = busy.engine._submissions
    choice, failures = submissions._choice, [MemoryError("once")]

    def fail(*given: Any) -> Any:
        if failures:
            raise failures.pop()
        return choice(*given)

    monkeypatch.setattr(submissions, "_choice", fail)
    monkeypatch.setattr(busy, "check", lambda: None)  # the step ended early
    busy.submit("long", LONG, max_tokens=3)
    busy.run()
    assert not failures
    kinds = [type(one) for one in reports if getattr(one, "rid", "") == "long"]
    assert kinds[:2] == [RowAccepted, RowAdmitted]
    assert len(busy.outcomes["long"].tokens) == 3


@pytest.mark.parametrize("choices", [1, 2])
def test_a_request_can_be_cancelled_while_it_is_tokenized(
    busy: Driver, gate: threading.Event, reports: list[Report], choices: int
) -> None:
    """Nothing waits for the thread."""
    busy.submit("first", LONG, max_tokens=3)
    busy.submit("long", LONG, max_tokens=3, n=choices)
    busy.step()
    busy.engine.cancel("long")
    busy.step()
    assert not gate.is_set()
    (finished,) = (one for one in reports if getattr(one, "rid", "") == "long")
    assert isinstance(finished, RowFinished)
    assert finished.reason == "cancelled"
    gate.set()
    busy.run()
    assert len(busy.outcomes["first"].tokens) == 3


def test_a_deadline_can_pass_meanwhile(busy: Driver, gate: threading.Event) -> None:
    busy.submit("long", LONG, max_tokens=3, deadline_s=0.0)
    busy.step()
    error = busy.outcomes["long"].error
    assert error is not None
    assert error.code == DeadlineExceeded.code
    gate.set()
