"""Long texts are tokenized in a thread while other requests run."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from protocol.errors import ContextTooLong, DeadlineExceeded, InternalError, InvalidRequest
from protocol.types import ChatMessage, Sampling
from protocol.worker import Report, RowAccepted, RowAdmitted, RowFailed, Submit
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

    def wait(request: object) -> list[int]:
        assert threading.get_ident() != main
        opened.wait(10)
        return encode(request)  # type: ignore[arg-type]

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


def test_messages_are_tokenized_there_too(busy: Driver, gate: threading.Event) -> None:
    messages = [ChatMessage(role="user", content=LONG)]
    busy.outcomes["chat"] = Outcome()
    request = Submit(rid="chat", messages=messages, sampling=Sampling(), max_tokens=2)
    assert busy.engine.submit(request) is None
    gate.set()
    busy.run()
    assert len(busy.outcomes["chat"].tokens) == 2


@pytest.mark.parametrize(
    ("text", "more", "error"),
    [
        (LONG, {"max_tokens": 1 << 20}, ContextTooLong.code),
        (LONG + "\ud800", {}, InvalidRequest.code),
    ],
    ids=["too long", "no text"],
)
def test_a_refusal_is_reported(
    busy: Driver, reports: list[Report], text: str, more: dict[str, int], error: str
) -> None:
    busy.submit("long", text, **more)
    busy.run()
    (failed,) = (one for one in reports if getattr(one, "rid", "") == "long")
    assert isinstance(failed, RowFailed)
    assert failed.error.code == error


def test_a_failure_of_the_tokenizer_ends_one_request(
    busy: Driver, reports: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> list[int]:
        raise ZeroDivisionError

    monkeypatch.setattr(busy.engine._text, "encode", fail)
    busy.submit("long", LONG)
    busy.run()
    (failed,) = (one for one in reports if isinstance(one, RowFailed))
    assert failed.error.code == InternalError.code
    assert "log" in failed.error.message


def test_a_request_can_be_cancelled_while_it_is_tokenized(
    busy: Driver, gate: threading.Event
) -> None:
    busy.submit("long", LONG, max_tokens=3)
    busy.step()
    threading.Timer(0.05, gate.set).start()
    busy.engine.cancel("long")
    assert not busy.engine._submissions.waiting
    busy.run()
    assert busy.outcomes["long"].reason == "cancelled"


def test_a_deadline_can_pass_meanwhile(busy: Driver, gate: threading.Event) -> None:
    busy.submit("long", LONG, max_tokens=3, deadline_s=0.0)
    busy.step()
    error = busy.outcomes["long"].error
    assert error is not None
    assert error.code == DeadlineExceeded.code
    gate.set()
